"""Iso-C and Iso-CTS: a merged task vector whose singular values are all the same, so that no shared
direction outweighs the rest.

Source: Marczak et al., No Task Left Behind, 2025 (arXiv 2502.04959); FusionBench,
fusion_bench/method/isotropic_merging.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from featcal.merging.job import Job, Named
from featcal.merging.matrices import matrix_by_matrix
from featcal.merging.tsv import orthogonal


def iso_c_matrix(vectors: Sequence[Tensor]) -> Tensor:
    """τ = σ̄ U Vᵀ, where U S Vᵀ = Σ τᵢ and σ̄ is the mean of S.

    Args: vectors τᵢ (o, d) in float64.  Returns: (o, d).
    """
    U, S, Vt = torch.linalg.svd(sum(vectors[1:], vectors[0]), full_matrices=False)
    tau: Tensor = S.mean() * (U @ Vt)
    return tau


def iso_cts_matrix(vectors: Sequence[Tensor], common: float) -> Tensor:
    """τ = σ̄ U⊥ V⊥ᵀ: the leading directions of Σ τᵢ, then as many of every τᵢ − U_c U_cᵀ τᵢ, the
    task's own, as there is room for.

    Of r = min(o, d) directions N k are the tasks' own, k = round((r − ⌊common · r⌋)/N), and the
    first r − N k are common; σ̄ is the mean of all their singular values.

    Args: vectors τᵢ (o, d) of N experts in float64; common: share of directions that are common.
    Returns: (o, d).
    """
    r, count = min(vectors[0].shape), len(vectors)
    own = round((r - int(r * common)) / count)
    first = max(0, r - own * count)
    U, S, Vt = torch.linalg.svd(sum(vectors[1:], vectors[0]), full_matrices=False)
    left, values, right = [U[:, :first]], [S[:first]], [Vt[:first].T]
    for vector in vectors:
        beyond = vector - U[:, :first] @ (U[:, :first].T @ vector)
        P, s, Qt = torch.linalg.svd(beyond, full_matrices=False)
        left.append(P[:, :own])
        values.append(s[:own])
        right.append(Qt[:own].T)
    tau: Tensor = (
        torch.cat(values).mean()
        * orthogonal(torch.cat(left, 1))
        @ orthogonal(torch.cat(right, 1)).T
    )
    return tau


def iso_c(job: Job) -> Iterator[Named]:
    """The task vector of every matrix by Iso-C, of every other tensor the mean of the experts'."""
    yield from matrix_by_matrix(job, iso_c_matrix)


def iso_cts(job: Job) -> Iterator[Named]:
    """As iso_c, by Iso-CTS."""
    yield from matrix_by_matrix(job, partial(iso_cts_matrix, common=job.settings.common))
