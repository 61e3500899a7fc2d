"""RegMean and RegMean++: of each linear the weight whose outputs are nearest the experts' on their
own tasks' features.

RegMean takes every expert's own features, RegMean++ those of the merge so far, carried forward
block by block.
Sources: Jin et al., 2023; Nguyen et al., 2025; FusionBench's code for CLIP.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from featcal.core.precision import SUM_DTYPE
from featcal.errors import SingularGram
from featcal.merging.features import Seen, Site
from featcal.merging.forward_order import ForwardOrder
from featcal.merging.job import Job, Named


def shrunk(G: Tensor, factor: float) -> Tensor:
    """G (d, d) with everything off its diagonal multiplied by the factor."""
    return factor * G + (1 - factor) * torch.diag(G.diagonal())


def regmean_matrix(grams: list[Tensor], vectors: list[Tensor], place: str = "linear") -> Tensor:
    """τ = (Σ τᵢ Gᵢ)(Σ Gᵢ)⁻¹ in float64: RegMean's Wᵀ = (Σ Gᵢ)⁻¹ Σ Gᵢ Wᵢᵀ with θ₀ taken off both
    sides.

    Args:    grams Gᵢ (d, d), off-diagonals shrunk already; vectors τᵢ = Wᵢ − W₀ (o, d).
    Returns: (o, d).   Raises: SingularGram where Σ Gᵢ has no Cholesky factor.
    """
    left = sum(grams[1:], grams[0])
    right = sum(
        (G @ vector.T for G, vector in zip(grams[1:], vectors[1:], strict=True)),
        grams[0] @ vectors[0].T,
    )  # (d, o)
    factor, failed = torch.linalg.cholesky_ex(left)
    if failed or not factor.isfinite().all():
        raise SingularGram(
            f"regmean: {place}",
            0.0,
            left.shape[0],
            "give more samples, or",
            "lower merge.off_diagonal below 1; if a feature is zero everywhere, no samples help: use the method lot instead",
        )
    return torch.cholesky_solve(right, factor).T.contiguous()


def weights_of_site(
    job: Job, path: str, site: Site, block: nn.Module
) -> tuple[Tensor, list[Tensor], list[tuple[str, int, bool]]]:
    """W₀ and every τᵢ of a site's linears on top of one another, (Σo, d) in float64; and each one's
    name, rows, and whether it is kept as (d, o), as GPT-2's are."""
    parts = []
    bases, experts = [], [[] for _ in job.experts]  # type: ignore[var-annotated]
    for linear in site:
        name = f"{path}{linear}.weight"
        turned = not isinstance(block.get_submodule(linear), nn.Linear)
        base, theirs = job.read(name)
        upright = [(t.T if turned else t).to(SUM_DTYPE) for t in (base, *theirs)]
        bases.append(upright[0])
        for expert, weight in zip(experts, upright[1:], strict=True):
            expert.append(weight - upright[0])
        parts.append((name, upright[0].shape[0], turned))
    return torch.cat(bases), [torch.cat(vectors) for vectors in experts], parts


def split(weight: Tensor, parts: list[tuple[str, int, bool]]) -> Iterator[Named]:
    """A site's weight (Σo, d) back to its linears."""
    rows = torch.split(weight, [rows for _, rows, _ in parts])
    for (name, _, turned), part in zip(parts, rows, strict=True):
        yield name, (part.T if turned else part).contiguous()


def solved(job: Job, path: str, block: nn.Module, seen: dict[str, Seen]) -> Iterator[Named]:
    """The weights of a block's linears; per task G is divided by its number of tokens."""
    factor = job.settings.off_diagonal
    for site in next(iter(seen.values())).grams:
        base, vectors, parts = weights_of_site(job, path, site, block)
        grams = [shrunk(sums.grams[site] / sums.tokens[site], factor) for sums in seen.values()]
        yield from split(base + regmean_matrix(grams, vectors, path + site[0]), parts)


def regmean(job: Job) -> Iterator[Named]:
    """Merge by RegMean: linears of the blocks by regression, all other tensors by their mean."""
    yield from ForwardOrder(job, partial(solved, job), own=True).tensors()


def regmean_plus_plus(job: Job) -> Iterator[Named]:
    """Every tensor by RegMean++: as RegMean on the merge's features; what lies after the last block
    stays the base's.
    """
    yield from ForwardOrder(job, partial(solved, job), own=False).tensors()
