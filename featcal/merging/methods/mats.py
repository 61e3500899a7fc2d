"""MaTS: RegMean's equations solved by conjugate gradients that start at task arithmetic.

Source: Tam et al., Merging by Matching Models in Task Parameter Subspaces, 2024 (arXiv 2312.04339);
the authors' code (r-three/mats, src/merging/conjugateGradient_fisherMerging.py, 100 steps from task
arithmetic at 0.3, scipy's tolerance). Here each Gram matrix is divided by its number of tokens.
"""

from collections.abc import Sequence

from pydantic import NonNegativeInt
from torch import Tensor

from featcal.merging.forward_order import ForwardOrder, Gram
from featcal.merging.registry import MergeJob, NamedTensors, method
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


@method(source="Tam et al., 2024", needs=("batches",))
def mats(
    job: MergeJob, steps: NonNegativeInt = 100, scale: float = 0.3, off_diagonal: Fraction = 1.0
) -> NamedTensors:
    """Yield every tensor by MaTS, other tensors than linears of the blocks by their mean.

    A linear minimises Σ ‖(W − Wᵢ) Gᵢ^½‖² from W₀ + s Σ τᵢ.

    steps:        of conjugate gradients.
    scale:        s of the task arithmetic they start from.
    off_diagonal: as for regmean; 1 leaves the Gram matrices as they are.
    """
    made: dict[str, int] = {}

    def solve(label: str, grams: Sequence[Gram], W0: Tensor, vectors: list[Tensor]) -> Tensor:
        G = [gram.mean(off_diagonal) for gram in grams]
        R = tensor_sum([(W0 + vector) @ own for own, vector in zip(G, vectors, strict=True)])
        start = W0 + scale * tensor_sum(vectors)
        W, made[label] = conjugate_gradients(tensor_sum(G), R, start, steps)
        return W

    merge = ForwardOrder(job, solve, own=True)
    job.record["steps"] = made
    yield from merge.tensors()
