"""MaTS: RegMean's equations solved by conjugate gradients that start at task arithmetic.

Source: Tam et al., Merging by Matching Models in Task Parameter Subspaces, 2024 (arXiv 2312.04339);
the authors' code (r-three/mats, src/merging/conjugateGradient_fisherMerging.py, 100 steps from task
arithmetic at 0.3, scipy's tolerance). Here each Gram matrix is divided by its number of tokens.
"""

from collections.abc import Iterator, Sequence

from pydantic import NonNegativeInt
from torch import Tensor, nn

from featcal.merging.forward_order import BlockSums, ForwardOrder, site_weights, split_site
from featcal.merging.registry import MergeJob, NamedTensor, method
from featcal.merging.tensors import tensor_sum
from featcal.settings import Fraction

TOLERANCE = 1e-5  # scipy's: of the residual, relative to the right-hand side


def conjugate_gradients(G: Tensor, R: Tensor, start: Tensor, steps: int) -> tuple[Tensor, int]:
    """Solve X G = R by conjugate gradients, all of X as one vector. Returns: X and step count.

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
    """Minimise Σ ‖(W − Wᵢ) Gᵢ^½‖² from W₀ + s Σ τᵢ in float64. Returns: W (o, d), step count.

    Args: grams Gᵢ (d, d); base W₀ and vectors τᵢ = Wᵢ − W₀ (o, d).
    """
    R = tensor_sum([(base + vector) @ G for G, vector in zip(grams, vectors, strict=True)])
    return conjugate_gradients(tensor_sum(grams), R, base + scale * tensor_sum(vectors), steps)


@method("mats", source="Tam et al., 2024", needs=("batches",))
def mats(
    job: MergeJob, steps: NonNegativeInt = 100, scale: float = 0.3, off_diagonal: Fraction = 1.0
) -> Iterator[NamedTensor]:
    """Yield every tensor by MaTS: linears of the blocks by conjugate gradients, others by mean.

    steps:        of conjugate gradients.
    scale:        of the task arithmetic they start from.
    off_diagonal: as for regmean; 1 leaves the Gram matrices as they are.
    """

    def solve_block(
        path: str, block: nn.Module, sums: dict[str, BlockSums]
    ) -> Iterator[NamedTensor]:
        for site in next(iter(sums.values())).grams:
            base, vectors, parts = site_weights(job, path, site, block)
            grams = [own.mean_gram(site, off_diagonal) for own in sums.values()]
            weight, made = mats_matrix(grams, base, vectors, scale, steps)
            job.record.setdefault("steps", {})[path + site[0]] = made
            yield from split_site(weight, parts)

    yield from ForwardOrder(job, solve_block, own=True).tensors()
