"""Iso-C: a merged task vector with all singular values equal, so no shared direction dominates.

Source: Marczak et al., No Task Left Behind, 2025 (arXiv 2502.04959); FusionBench,
fusion_bench/method/isotropic_merging.
"""

from collections.abc import Sequence

from torch import Tensor

from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.merging.sources import VOCABULARY
from featcal.merging.tensors import matrix_by_matrix, tensor_sum, thin_svd


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
