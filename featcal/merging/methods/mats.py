"""MaTS: RegMean's equations solved by conjugate gradients that start at task arithmetic.

Source: Tam et al., Merging by Matching Models in Task Parameter Subspaces, 2024 (arXiv 2312.04339);
the authors' code (r-three/mats, src/merging/conjugateGradient_fisherMerging.py, 100 steps from task
arithmetic at 0.3, scipy's tolerance). Here each Gram matrix is divided by its number of tokens.
"""

from collections.abc import Iterator, Sequence

from pydantic import NonNegativeInt
from torch import Tensor, nn

from featcal.core.precision import SUM_DTYPE
from featcal.merging.forward_order import ForwardOrder, Seen, mean_gram, split, weights_of_site
from featcal.merging.registry import Fraction, Job, Named, method
from featcal.merging.tensors import added

TOLERANCE = 1e-5  # scipy's: how much smaller than the right-hand side the residual has to be


def conjugate_gradients(G: Tensor, R: Tensor, start: Tensor, steps: int) -> tuple[Tensor, int]:
    """Solve X G = R by conjugate gradients, all of X as one vector. Returns: X, and steps made.

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
    """Minimise Σ ‖(W − Wᵢ) Gᵢ^½‖² from W₀ + s Σ τᵢ in float64. Returns: W (o, d), and steps made.

    Args: grams Gᵢ (d, d); base W₀ and vectors τᵢ = Wᵢ − W₀ (o, d).
    """
    R = added([(base + vector) @ G for G, vector in zip(grams, vectors, strict=True)])
    return conjugate_gradients(added(grams), R, base + scale * added(vectors), steps)


@method("mats", source="Tam et al., 2024", needs=("batches",))
def mats(
    job: Job,
    steps: NonNegativeInt = 100,
    scale: float = 0.3,
    off_diagonal: Fraction = 1.0,
) -> Iterator[Named]:
    """Yield every tensor by MaTS: linears of the blocks by conjugate gradients, others by mean.

    steps: of conjugate gradients.   scale: of the task arithmetic they start from.
    off_diagonal: as for regmean; 1 leaves the Gram matrices as they are.
    """

    def solved(path: str, block: nn.Module, seen: dict[str, Seen]) -> Iterator[Named]:
        for site in next(iter(seen.values())).grams:
            base, vectors, parts = weights_of_site(job, path, site, block)
            grams = [mean_gram(sums, site, off_diagonal).to(SUM_DTYPE) for sums in seen.values()]
            weight, made = mats_matrix(grams, base, vectors, scale, steps)
            job.record.setdefault("steps", {})[path + site[0]] = made
            yield from split(weight, parts)

    yield from ForwardOrder(job, solved, own=True).tensors()
