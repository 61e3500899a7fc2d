"""LOT: the task vector of each linear and norm whose outputs drift least from every expert's.

Restated from the published formula (Sun et al., 2025, arXiv 2505.23859, Eqs. 9 and 12); its
authors' code could not be consulted. Where the formula is silent we sum over tokens, without
dividing by their number, and average biases, shifts and embeddings.
"""

from collections.abc import Sequence

import torch
from pydantic import PositiveFloat
from torch import Tensor

from featcal.merging.forward_order import ForwardOrder, Gram
from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.merging.tensors import tensor_sum


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
