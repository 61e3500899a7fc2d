"""The public function `svc`: singular values of a merged model's change brought down where its
experts share directions.

Source: Li et al., When Shared Knowledge Hurts, 2026 (arXiv 2602.05536, Eqs. 4 and 8, Algorithm 1);
FusionBench, fusion_bench/method/singular_value_calibration/utils.py, whose smallest coefficient of
0.1 is the default.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from featcal.merging.arithmetic import task_vectors
from featcal.merging.job import Named, silent
from featcal.merging.merge import Model
from featcal.merging.repair import Repair, opened
from featcal.merging.vocabulary import VOCABULARY, is_vocabulary
from featcal.settings import require

TINY = 1e-12  # FusionBench's least squared length of an expert's response


def svc_matrix(tau: Tensor, vectors: Sequence[Tensor], least: float) -> Tensor:
    """Σ γᵣ σᵣ uᵣ vᵣᵀ, where τ = Σ σᵣ uᵣ vᵣᵀ: with aᵢ = uᵣᵀ τᵢ, γᵣ = N / Σ max(least, ⟨uᵣᵀ τ, aᵢ⟩ /
    ‖aᵢ‖²).

    A coefficient ⟨…⟩ above 1 says that the merge moves further along an expert's own response than
    the expert does.

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
    experts: Mapping[str, Model] | Sequence[Model],
    *,
    out: str | Path | None = None,
    least: float = 0.1,
    exclude: Sequence[str] = VOCABULARY,
    device: str | torch.device = "cpu",
    progress: Callable[[str], None] = silent,
) -> nn.Module | Path:
    """The merged model with every matrix of its change from the base calibrated by SVC, without
    data; other tensors stay.

    merged, base, experts: modules or checkpoint folders, as of `merge`.   out: a folder to write
    instead of returning a module.
    least:    the smallest coefficient that counts; the lower, the more a direction is raised that
              the experts do not share.
    exclude:  names of matrices, with * for any letters, that stay as they are; embeddings of words
              when left out.
    Returns:  the module, or the path `out`.
    Raises:   BadSetting; MissingTensor, TensorsDiffer when the models do not fit; NotFinite;
              DiskFull.
    """
    require(least > 0, "svc.least", least, "must be above 0")
    pool = opened("svc", merged, base, experts)
    return pool.result(
        _calibrated(pool, least, tuple(exclude), torch.device(device), progress), out
    )


def _calibrated(
    pool: Repair,
    least: float,
    exclude: tuple[str, ...],
    device: torch.device,
    progress: Callable[[str], None],
) -> Iterator[Named]:
    """Every tensor, in the merged model's dtypes."""
    for name in pool.merged.names:
        tensor = pool.merged.finite_tensor(name)
        matrix = tensor.dim() == 2 and tensor.is_floating_point()
        if matrix and name not in pool.apart and not is_vocabulary(name, exclude):
            start = pool.base.finite_tensor(name).to(device)
            (tau,) = task_vectors(start, [tensor.to(device)])
            vectors = task_vectors(
                start, [expert.finite_tensor(name).to(device) for expert in pool.experts.values()]
            )
            tensor = (start.double() + svc_matrix(tau, vectors, least)).to(tensor.dtype).cpu()
            progress(f"svc: {name}")
        yield name, tensor
