"""LOT: of each linear and norm the task vector with the least drift of outputs from every expert's,
on the experts' own features.

Restated from the published formula (Sun et al., 2025, arXiv 2505.23859, Eqs. 9 and 12); its
authors' code could not be consulted, so what the formula leaves open (sums over tokens, not means;
biases, shifts, embeddings by their mean) is a reading.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from featcal.core.precision import SUM_DTYPE
from featcal.merging.features import Seen
from featcal.merging.forward_order import ForwardOrder
from featcal.merging.job import Job, Named
from featcal.merging.regmean import split, weights_of_site


def lot_matrix(grams: list[Tensor], vectors: list[Tensor]) -> Tensor:
    """T* = (Σ XᵢᵀXᵢ)⁺ Σ XᵢᵀXᵢTᵢ (Eq. 9), rows of T being inputs; here τ* = (Σ τᵢ Gᵢ)(Σ Gᵢ)⁺ with
    rows of τ outputs, in float64.

    Args: grams Gᵢ = XᵢᵀXᵢ (d, d); vectors τᵢ (o, d). Where no task has features τ* is 0: the base's
    weight stays.
    """
    left = sum(grams[1:], grams[0])
    right = sum(
        (vector @ G for G, vector in zip(grams[1:], vectors[1:], strict=True)),
        vectors[0] @ grams[0],
    )  # (o, d)
    smallest: Tensor = right @ torch.linalg.pinv(left, hermitian=True)
    return smallest


def lot_scale(squares: list[Tensor], vectors: list[Tensor]) -> Tensor:
    """τ* = Σ ‖x̂ᵢ‖² τᵢ / Σ ‖x̂ᵢ‖² in every dimension (Eq. 12); squares and vectors (d,), 0 where no
    task has features.
    """
    weight = torch.stack(squares)
    total = weight.sum(0)
    return (weight * torch.stack(vectors)).sum(0) / torch.where(
        total > 0, total, torch.ones_like(total)
    )


def solved(job: Job, path: str, block: nn.Module, seen: dict[str, Seen]) -> Iterator[Named]:
    """The weights of a block's linears and the scales of its norms."""
    first = next(iter(seen.values()))
    for site in first.grams:
        base, vectors, parts = weights_of_site(job, path, site, block)
        yield from split(
            base + lot_matrix([sums.grams[site] for sums in seen.values()], vectors), parts
        )
    for norm in first.squares:
        name = f"{path}{norm}.weight"
        ours, theirs = job.read(name)
        vectors = [expert.to(SUM_DTYPE) - ours.to(SUM_DTYPE) for expert in theirs]
        yield (
            name,
            ours.to(SUM_DTYPE) + lot_scale([sums.squares[norm] for sums in seen.values()], vectors),
        )


def lot(job: Job) -> Iterator[Named]:
    """Every tensor by LOT."""
    yield from ForwardOrder(job, partial(solved, job), own=True).tensors()
