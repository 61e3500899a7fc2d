"""MaTS: RegMean's equations solved from the merge by task arithmetic, by so many steps of conjugate
gradients.

Source: Tam et al., Merging by Matching Models in Task Parameter Subspaces, 2024 (arXiv 2312.04339);
the authors' code (r-three/mats, src/merging/conjugateGradient_fisherMerging.py, 100 steps from task
arithmetic at 0.3, scipy's tolerance), whose Gram matrices of inputs these are. Here each is divided
by its number of tokens.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor, nn

from featcal.core.precision import SUM_DTYPE
from featcal.merging.features import Seen
from featcal.merging.forward_order import ForwardOrder
from featcal.merging.job import Job, Named
from featcal.merging.regmean import shrunk, split, weights_of_site

TOLERANCE = 1e-5  # scipy's: how much smaller than the right-hand side the residual has to be


def conjugate_gradients(G: Tensor, R: Tensor, start: Tensor, steps: int) -> tuple[Tensor, int]:
    """X with X G = R by conjugate gradients from a start, all of X as one vector; and the steps
    that were made.

    Args: G (d, d) symmetric, no negative eigenvalue; R, start (o, d).
    """
    X, residual = start.clone(), R - start @ G
    direction, square = residual.clone(), residual.square().sum()
    for step in range(steps):
        if square.sqrt() <= TOLERANCE * R.square().sum().sqrt():
            return X, step
        product = direction @ G
        length = square / (direction * product).sum()
        X += length * direction
        residual -= length * product
        before, square = square, residual.square().sum()
        direction = residual + square / before * direction
    return X, steps


def mats_matrix(
    grams: Sequence[Tensor], base: Tensor, vectors: Sequence[Tensor], scale: float, steps: int
) -> tuple[Tensor, int]:
    """W nearest to Σ ‖(W − Wᵢ) Gᵢ^½‖² after so many steps from W₀ + s Σ τᵢ, in float64; and the
    steps that were made.

    Args: grams Gᵢ (d, d); base W₀ and vectors τᵢ = Wᵢ − W₀ (o, d).
    """
    R = sum(
        ((base + vector) @ G for G, vector in zip(grams[1:], vectors[1:], strict=True)),
        (base + vectors[0]) @ grams[0],
    )
    return conjugate_gradients(
        sum(grams[1:], grams[0]), R, base + scale * sum(vectors[1:], vectors[0]), steps
    )


def solved(job: Job, path: str, block: nn.Module, seen: dict[str, Seen]) -> Iterator[Named]:
    """The weights of a block's linears."""
    chosen = job.settings
    for site in next(iter(seen.values())).grams:
        base, vectors, parts = weights_of_site(job, path, site, block)
        grams = [
            shrunk(sums.grams[site] / sums.tokens[site], chosen.off_diagonal).to(SUM_DTYPE)
            for sums in seen.values()
        ]
        weight, made = mats_matrix(grams, base, vectors, chosen.scale, chosen.steps)
        job.record.setdefault("steps", {})[path + site[0]] = made
        yield from split(weight, parts)


def mats(job: Job) -> Iterator[Named]:
    """Every tensor by MaTS: linears of the blocks by conjugate gradients, all others by their
    mean.
    """
    yield from ForwardOrder(job, partial(solved, job), own=True).tensors()
