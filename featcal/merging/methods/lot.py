"""LOT: the task vector of each linear and norm whose outputs drift least from every expert's.

Restated from the published formula (Sun et al., 2025, arXiv 2505.23859, Eqs. 9 and 12); its
authors' code could not be consulted. What the formula leaves open is our reading: sums over tokens,
not means; biases, shifts and embeddings by their mean.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from featcal.core.precision import SUM_DTYPE
from featcal.merging.forward_order import ForwardOrder, Seen, split, weights_of_site
from featcal.merging.registry import Job, Named, method
from featcal.merging.tensors import added


def lot_matrix(grams: list[Tensor], vectors: list[Tensor]) -> Tensor:
    """T* = (Σ XᵢᵀXᵢ)⁺ Σ XᵢᵀXᵢTᵢ (Eq. 9), rows of T being inputs; here τ* = (Σ τᵢ Gᵢ)(Σ Gᵢ)⁺ with
    rows of τ outputs, in float64.

    Args: grams Gᵢ = XᵢᵀXᵢ (d, d); vectors τᵢ (o, d). Without any features τ* is 0.
    """
    right = added([vector @ G for G, vector in zip(grams, vectors, strict=True)])  # (o, d)
    smallest: Tensor = right @ torch.linalg.pinv(added(grams), hermitian=True)
    return smallest


def lot_scale(squares: list[Tensor], vectors: list[Tensor]) -> Tensor:
    """τ* = Σ ‖x̂ᵢ‖² τᵢ / Σ ‖x̂ᵢ‖² in every dimension (Eq. 12), (d,); 0 where no task has features."""
    weight = torch.stack(squares)
    total = weight.sum(0)
    divisor = torch.where(total > 0, total, torch.ones_like(total))
    return (weight * torch.stack(vectors)).sum(0) / divisor


def solved(job: Job, path: str, block: nn.Module, seen: dict[str, Seen]) -> Iterator[Named]:
    """Yield the weights of a block's linears and the scales of its norms."""
    first = next(iter(seen.values()))
    for site in first.grams:
        base, vectors, parts = weights_of_site(job, path, site, block)
        tau = lot_matrix([sums.grams[site] for sums in seen.values()], vectors)
        yield from split(base + tau, parts)
    for norm in first.squares:
        name = f"{path}{norm}.weight"
        base, experts = job.read(name)
        vectors = [expert.to(SUM_DTYPE) - base.to(SUM_DTYPE) for expert in experts]
        tau = lot_scale([sums.squares[norm] for sums in seen.values()], vectors)
        yield name, base.to(SUM_DTYPE) + tau


@method(
    "lot",
    source="Sun et al., 2025 (arXiv 2505.23859)",
    needs=("batches",),
    note="from the published formula: its authors' code could not be consulted",
)
def lot(job: Job) -> Iterator[Named]:
    """Yield every tensor by LOT."""
    yield from ForwardOrder(job, partial(solved, job), own=True).tensors()
