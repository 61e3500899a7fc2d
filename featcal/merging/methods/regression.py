"""Mergers that solve each linear for outputs near the experts', on features carried block by block.

Sources: RegMean, Jin et al., 2023 (bloomberg/dataless-model-merging, src/configs/exps: 0.1 off the
diagonal for T5 and DeBERTa); FusionBench's code for CLIP, 0.95. MaTS, Tam et al., 2024 (arXiv
2312.04339) and the authors' code (r-three/mats, src/merging/conjugateGradient_fisherMerging.py, 100
steps from task arithmetic at 0.3, scipy's tolerance); here each Gram matrix is divided by its number
of tokens. LOT, restated from the published formula (Sun et al., 2025, arXiv 2505.23859, Eqs. 9 and
12); its authors' code could not be consulted. Where the formula is silent we sum over tokens, without
dividing by their number, and average biases, shifts and embeddings."""

from collections.abc import Sequence

import torch
from pydantic import NonNegativeInt, PositiveFloat
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


def lot_matrix(grams: list[Tensor], vectors: list[Tensor], rtol: float | None = None) -> Tensor:
    """Return τ* = (Σ τᵢ Gᵢ)(Σ Gᵢ)⁺, (o, d) in float64: Eq. 9 with one row per output.

    Args: grams Gᵢ = XᵢᵀXᵢ (d, d); vectors τᵢ (o, d); rtol: eigenvalues of Σ Gᵢ below this share of
    the largest count as 0. Without any features τ* is 0.
    """
    right = tensor_sum([vector @ G for G, vector in zip(grams, vectors, strict=True)])  # (o, d)
    return right @ torch.linalg.pinv(tensor_sum(grams), hermitian=True, rtol=rtol)


def lot_scale(squares: list[Tensor], vectors: list[Tensor]) -> Tensor:
    """Return τ* = Σ ‖x̂ᵢ‖² τᵢ / Σ ‖x̂ᵢ‖² per dimension (Eq. 12), (d,); 0 without any features."""
    weight = torch.stack(squares)
    total = weight.sum(0)
    divisor = torch.where(total > 0, total, torch.ones_like(total))
    return (weight * torch.stack(vectors)).sum(0) / divisor


@method(
    source="Sun et al., 2025 (arXiv 2505.23859)",
    needs=("batches",),
    note="from the published formula: its authors' code could not be consulted",
)
def lot(job: MergeJob, rtol: PositiveFloat | None = None) -> NamedTensors:
    """Yield every tensor by LOT.

    rtol: eigenvalues below this share of the largest count as 0. Default: d times float64's
          rounding.
    """

    def solve(_: str, grams: Sequence[Gram], W0: Tensor, vectors: list[Tensor]) -> Tensor:
        return W0 + lot_matrix([gram.total for gram in grams], vectors, rtol)

    yield from ForwardOrder(job, solve, own=True, solve_norm=lot_scale).tensors()
