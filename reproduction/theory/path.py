"""Averages of a Jacobian along a straight segment, applied to a vector (Eqs. 19 and 31).

A = ∫₀¹ J(start + t·change) dt is never formed: Gauss-Legendre nodes and one Jacobian-vector product at each give A v.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

Map = Callable[[Tensor], Tensor]


def nodes_and_weights(count: int) -> list[tuple[float, float]]:
    """Gauss-Legendre nodes and weights on [0, 1]; exact for polynomials up to degree 2·count − 1."""
    places, weights = np.polynomial.legendre.leggauss(count)
    return [(float(x + 1) / 2, float(w) / 2) for x, w in zip(places, weights, strict=True)]


def path_average(function: Map, start: Tensor, change: Tensor, vectors: Tensor, nodes: int) -> Tensor:
    """∫₀¹ J(start + t·change) v dt for several v at once.

    Args:    function maps (n, …) to (n, …), every case on its own; start and change (n, …); vectors (k, n, …).
    Returns: (k, n, …). With v = change it is function(start + change) − function(start), by the fundamental theorem.
    """
    count = len(vectors)
    tangents = vectors.flatten(0, 1)  # (k n, …)
    total = None
    for t, weight in nodes_and_weights(nodes):
        here = (start + t * change).repeat(count, *[1] * (start.dim() - 1))  # (k n, …)
        moved = weight * directional(function, here, tangents)
        total = moved if total is None else total + moved
    assert total is not None
    return total.unflatten(0, (count, -1))


def directional(function: Map, place: Tensor, vector: Tensor) -> Tensor:
    """J(place) vector, by forward differentiation. Attention runs in its plain form, the only one that has such a derivative."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        moved: Tensor = jvp(function, (place,), (vector,))[1]
    return moved
