"""Iso-C and Iso-CTS: a merged task vector with all singular values equal, so no shared direction
dominates; Iso-CTS reserves some directions for each task.

Source: Marczak et al., No Task Left Behind, 2025 (arXiv 2502.04959); FusionBench,
fusion_bench/method/isotropic_merging.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from featcal.merging.methods.tsv_merge import orthogonal
from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.merging.sources import VOCABULARY
from featcal.merging.tensors import matrix_by_matrix, tensor_sum, thin_svd
from featcal.settings import Fraction


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
