"""SVC: shrink the singular values of a merged model's change where its experts share directions.

Source: Li et al., When Shared Knowledge Hurts, 2026 (arXiv 2602.05536, Eqs. 4 and 8, Algorithm 1);
FusionBench, fusion_bench/method/singular_value_calibration/utils.py. After Iso-C all singular values
are equal, so the directions that SVC weighs are arbitrary and its result is not reproducible.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from featcal.merging.merge import Form
from featcal.merging.registry import NamedTensors
from featcal.merging.sources import Tensors, is_vocabulary, require_alike, source
from featcal.merging.tensors import conv1d_names, task_vectors
from featcal.models.batch import Model
from reproduction.field.settings import SVC_LEAST

TINY = 1e-12  # FusionBench's least squared length of an expert's response


def svc_matrix(tau: Tensor, vectors: Sequence[Tensor], least: float = SVC_LEAST) -> Tensor:
    """Return Σ γᵣ σᵣ uᵣ vᵣᵀ, where τ = Σ σᵣ uᵣ vᵣᵀ, aᵢ = uᵣᵀ τᵢ and
    γᵣ = N / Σ max(least, ⟨uᵣᵀ τ, aᵢ⟩ / ‖aᵢ‖²), (o, d).

    tau: of the merged model.   vectors: τᵢ of N experts.   All (o, d), float64.
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
    least: float = SVC_LEAST,
    out: Path | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module | Path:
    """Apply SVC to every matrix but word embeddings; return the module, or the folder `out`."""
    form, ours = Form.of(base, experts), source(merged, "merged").tensors
    start = form.source.tensors
    theirs = {task: source(experts[task], f"expert {task!r}").tensors for task in sorted(experts)}
    require_alike(start, {**theirs, "merged": ours})
    tensors = calibrated_tensors(ours, start, [*theirs.values()], least, torch.device(device))
    return form.result(tensors, out)


def calibrated_tensors(
    merged: Tensors, base: Tensors, experts: Sequence[Tensors], least: float, device: torch.device
) -> NamedTensors:
    """Yield every tensor in the merged model's dtype."""
    turned = conv1d_names(base)
    for name, each in merged.items():
        tensor = each.finite()
        if tensor.dim() == 2 and tensor.is_floating_point() and not is_vocabulary(name):
            start = base[name].finite().to(device)
            own = [tensor.to(device), *(expert[name].finite().to(device) for expert in experts)]
            vectors = task_vectors(start, own)
            if name in turned:  # stored as (d, o)
                vectors = [vector.T for vector in vectors]
            change = svc_matrix(vectors[0], vectors[1:], least)
            change = change.T if name in turned else change
            tensor = (start.double() + change).to(tensor.dtype).cpu()
        yield name, tensor
