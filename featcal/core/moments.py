"""Moments of one task at one site: sums over tokens, nothing divided yet.

Sums (not means) because they add: over batches, over shards of a task, over processes.
Legend: n tokens · d inputs · o outputs · w token weights. Knows nothing of models, settings or files.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from featcal.core.precision import SUM_DTYPE

STRIPES = 4  # 8 gain nothing more on the widths of CLIP (measured on a CPU: 768 features, 2,080 tokens)


def gram(x: Tensor) -> Tensor:
    """xᵀx of x (n, d): the stripes above the diagonal are computed, the others mirrored, so 5/8 of the work."""
    d = x.shape[1]
    edges = [d * i // STRIPES for i in range(STRIPES + 1)]
    G = x.new_empty(d, d)
    for start, end in zip(edges, edges[1:], strict=False):
        G[:end, start:end] = x[:, :end].T @ x[:, start:end]
        G[start:end, :start] = G[:start, start:end].T
    return G


@dataclass
class Moments:
    """What the regression of one task needs of the features (Eqs. 13 and 52, before the division by n).

    With `folded`, C holds the expert's weight already: a linear that puts out far less than it takes in (the last one of
    every MLP) is cheaper that way, and the result is the same because Eq. 17 needs C only as the product C Wᵀ.
    """

    G: Tensor  # (d, d)  Σ w x_cal x_calᵀ
    C: Tensor  # (d, d)  Σ w x_cal x_expᵀ;  folded: (d, o)  Σ w x_cal (W x_exp)ᵀ
    cal: Tensor  # (d,)  Σ w x_cal
    exp: Tensor  # (d,)  Σ w x_exp
    weight: Tensor  # ()  Σ w: the paper's n
    folded: bool = False

    @classmethod
    def zero(cls, d: int, o: int | None = None, device: torch.device | str = "cpu") -> "Moments":
        """No tokens yet; with `o` the cross moment is kept folded, (d, o)."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=SUM_DTYPE, device=device)

        return cls(zeros(d, d), zeros(d, d if o is None else o), zeros(d), zeros(d), zeros(), folded=o is not None)

    def add(self, x_cal: Tensor, x_exp: Tensor, w: Tensor, W: Tensor | None = None) -> None:
        """Add n tokens: products in the data's precision, sums in float64.

        Args: x_cal, x_exp (n, d); w (n,), at least 0; W (o, d), the expert's weight, only where moments are folded.
        """
        root = w.sqrt()[:, None]  # on both factors, so that the Gram matrix stays a square of one factor
        target = x_exp if W is None else x_exp @ W.T  # (n, d) or (n, o)
        x = x_cal * root  # (n, d)
        self.G += gram(x)
        self.C += x.T @ (target * root)
        self.cal += w @ x_cal
        self.exp += w @ x_exp
        self.weight += w.sum(dtype=SUM_DTYPE)

    def __add__(self, other: "Moments") -> "Moments":
        G, C, weight = self.G + other.G, self.C + other.C, self.weight + other.weight
        return Moments(G, C, self.cal + other.cal, self.exp + other.exp, weight, self.folded)
