"""TSV-Merge: of every expert's matrix its leading singular vectors, made orthogonal to those of the
others.

Source: Gargiulo et al., Task Singular Vectors, 2025 (arXiv 2412.00081); FusionBench,
fusion_bench/method/task_singular_vector.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from featcal.merging.job import Job, Named
from featcal.merging.matrices import matrix_by_matrix


def orthogonal(columns: Tensor) -> Tensor:
    """The matrix with orthonormal columns that is nearest to one (m, k), k ≤ m: P Qᵀ, where P S Qᵀ
    is its SVD.
    """
    P, _, Qt = torch.linalg.svd(columns, full_matrices=False)
    nearest: Tensor = P @ Qt
    return nearest


def tsv_matrix(vectors: Sequence[Tensor]) -> Tensor:
    """τ = U⊥ Σ V⊥ᵀ, where U, Σ and V hold the ⌊r/N⌋ leading singular triples of every τᵢ beside one
    another, r = min(o, d).

    Triples of a singular value 0 have no direction and are left out, so that a LoRA expert adds
    nothing but its own rank.

    Args:    vectors τᵢ (o, d) of N experts in float64.
    Returns: (o, d); the mean of the τᵢ where r < N leaves no expert a rank.
    """
    rank = min(vectors[0].shape) // len(vectors)
    if not rank:
        return sum(vectors[1:], vectors[0]) / len(vectors)
    left, values, right = [], [], []
    for vector in vectors:
        U, S, Vt = torch.linalg.svd(vector, full_matrices=False)
        kept = S[:rank] > S[0] * max(vector.shape) * torch.finfo(S.dtype).eps
        left.append(U[:, :rank][:, kept])
        values.append(S[:rank][kept])
        right.append(Vt[:rank][kept].T)
    tau: Tensor = (
        orthogonal(torch.cat(left, 1)) * torch.cat(values) @ orthogonal(torch.cat(right, 1)).T
    )
    return tau


def tsv_merge(job: Job) -> Iterator[Named]:
    """The task vector of every matrix by TSV-Merge, of every other tensor the mean of the
    experts'.
    """
    yield from matrix_by_matrix(job, tsv_matrix)
