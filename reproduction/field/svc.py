"""SVC: shrink the singular values of a merged model's change where its experts share directions.

Source: Li et al., When Shared Knowledge Hurts, 2026 (arXiv 2602.05536, Eqs. 4 and 8, Algorithm 1);
FusionBench, fusion_bench/method/singular_value_calibration/utils.py. After Iso-C all singular values
are equal, so the directions that SVC weighs are arbitrary and its result is not reproducible.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Models:
    """A merged model, its base and experts, read tensor by tensor.   form: what a result is like."""

    merged: Tensors
    base: Tensors
    experts: dict[str, Tensors]  # by task, sorted
    form: Form

    @classmethod
    def opened(cls, merged: Model, base: Model, experts: Mapping[str, Model]) -> "Models":
        """Open modules or checkpoint folders. Raises: MissingTensor, TensorsDiffer."""
        form, ours = Form.of(base, experts), source(merged, "merged").tensors
        theirs = {t: source(experts[t], f"expert {t!r}").tensors for t in sorted(experts)}
        require_alike(form.source.tensors, {**theirs, "merged": ours})
        return cls(ours, form.source.tensors, theirs, form)


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
    """Apply SVC to every matrix but word embeddings, without data; models are modules or folders.

    Returns: the module, or the folder `out`.
    Raises: MissingTensor, TensorsDiffer where the models do not fit; NotFinite; DiskFull.
    """
    models = Models.opened(merged, base, experts)
    return models.form.result(calibrated_tensors(models, least, torch.device(device)), out)


def calibrated_tensors(models: Models, least: float, device: torch.device) -> NamedTensors:
    """Yield every tensor in the merged model's dtype."""
    turned = conv1d_names(models.base)
    for name, each in models.merged.items():
        tensor = each.finite()
        if tensor.dim() == 2 and tensor.is_floating_point() and not is_vocabulary(name):
            start = models.base[name].finite().to(device)
            (tau,) = task_vectors(start, [tensor.to(device)])
            theirs = [expert[name].finite().to(device) for expert in models.experts.values()]
            vectors = [tau, *task_vectors(start, theirs)]
            if name in turned:  # stored as (d, o)
                vectors = [vector.T for vector in vectors]
            change = svc_matrix(vectors[0], vectors[1:], least)
            change = change.T if name in turned else change
            tensor = (start.double() + change).to(tensor.dtype).cpu()
        yield name, tensor
