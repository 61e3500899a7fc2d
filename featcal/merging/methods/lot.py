"""LOT: the task vector of each linear and norm whose outputs drift least from every expert's.

Restated from the published formula (Sun et al., 2025, arXiv 2505.23859, Eqs. 9 and 12); its
authors' code could not be consulted. Where the formula is silent we sum over tokens, without
dividing by their number, and average biases, shifts and embeddings.
"""

from collections.abc import Iterator
from functools import partial

import torch
from pydantic import PositiveFloat
from torch import Tensor, nn

from featcal.core.precision import SUM_DTYPE
from featcal.merging.forward_order import BlockSums, ForwardOrder, site_weights, split_site
from featcal.merging.registry import MergeJob, NamedTensor, method
from featcal.merging.tensors import tensor_sum


def lot_matrix(grams: list[Tensor], vectors: list[Tensor], rtol: float | None = None) -> Tensor:
    """Return τ* = (Σ τᵢ Gᵢ)(Σ Gᵢ)⁺, (o, d) in float64: Eq. 9 with one row per output.

    Args: grams Gᵢ = XᵢᵀXᵢ (d, d); vectors τᵢ (o, d); rtol: eigenvalues of Σ Gᵢ below this share of
    the largest count as 0. Without any features τ* is 0.
    """
    right = tensor_sum([vector @ G for G, vector in zip(grams, vectors, strict=True)])  # (o, d)
    smallest: Tensor = right @ torch.linalg.pinv(tensor_sum(grams), hermitian=True, rtol=rtol)
    return smallest


def lot_scale(squares: list[Tensor], vectors: list[Tensor]) -> Tensor:
    """Return τ* = Σ ‖x̂ᵢ‖² τᵢ / Σ ‖x̂ᵢ‖² per dimension (Eq. 12), (d,); 0 without any features."""
    weight = torch.stack(squares)
    total = weight.sum(0)
    divisor = torch.where(total > 0, total, torch.ones_like(total))
    return (weight * torch.stack(vectors)).sum(0) / divisor


def solve_block(
    job: MergeJob, rtol: float | None, path: str, block: nn.Module, sums: dict[str, BlockSums]
) -> Iterator[NamedTensor]:
    """Yield the weights of a block's linears and the scales of its norms."""
    first = next(iter(sums.values()))
    for site in first.grams:
        base, vectors, parts = site_weights(job, path, site, block)
        tau = lot_matrix([own.grams[site] for own in sums.values()], vectors, rtol)
        yield from split_site(base + tau, parts)
    for norm in first.squares:
        name = f"{path}{norm}.weight"
        base, experts = job.read(name)
        vectors = [expert.to(SUM_DTYPE) - base.to(SUM_DTYPE) for expert in experts]
        tau = lot_scale([own.squares[norm] for own in sums.values()], vectors)
        yield name, base.to(SUM_DTYPE) + tau


@method(
    "lot",
    source="Sun et al., 2025 (arXiv 2505.23859)",
    needs=("batches",),
    note="from the published formula: its authors' code could not be consulted",
)
def lot(job: MergeJob, rtol: PositiveFloat | None = None) -> Iterator[NamedTensor]:
    """Yield every tensor by LOT.

    rtol: eigenvalues below this share of the largest count as 0. Default: d times float64's
          rounding.
    """
    yield from ForwardOrder(job, partial(solve_block, job, rtol), own=True).tensors()
