"""Moments of one task at one site: sums over tokens, nothing divided yet.

Sums (not means) because they add: over batches, over shards of a task, over processes.
Legend: n tokens · d inputs · o outputs · w token weights. Knows nothing of models, settings or
files.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from featcal.core.precision import SUM_DTYPE, product, wide

STRIPE, MOST_STRIPES = (
    64,
    16,
)  # measured on a CPU, 64 to 4096 features: narrower products lose more than they save
STRIPE_ON_GPU = 1024  # a GPU fills up on wide products only; not measured


def stripes(d: int, on_gpu: bool = False) -> Iterator[tuple[int, int]]:
    """First and last row (excluded) of the stripes into which a square matrix (d, d) is cut."""
    count = max(1, min(MOST_STRIPES, d // (STRIPE_ON_GPU if on_gpu else STRIPE)))
    edges = [d * i // count for i in range(count + 1)]
    return zip(edges, edges[1:], strict=False)


def add_gram(G: Tensor, x: Tensor) -> None:
    """Add xᵀx of x (n, d) to G (d, d), in every stripe from its diagonal block on; the rest of G is
    left to `mirror`.

    With k stripes that is (k + 1)/2k of the work of the whole product.
    """
    x = x if x.is_cuda else wide(x)
    for start, end in stripes(len(G), G.is_cuda):
        G[start:end, start:] += product(x[:, start:end].T, x[:, start:])


def mirror(G: Tensor) -> Tensor:
    """Complete, in place, what `add_gram` summed: the stripes' part below the diagonal is the one
    above it, transposed.
    """
    for start, end in stripes(len(G), G.is_cuda):
        G[end:, start:end] = G[start:end, end:].T
    return G


@dataclass
class Moments:
    """What the regression of one task needs of the features (Eqs. 13 and 52, before the division by
    n).

    With `folded`, C is taken against the expert's output instead of its input: a linear that puts
    out far less than it takes in (the last one of every MLP) is cheaper that way, and nothing is
    lost, because Eq. 17 needs C only as the product C Wᵀ = Σ w x_cal (W x_exp + b)ᵀ − Σ w x_cal bᵀ.
    """

    G: Tensor  # (d, d)  Σ w x_cal x_calᵀ, complete after `mirror`
    C: Tensor  # (d, d)  Σ w x_cal x_expᵀ;  folded: (d, o)  Σ w x_cal (W x_exp + b)ᵀ
    cal: Tensor  # (d,)  Σ w x_cal
    exp: Tensor  # (d,)  Σ w x_exp
    weight: Tensor  # ()  Σ w: the paper's n
    folded: bool = False
    lag: Tensor | None = (
        # (o,)  Σ w β (r_exp − r_cal), of folded moments whose target holds it
        # (`Calibration.residual`)
        None
    )
    spread: Tensor | None = None  # (2,)  Σ w ‖x_cal‖⁴ and Σ w², for `ledoit_wolf`

    @classmethod
    def zero(
        cls,
        d: int,
        o: int | None = None,
        device: torch.device | str = "cpu",
        lagging: bool = False,
        spreading: bool = False,
    ) -> "Moments":
        """No tokens yet; with `o` the cross moment is kept folded, (d, o), and where `lagging` the
        residual stream's lag too.
        """

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=SUM_DTYPE, device=device)

        lag = zeros(o) if lagging and o is not None else None
        sums = zeros(d, d), zeros(d, d if o is None else o), zeros(d), zeros(d), zeros()
        return cls(*sums, folded=o is not None, lag=lag, spread=zeros(2) if spreading else None)

    def add(
        self,
        x_cal: Tensor,
        x_exp: Tensor,
        w: Tensor,
        y_exp: Tensor | None = None,
        lag: Tensor | None = None,
    ) -> None:
        """Add n tokens: products in the data's precision, in float32 where that is half; sums in
        float64.

        Args: x_cal, x_exp (n, d); w (n,), at least 0; y_exp (n, o), the expert's W x_exp + b, only
        where moments are folded, and
              lag (n, o), β (r_exp − r_cal), only where they have one: it is added to what the
              expert puts out.
        """
        target = x_exp if y_exp is None else y_exp  # (n, d) or (n, o)
        if lag is not None and self.lag is not None:
            target = target + lag
            self.lag += w @ lag
        if self.spread is not None:
            lengths, each = wide(x_cal).square().sum(1).to(SUM_DTYPE), w.to(SUM_DTYPE)
            self.spread += torch.stack([each @ lengths.square(), each @ each])
        kept = w != 0
        if not kept.all():
            x_cal, x_exp, target, w = x_cal[kept], x_exp[kept], target[kept], w[kept]
        x = x_cal
        if (w != 1).any():
            root = w.sqrt()[
                :, None
            ]  # on both factors, so that the Gram matrix stays a square of one factor
            x, target = wide(x) * root, wide(target) * root
        add_gram(self.G, x)
        self.C += product(x.T, target)
        self.cal += w @ wide(x_cal)
        self.exp += w @ wide(x_exp)
        self.weight += w.sum(dtype=SUM_DTYPE)

    def __iadd__(self, other: "Moments") -> "Moments":
        for mine, theirs in zip(self.sums, other.sums, strict=True):
            mine += theirs
        return self

    @property
    def sums(self) -> tuple[Tensor, ...]:
        """Everything that adds."""
        return (
            self.G,
            self.C,
            self.cal,
            self.exp,
            self.weight,
            *(s for s in (self.lag, self.spread) if s is not None),
        )


@dataclass
class Rows:
    """The tokens of one task at one site, batch by batch: what `Moments` are sums of, for
    `kernel.py`.
    """

    x_cal: list[Tensor] = field(default_factory=list)  # (n, d)
    x_exp: list[Tensor] = field(default_factory=list)  # (n, d)
    w: list[Tensor] = field(default_factory=list)  # (n,)
    lag: list[Tensor] = field(
        default_factory=list
    )  # (n, o)  β (r_exp − r_cal), where the residual stream is aimed at

    def add(self, x_cal: Tensor, x_exp: Tensor, w: Tensor, lag: Tensor | None = None) -> None:
        """Keep copies of n tokens, but for those without weight: x_cal, x_exp (n, d); w (n,), at
        least 0; lag (n, o).
        """
        kept = w != 0
        for into, given in ((self.x_cal, x_cal), (self.x_exp, x_exp), (self.w, w), (self.lag, lag)):
            if given is not None:
                into.append(given[kept])
