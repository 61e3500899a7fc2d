"""Sums over tokens: the moments of one task at one site, and the drift of features.

Sums add over batches, shards of a task and processes; means do not.
Legend: n tokens · d inputs · o outputs · w token weights.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import nan, sqrt

import torch
from torch import Tensor

from featcal.core.precision import SUM_DTYPE, product, wide
from featcal.errors import BadSetting

# measured on a CPU, 64 to 4096 features: narrower products lose more than they save
STRIPE, MOST_STRIPES = 64, 16
STRIPE_ON_GPU = 1024  # only wide products fill a GPU; not measured
# (module, whether in the last block, (batch, tokens)) -> weights (batch, tokens)
TokenRule = Callable[[str, bool, tuple[int, ...]], Tensor]
PATCH_WEIGHT = 0.01  # of a patch token in CLIP's last block, from the paper's released code
EXPECTED_RULE = "must be a function (module, last block?, (batch, tokens)) -> weights of that shape"
EXPECTED_RULE += ", finite and at least 0"


def stripes(d: int, on_gpu: bool) -> Iterator[tuple[int, int]]:
    """Return the first row of each stripe of a (d, d) matrix, and the row after its last."""
    count = max(1, min(MOST_STRIPES, d // (STRIPE_ON_GPU if on_gpu else STRIPE)))
    return pairwise(d * i // count for i in range(count + 1))


def add_gram(G: Tensor, x: Tensor) -> None:
    """Add xᵀx of x (n, d) to G (d, d), in each stripe from its diagonal block to the right.

    With k stripes that is (k + 1)/2k of the work of the whole product; `mirror` fills in the rest.
    """
    x = x if x.is_cuda else wide(x)
    for start, end in stripes(len(G), G.is_cuda):
        G[start:end, start:] += product(x[:, start:end].T, x[:, start:])


def mirror(G: Tensor) -> Tensor:
    """Complete the sums of `add_gram` in place: copy the part above the diagonal below it."""
    for start, end in stripes(len(G), G.is_cuda):
        G[end:, start:end] = G[start:end, end:].T
    return G


@dataclass
class Moments:
    """Sums over the tokens of one task at one site (Eqs. 13 and 52, before the division by n).

    Eq. 17 needs C only as C Wᵀ. If `folded`, C is therefore taken against outputs instead of
    inputs: against W x_exp + b, which costs less where o is much smaller than d, or if `blended`
    against W (α x_exp + (1−α) x_cal), which costs less where there are few tokens.
    """

    G: Tensor  # (d, d)  Σ w x_cal x_calᵀ, complete after `mirror`
    C: Tensor  # (d, d)  Σ w x_cal x_expᵀ;  folded: (d, o)  Σ w x_cal yᵀ
    cal: Tensor  # (d,)  Σ w x_cal
    exp: Tensor  # (d,)  Σ w x_exp
    weight: Tensor  # ()  Σ w: the paper's n
    gap: Tensor  # (o,)  Σ w β (r_exp − r_cal)
    folded: bool = False
    blended: bool = False

    @classmethod
    def zero(
        cls, d: int, o: int | None = None, device: torch.device | str = "cpu", blended: bool = False
    ) -> "Moments":
        """Return the moments of no tokens, folded if `o` is given."""
        zeros = partial(torch.zeros, dtype=SUM_DTYPE, device=device)
        sums = zeros(d, d), zeros(d, o or d), zeros(d), zeros(d), zeros(()), zeros(o or d)
        return cls(*sums, o is not None, blended)

    def add(
        self,
        x_cal: Tensor,
        x_exp: Tensor,
        w: Tensor,
        y: Tensor | None = None,
        gap: Tensor | None = None,
    ) -> None:
        """Add n tokens: products in the data's precision, at least float32; sums in float64.

        Args:
            x_cal, x_exp: inputs of student and expert (n, d).
            w: token weights (n,), at least 0.
            y: only for folded moments: what C is taken against, (n, o).
            gap: β (r_exp − r_cal), (n, o), which is part of y, times α if blended.
        """
        target = x_exp if y is None else y  # (n, d) or (n, o)
        if gap is not None:
            self.gap += w @ gap
        used = w != 0
        if not used.all():
            x_cal, x_exp, target, w = x_cal[used], x_exp[used], target[used], w[used]
        x = x_cal
        if (w != 1).any():
            root = w.sqrt()[:, None]  # on both factors, so the Gram matrix stays a square
            x, target = wide(x) * root, wide(target) * root
        add_gram(self.G, x)
        self.C += product(x.T, target)
        self.cal += w @ wide(x_cal)
        self.exp += w @ wide(x_exp)
        self.weight += w.sum(dtype=SUM_DTYPE)


@dataclass
class Drift:
    """Sums over features h, h_exp of a model and its expert on the same inputs (Eq. 2)."""

    difference: float = 0.0  # Σ w ‖h − h_exp‖²
    reference: float = 0.0  # Σ w ‖h_exp‖²
    distance: float = 0.0  # Σ w ‖h − h_exp‖
    cosines: float = 0.0  # Σ w cos(h, h_exp)
    count: float = 0.0  # Σ w

    def add(self, h: Tensor, h_exp: Tensor, w: Tensor | None = None) -> None:
        """Add rows h, h_exp (..., d) with weights w (...), or 1 each; sums are float64."""
        h, h_exp = wide(h), wide(h_exp)
        norm = partial(torch.linalg.vector_norm, dim=-1)
        distance, length = norm(h - h_exp), norm(h_exp)  # (...), (...)
        cosine = (h * h_exp).sum(-1) / (norm(h) * length).clamp_min(torch.finfo(h.dtype).tiny)
        count = torch.ones_like(length)
        # one row for each sum, in the order of the fields, (5, ...)
        rows = torch.stack([distance**2, length**2, distance, cosine, count]).to(SUM_DTYPE)
        sums = (rows if w is None else rows * w.to(SUM_DTYPE)).flatten(1).sum(1).tolist()
        for name, value in zip(vars(self), sums, strict=True):
            setattr(self, name, getattr(self, name) + value)

    @property
    def relative(self) -> float:
        """Return ‖H − H_exp‖_F / ‖H_exp‖_F, or nan without features."""
        return sqrt(self.difference / self.reference) if self.reference else nan

    @property
    def cosine(self) -> float:
        """Return the mean of cos(h, h_exp) over rows, or nan without rows."""
        return self.cosines / self.count if self.count else nan


def every_token(module: str, last: bool, shape: tuple[int, ...]) -> Tensor:
    """Return weight 1 for every token."""
    return torch.ones(shape, dtype=SUM_DTYPE)


def class_token_last(module: str, last: bool, shape: tuple[int, ...]) -> Tensor:
    """Return CLIP's weights: 0.01 for patch tokens of the last block, after which only the class
    token is read, but 1 for its keys and values, which the class token reads; 1 elsewhere.
    """
    w = torch.ones(shape, dtype=SUM_DTYPE)  # float32 would make 0.01 off by 2e-8 in float64 models
    if last and not module.endswith(("k_proj", "v_proj")):
        w[..., 1:] = PATCH_WEIGHT
    return w


def token_weights(
    rule: TokenRule, module: str, last: bool, like: Tensor, mask: Tensor | None
) -> Tensor:
    """Return weights (batch, tokens) of a module's input, 0 at padding. Raises: BadSetting."""
    shape = tuple(like.shape[:-1])
    try:
        w: object = rule(module, last, shape)
    except TypeError as error:
        raise BadSetting("calibrate.token_weights", error, EXPECTED_RULE) from None
    if not (isinstance(w, Tensor) and w.shape == shape and ((w >= 0) & w.isfinite()).all()):
        raise BadSetting("calibrate.token_weights", type(w).__name__, EXPECTED_RULE)
    w = w.to(device=like.device, dtype=like.dtype)
    return w if mask is None else w * mask.to(w)
