"""Proposition 2: drift as mismatches that later blocks carry on, by path-averaged Jacobians (Eqs. 4, 5 and 19 to 24)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from reproduction.theory.drift import BlockDrift
from reproduction.theory.found import Found, dots, norms, relative
from reproduction.theory.path import path_average
from reproduction.theory.tower import Tower


def check_propagation(merged: Tower, expert: Tower, drifts: Sequence[BlockDrift], nodes: Sequence[int], found: Found) -> None:
    """p = A e_before block by block, and the unrolled sum against the final drift, for every number of nodes.

    With the most nodes also where final drift comes from: ⟨P m, e_L⟩ / ‖e_L‖² of every block's mismatch, which add up to 1.
    """
    final = drifts[-1].after
    for count in sorted(nodes):
        errors, carried = [], [drifts[0].before]
        for i, (function, drift) in enumerate(zip(merged.maps, drifts, strict=True)):
            split = count == max(nodes)
            vectors = torch.stack([drift.before, *(carried if split else [torch.stack(carried).sum(0)])])
            moved = path_average(function, expert.features[i], drift.before, vectors, count)  # A v, (k, n, …)
            there = norms(drift.propagated) > 0
            errors.append(relative(moved[0] - drift.propagated, drift.propagated)[there])
            carried = [*moved[1:], drift.mismatch]
        found.exact("proposition_2", "recursion_digits", torch.cat(errors), nodes=count)
        found.exact("proposition_2", "unrolled_digits", relative(torch.stack(carried).sum(0) - final, final), nodes=count)
    found.exact("proposition_2", "digits", torch.cat([*errors, relative(torch.stack(carried).sum(0) - final, final)]))
    for name, share in zip(["embeddings", *(f"{i:02d}" for i in range(len(drifts)))], shares(carried, final), strict=True):
        found.add("proposition_2", "share_of_final", 100 * float(share), len(final), block=name)


def shares(carried: Sequence[Tensor], final: Tensor) -> list[Tensor]:
    """The part of the final drift that each propagated mismatch makes up, mean over images; they add up to 1."""
    return [(dots(part, final) / dots(final, final)).mean() for part in carried]
