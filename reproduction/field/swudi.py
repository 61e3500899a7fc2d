"""SWUDI's filter: WUDI's closed form with the directions of small eigenvalues damped.

Source: Wei et al., Closed-Form Spectral Regularization for Multi-Task Model Merging, 2026 (arXiv
2606.07289). Its truncation to K directions is left out: the values of K could not be established.
"""

import torch
from pydantic import PositiveFloat
from torch import Tensor

from featcal.merging.methods.matrices import Interference
from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.merging.sources import VOCABULARY
from featcal.merging.tensors import average_tensor, conv1d_names, matrix_names, stacked_vectors


def filtered_minimum(problem: Interference, eta: float) -> Tensor:
    """Return the point that gradient flow from 0 on L(τ)/2 reaches after time η, (o, d):

    τ = Σ (1 − e^(−ησ))/σ · R v vᵀ over eigenvalues σ and eigenvectors v of G; η → ∞ gives R G⁺.
    """
    sigma, V = torch.linalg.eigh(problem.G)
    factors = -torch.expm1(-eta * sigma) / sigma
    enough = sigma * eta > torch.finfo(sigma.dtype).eps
    factors = torch.where(enough, factors, eta)  # the limit at 0
    return (problem.R @ V * factors) @ V.T


@method(source="Wei et al., 2026, without its truncation")
def swudi(job: MergeJob, eta: PositiveFloat) -> NamedTensors:
    """Yield every tensor: matrices by the filter, all others by their mean."""
    matrices, turned = set(matrix_names(job, VOCABULARY)), conv1d_names(job.base)
    for name in job.names:
        if name in matrices:
            W0, vectors, _ = stacked_vectors(job, [name], turned)
            weight = W0 + filtered_minimum(Interference.of(vectors), eta)
            weight = weight.T if name in turned else weight
            yield name, weight.to(job.base[name].dtype)
        else:
            yield name, average_tensor(*job.read(name))
