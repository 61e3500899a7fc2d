"""SVC: shrink the singular values of a merged model's change where its experts share directions.

Source: Li et al., When Shared Knowledge Hurts, 2026 (arXiv 2602.05536, Eqs. 4 and 8, Algorithm 1);
FusionBench, fusion_bench/method/singular_value_calibration/utils.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from featcal.merging.registry import NamedTensor
from featcal.merging.sources import is_vocabulary
from featcal.merging.tensors import task_vectors
from featcal.models.batch import Model
from reproduction.field.models import Models

LEAST = 0.1  # FusionBench's smallest coefficient
TINY = 1e-12  # FusionBench's least squared length of an expert's response


def svc_matrix(tau: Tensor, vectors: Sequence[Tensor], least: float = LEAST) -> Tensor:
    """Return Σ γᵣ σᵣ uᵣ vᵣᵀ, where τ = Σ σᵣ uᵣ vᵣᵀ, aᵢ = uᵣᵀ τᵢ and
    γᵣ = N / Σ max(least, ⟨uᵣᵀ τ, aᵢ⟩ / ‖aᵢ‖²).

    A coefficient ⟨…⟩ above 1 means that the merge moves further along an expert's own response
    than the expert does.

    Args: merged τ and vectors τᵢ (o, d) of N experts in float64; least > 0.  Returns: (o, d).
    """
    U, S, Vt = torch.linalg.svd(tau, full_matrices=False)
    coefficients = []
    for vector in vectors:
        response = U.T @ vector  # (r, d)
        along = S * (Vt * response).sum(1)
        coefficients.append((along / response.square().sum(1).clamp_min(TINY)).clamp_min(least))
    factors = len(vectors) / torch.stack(coefficients).sum(0)  # (r,)
    calibrated: Tensor = U * (factors * S) @ Vt
    return calibrated


def svc(
    merged: Model,
    base: Model,
    experts: Mapping[str, Model],
    *,
    out: Path | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module | Path:
    """Apply SVC to every matrix but word embeddings, without data.

    Args: modules or checkpoint folders.  Returns: the module, or the folder `out`.
    Raises: MissingTensor, TensorsDiffer where the models do not fit; NotFinite; DiskFull.
    """
    models = Models.opened(merged, base, experts)
    return models.result(calibrated_tensors(models, torch.device(device)), out)


def calibrated_tensors(models: Models, device: torch.device) -> Iterator[NamedTensor]:
    """Yield every tensor in the merged model's dtype."""
    for name in models.merged.names:
        tensor = models.merged.finite_tensor(name)
        if tensor.dim() == 2 and tensor.is_floating_point() and not is_vocabulary(name):
            start = models.base.finite_tensor(name).to(device)
            (tau,) = task_vectors(start, [tensor.to(device)])
            theirs = [expert.finite_tensor(name).to(device) for expert in models.experts.values()]
            change = svc_matrix(tau, task_vectors(start, theirs))
            tensor = (start.double() + change).to(tensor.dtype).cpu()
        yield name, tensor
