"""RegMean: for each linear the weight whose outputs are nearest to the experts', each on its own
features.

Source: Jin et al., 2023 (bloomberg/dataless-model-merging, src/configs/exps: 0.1 off the diagonal for
T5 and DeBERTa); FusionBench's code for CLIP, 0.95.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from featcal.errors import SingularGram
from featcal.merging.forward_order import ForwardOrder, Gram
from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.merging.tensors import tensor_sum
from featcal.settings import Fraction

TEXTS, IMAGES = 0.1, 0.95  # factors of the Gram matrices off their diagonal


def regmean_matrix(grams: list[Tensor], vectors: list[Tensor], label: str = "linear") -> Tensor:
    """Return τ = (Σ τᵢ Gᵢ)(Σ Gᵢ)⁻¹ in float64: RegMean's Wᵀ = (Σ Gᵢ)⁻¹ Σ Gᵢ Wᵢᵀ with W₀ subtracted
    on both sides.

    Args:    grams Gᵢ (d, d), off-diagonals already shrunk; vectors τᵢ = Wᵢ − W₀ (o, d).
    Returns: (o, d).   Raises: SingularGram where Σ Gᵢ has no Cholesky factor.
    """
    left = tensor_sum(grams)
    right = tensor_sum([G @ vector.T for G, vector in zip(grams, vectors, strict=True)])  # (d, o)
    factor, failed = torch.linalg.cholesky_ex(left)
    if failed or not factor.isfinite().all():
        ways_out = (
            "give more samples, or",
            "lower merge.off_diagonal below 1; if a feature is zero everywhere, no samples help: "
            "use the method lot instead",
        )
        raise SingularGram(f"regmean: {label}", 0.0, left.shape[0], *ways_out)
    return torch.cholesky_solve(right, factor).T.contiguous()


def regression_mean(job: MergeJob, off_diagonal: float | None, own: bool) -> NamedTensors:
    """Yield every tensor; `own` as of ForwardOrder. Each task's G is divided by its tokens."""

    def solve(label: str, grams: Sequence[Gram], W0: Tensor, vectors: list[Tensor]) -> Tensor:
        return W0 + regmean_matrix([gram.mean(factor) for gram in grams], vectors, label)

    merge = ForwardOrder(job, solve, own)
    factor = off_diagonal
    if factor is None:
        config = getattr(merge.worker, "config", None)
        sees = hasattr(config, "vision_config") or hasattr(config, "patch_size")
        factor = IMAGES if sees else TEXTS
        job.record["off_diagonal"] = factor
    return merge.tensors()


@method(source="Jin et al., 2023; for images FusionBench", needs=("batches",))
def regmean(job: MergeJob, off_diagonal: Fraction | None = None) -> NamedTensors:
    """Yield every tensor by RegMean: linears of the blocks by regression, all others by their mean.

    off_diagonal: factor of the Gram matrices off their diagonal. Default: 0.1 for texts, as the
                  authors' runs have it, and 0.95 for images, as FusionBench's.
    """
    yield from regression_mean(job, off_diagonal, own=True)


@method(source="Nguyen et al., 2025", needs=("batches",))
def regmean_plus_plus(job: MergeJob, off_diagonal: Fraction | None = None) -> NamedTensors:
    """Yield every tensor by RegMean++, which carries the features of the
    merge so far; tensors after the last block stay the base's.

    off_diagonal: as for regmean.
    """
    yield from regression_mean(job, off_diagonal, own=False)
