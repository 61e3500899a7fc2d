"""RegMean: for each linear the weight whose outputs are nearest the experts' on their own features.

Source: Jin et al., 2023; FusionBench's code for CLIP.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from featcal.errors import SingularGram
from featcal.merging.forward_order import ForwardOrder, Seen, mean_gram, split, weights_of_site
from featcal.merging.registry import Fraction, Job, Named, method
from featcal.merging.tensors import added


def regmean_matrix(grams: list[Tensor], vectors: list[Tensor], place: str = "linear") -> Tensor:
    """τ = (Σ τᵢ Gᵢ)(Σ Gᵢ)⁻¹ in float64: RegMean's Wᵀ = (Σ Gᵢ)⁻¹ Σ Gᵢ Wᵢᵀ with θ₀ subtracted on
    both sides.

    Args:    grams Gᵢ (d, d), off-diagonals already shrunk; vectors τᵢ = Wᵢ − W₀ (o, d).
    Returns: (o, d).   Raises: SingularGram where Σ Gᵢ has no Cholesky factor.
    """
    left = added(grams)
    right = added([G @ vector.T for G, vector in zip(grams, vectors, strict=True)])  # (d, o)
    factor, failed = torch.linalg.cholesky_ex(left)
    if failed or not factor.isfinite().all():
        ways_out = (
            "give more samples, or",
            "lower merge.off_diagonal below 1; if a feature is zero everywhere, no samples help: "
            "use the method lot instead",
        )
        raise SingularGram(f"regmean: {place}", 0.0, left.shape[0], *ways_out)
    return torch.cholesky_solve(right, factor).T.contiguous()


def solved(
    job: Job, factor: float, path: str, block: nn.Module, seen: dict[str, Seen]
) -> Iterator[Named]:
    """Yield the weights of a block's linears; each task's G is divided by its number of tokens."""
    for site in next(iter(seen.values())).grams:
        base, vectors, parts = weights_of_site(job, path, site, block)
        grams = [mean_gram(sums, site, factor) for sums in seen.values()]
        yield from split(base + regmean_matrix(grams, vectors, path + site[0]), parts)


@method("regmean", source="Jin et al., 2023; defaults of FusionBench", needs=("batches",))
def regmean(job: Job, off_diagonal: Fraction = 0.95) -> Iterator[Named]:
    """Yield every tensor by RegMean: linears of the blocks by regression, all others by their mean.

    off_diagonal: factor of the Gram matrices off their diagonal; 0.95 for CLIP (0.6 for GPT-2).
    """
    yield from ForwardOrder(job, partial(solved, job, off_diagonal), own=True).tensors()
