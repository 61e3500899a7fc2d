"""Proposition 2: drift as mismatches that later blocks carry on, by path-averaged Jacobians (Eqs.
4, 5 and 19 to 24).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from reproduction.theory.drift import BlockDrift, decomposed
from reproduction.theory.found import Found, dots, norms, relative
from reproduction.theory.path import path_average
from reproduction.theory.tower import Tower


def check_propagation(
    pairs: Sequence[tuple[Tower, Tower]], nodes: Sequence[int], found: Found
) -> None:
    """p = A e_before block by block, and the unrolled sum against the final drift, for every number
    of nodes.

    With the most nodes also where final drift comes from: ⟨P m, e_L⟩ / ‖e_L‖² of every block's
    mismatch, which add up to 1.

    Args:    pairs: the merged model and the expert, on some samples each; a text by itself has no
             padding to be carried along.
    """
    cases = [(merged, expert, decomposed(merged, expert)) for merged, expert in pairs]
    finals = [drifts[-1].after for _, _, drifts in cases]
    for count in sorted(nodes):
        errors, parts = zip(
            *(carry(*case, count, split=count == max(nodes)) for case in cases), strict=True
        )
        recursion = torch.cat(errors)
        unrolled = torch.cat(
            [
                relative(carried.sum(0) - final, final)
                for carried, final in zip(parts, finals, strict=True)
            ]
        )
        found.exact("proposition_2", "recursion_digits", recursion, nodes=count)
        found.exact("proposition_2", "unrolled_digits", unrolled, nodes=count)
    found.exact("proposition_2", "digits", torch.cat([recursion, unrolled]))  # with the most nodes
    each = torch.cat(
        [shares(carried, final) for carried, final in zip(parts, finals, strict=True)], dim=1
    )
    for name, share in zip(
        ["embeddings", *(f"{i:02d}" for i in range(len(each) - 1))], each, strict=True
    ):
        found.add(
            "proposition_2", "share_of_final", 100 * float(share.mean()), len(share), block=name
        )


def carry(
    merged: Tower, expert: Tower, drifts: Sequence[BlockDrift], nodes: int, split: bool
) -> tuple[Tensor, Tensor]:
    """How far A e_before is from p, of every block and case; and every mismatch as later blocks
    carry it on to the end.

    split: each by itself, first what the embeddings leave; otherwise their sum and the last one.
    """
    errors, carried = [], drifts[0].before[None]  # (k, n, …)
    for i, (function, drift) in enumerate(zip(merged.maps, drifts, strict=True)):
        sent = carried if split else carried.sum(0, keepdim=True)
        vectors = (
            torch.cat([drift.before[None], sent]) if i else sent
        )  # e itself is all that reaches the first block
        moved = path_average(
            function, expert.features[i], drift.before, vectors, nodes
        )  # A v, (k, n, …)
        there = norms(drift.propagated) > 0
        errors.append(relative(moved[0] - drift.propagated, drift.propagated)[there])
        carried = torch.cat([moved[-len(sent) :], drift.mismatch[None]])
    return torch.cat(errors), carried


def shares(carried: Tensor, final: Tensor) -> Tensor:
    """The part of the final drift that each propagated mismatch makes up, (k, n); the parts of an
    image add up to 1.
    """
    return torch.stack([dots(part, final) / dots(final, final) for part in carried])
