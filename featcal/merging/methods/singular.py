"""Merging of singular vectors: TSV-Merge makes each expert's leading ones orthogonal to the others';
Iso-C makes all singular values of the sum equal, and Iso-CTS reserves some directions for each task.

Sources: Gargiulo et al., Task Singular Vectors, 2025 (arXiv 2412.00081); Marczak et al., No Task Left
Behind, 2025 (arXiv 2502.04959); FusionBench, fusion_bench/method/{task_singular_vector,
isotropic_merging}.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.merging.sources import VOCABULARY
from featcal.merging.tensors import matrix_by_matrix, tensor_sum
from featcal.settings import Fraction


def thin_svd(matrix: Tensor, size: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return U (o, k), S (k,), Vᵀ (k, d) of a matrix (o, d) of numerical rank k.

    Singular values up to max(o, d) ε of `size` are rounding, and their directions arbitrary.
    Default of `size`: the largest singular value.
    """
    U, S, Vt = torch.linalg.svd(matrix, full_matrices=False)
    rounding = (S[0] if size is None else size) * max(matrix.shape) * torch.finfo(S.dtype).eps
    rank = int((rounding < S).sum())
    return U[:, :rank], S[:rank], Vt[:rank]


def orthogonal(columns: Tensor) -> Tensor:
    """Return P Qᵀ of the SVD P S Qᵀ of (m, k), k ≤ m: the nearest matrix of orthonormal columns."""
    P, _, Qt = torch.linalg.svd(columns, full_matrices=False)
    return P @ Qt


def tsv_matrix(vectors: Sequence[Tensor]) -> Tensor:
    """Return τ = U⊥ Σ V⊥ᵀ, where U, Σ and V concatenate the ⌊r/N⌋ leading singular triples of every
    τᵢ, r = min(o, d). Triples beyond a τᵢ's numerical rank are left out.

    Args:    vectors τᵢ (o, d) of N experts in float64.
    Returns: (o, d); the mean of the τᵢ where r < N leaves no expert a rank.
    """
    rank = min(vectors[0].shape) // len(vectors)
    if not rank:
        return tensor_sum(vectors) / len(vectors)
    left, values, right = [], [], []
    for vector in vectors:
        U, S, Vt = thin_svd(vector)
        left.append(U[:, :rank])
        values.append(S[:rank])
        right.append(Vt[:rank].T)
    U, V = orthogonal(torch.cat(left, 1)), orthogonal(torch.cat(right, 1))
    return U * torch.cat(values) @ V.T


@method(source="Gargiulo et al., 2025; defaults of FusionBench", scale=1.0)
def tsv_merge(job: MergeJob, exclude: tuple[str, ...] = VOCABULARY) -> NamedTensors:
    """Yield the task vector of every matrix by TSV-Merge, of every other tensor the mean.

    exclude: names, with * for any letters, of matrices that are averaged. Default: token tables.
    """
    yield from matrix_by_matrix(job, exclude, tsv_matrix)


def iso_c_matrix(vectors: Sequence[Tensor]) -> Tensor:
    """Return τ = σ̄ U Vᵀ, (o, d), where U S Vᵀ = Σ τᵢ, (o, d) in float64, and σ̄ is the mean of S.

    Only directions of the numerical rank count: those beyond it, as in a sum of LoRA adapters, are
    arbitrary.
    """
    U, S, Vt = thin_svd(tensor_sum(vectors))
    mean = S.mean() if len(S) else 0.0
    return mean * (U @ Vt)


@method(source="Marczak et al., 2025; defaults of FusionBench", scale=1.0)
def iso_c(job: MergeJob, exclude: tuple[str, ...] = VOCABULARY) -> NamedTensors:
    """Yield the task vector of every matrix by Iso-C, of every other tensor the mean.

    The authors try scales up to 3, and FusionBench prints results of 1.5.
    exclude: names, with * for any letters, of matrices that are averaged. Default: token tables.
    """
    yield from matrix_by_matrix(job, exclude, iso_c_matrix)


def iso_cts_matrix(vectors: Sequence[Tensor], common: float) -> Tensor:
    """Return τ = σ̄ U⊥ V⊥ᵀ: leading directions of Σ τᵢ, then of every τᵢ − U_c U_cᵀ τᵢ.

    Of r = min(o, d) directions the first r − N k are common and the others the tasks' own, with
    k = round((r − ⌊common · r⌋)/N) for each task. σ̄ is the mean of all their singular values. Directions
    beyond the numerical rank are left out, as for Iso-C.

    Args: vectors τᵢ (o, d) of N experts in float64; common: share of directions that are common.
    Returns: (o, d).
    """
    r, count = min(vectors[0].shape), len(vectors)
    own = round((r - int(r * common)) / count)
    first = max(0, r - own * count)
    U, S, Vt = thin_svd(tensor_sum(vectors))
    left, values, right = [U[:, :first]], [S[:first]], [Vt[:first].T]
    for vector in vectors:
        beyond = vector - U[:, :first] @ (U[:, :first].T @ vector)
        P, s, Qt = thin_svd(beyond, vector.norm())
        left.append(P[:, :own])
        values.append(s[:own])
        right.append(Qt[:own].T)
    kept = torch.cat(values)
    mean = kept.mean() if len(kept) else 0.0
    return mean * orthogonal(torch.cat(left, 1)) @ orthogonal(torch.cat(right, 1)).T


@method(source="Marczak et al., 2025; defaults of FusionBench", scale=1.0)
def iso_cts(
    job: MergeJob, exclude: tuple[str, ...] = VOCABULARY, common: Fraction = 0.8
) -> NamedTensors:
    """Yield the task vector of every matrix by Iso-CTS, of every other tensor the mean.

    common:  share of directions that the experts have in common.
    exclude: as for iso_c.
    """
    yield from matrix_by_matrix(job, exclude, partial(iso_cts_matrix, common=common))
