"""Averages of a Jacobian along a straight segment, applied to a vector (Eqs. 19 and 31).

A = ∫₀¹ J(start + t·change) dt is never formed: Gauss-Legendre nodes and Jacobian-vector products at
each give A v.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.func import jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

Map = Callable[[Tensor], Tensor]


def nodes_and_weights(count: int) -> list[tuple[float, float]]:
    """Gauss-Legendre nodes and weights on [0, 1]; exact for polynomials up to degree 2·count −
    1.
    """
    places, weights = np.polynomial.legendre.leggauss(count)
    return [(float(x + 1) / 2, float(w) / 2) for x, w in zip(places, weights, strict=True)]


def path_average(
    function: Map, start: Tensor, change: Tensor, vectors: Tensor, nodes: int
) -> Tensor:
    """∫₀¹ J(start + t·change) v dt for several v at once.

    Every node is computed once for all vectors, and what depends on no node, as the first linear of
    v, once for all nodes.

    Args:    function maps (n, …) to (n, …), every case on its own; start and change (n, …); vectors
             (k, n, …).
    Returns: (k, n, …). With v = change it is function(start + change) − function(start), by the
    fundamental theorem.
    """
    places, weights = start.new_tensor(nodes_and_weights(nodes)).T

    def moved(t: Tensor, v: Tensor) -> Tensor:
        return directional(function, start + t * change, v)

    each: Tensor = vmap(vmap(moved, (None, 0)), (0, None))(places, vectors)  # (nodes, k, n, …)
    return torch.tensordot(weights, each, 1)


def directional(function: Map, place: Tensor, vector: Tensor) -> Tensor:
    """J(place) vector, by forward differentiation. Attention runs in its plain form, the only one
    that has such a derivative.
    """
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _FixedWeights():
        moved: Tensor = jvp(function, (place,), (vector,))[1]
    return moved


class _FixedWeights(TorchFunctionMode):
    """Inside, a linear's derivative is W v: torch's own rule multiplies the input by the weight's
    derivative, zero, as well.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is not linear or kwargs:
            return function(*args, **(kwargs or {}))
        (x, v), (W, *b) = unpack_dual(args[0]), args[1:]
        return linear(x, W, *b) if v is None else make_dual(linear(x, W, *b), linear(v, W))
