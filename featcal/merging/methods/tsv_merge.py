"""TSV-Merge: each expert's leading singular vectors, made orthogonal to those of the others.

Source: Gargiulo et al., Task Singular Vectors, 2025 (arXiv 2412.00081); FusionBench,
fusion_bench/method/task_singular_vector.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.merging.sources import VOCABULARY
from featcal.merging.tensors import matrix_by_matrix, tensor_sum, thin_svd


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
