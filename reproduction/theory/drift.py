"""Propositions 1, 4 and 5 and Corollary 1: drift within one block, split into what arises there and
what was there before.

Legend: e = h_mer − h_exp drift · m local mismatch · p propagated drift · r residual branch, all (n,
tokens, d).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from reproduction.theory.found import Found, dots, norms, relative
from reproduction.theory.tower import Tower


@dataclass(frozen=True)
class BlockDrift:
    """Drift around one block."""

    before: Tensor  # e of the block before
    after: Tensor  # e, by the two models' own forwards
    mismatch: Tensor  # m = f_mer(h_exp) − f_exp(h_exp)
    propagated: Tensor  # p = f_mer(h_mer) − f_mer(h_exp)
    branch: (
        Tensor | None
    )  # r = g_mer(h_mer) − g_mer(h_exp), where a block adds what its branches put out
    size: Tensor  # h_exp behind the block


@torch.no_grad()
def decomposed(merged: Tower, expert: Tower) -> list[BlockDrift]:
    """Every block in forward order. Each map is run by itself, so that e = m + p compares two
    different computations.
    """
    found = []
    for i, (f_mer, f_exp) in enumerate(zip(merged.maps, expert.maps, strict=True)):
        h_mer, h_exp = merged.features[i], expert.features[i]
        at_expert = f_mer(h_exp)
        after = merged.features[i + 1] - expert.features[i + 1]
        m, p = at_expert - f_exp(h_exp), f_mer(h_mer) - at_expert
        r = merged.branches(i, h_mer) - merged.branches(i, h_exp) if merged.adds else None
        found.append(BlockDrift(h_mer - h_exp, after, m, p, r, expert.features[i + 1]))
    return found


def residual(drift: BlockDrift) -> Tensor:
    """‖e − (m + p)‖ / ‖e‖ of every image (Eq. 3), (n,)."""
    return relative(drift.after - (drift.mismatch + drift.propagated), drift.after)


def check_decomposition(drifts: list[BlockDrift], found: Found) -> None:
    """Proposition 1, with the parts of e along itself: ⟨m, e⟩/‖e‖ and ⟨p, e⟩/‖e‖, which add up to
    ‖e‖, against ‖h_exp‖.
    """
    found.exact("proposition_1", "digits", torch.cat([residual(d) for d in drifts]))
    first = drifts[0]
    found.add(
        "proposition_1",
        "input_drift",
        100 * float(norms(first.before).sum() / norms(first.size).sum()),
        len(first.after),
    )
    for i, d in enumerate(drifts):
        size, length = norms(d.size).mean(), norms(d.after).clamp_min(1e-300)
        parts = {"drift": length, "from_mismatch": dots(d.mismatch, d.after) / length}
        parts |= {"from_upstream": dots(d.propagated, d.after) / length}
        parts |= {"mismatch": norms(d.mismatch), "propagated": norms(d.propagated)}
        for name, value in parts.items():
            found.add(
                "proposition_1",
                name,
                100 * float(value.mean() / size),
                len(value),
                block=f"{i:02d}",
            )


def check_residual(drifts: list[BlockDrift], found: Found) -> None:
    """Proposition 4: p = e_before + r, and how much the branch takes from (−) or adds to (+) the
    drift that the skip carries.
    """
    branches = {
        i: (d, d.branch)
        for i, d in enumerate(drifts)
        if d.branch is not None and norms(d.before).any()
    }
    if not branches:
        return
    errors = [
        relative(d.propagated - d.before - branch, d.propagated) for d, branch in branches.values()
    ]
    found.exact("proposition_4", "digits", torch.cat(errors))
    for i, (d, branch) in branches.items():
        along = dots(branch, d.before) / norms(d.before) ** 2
        found.add(
            "proposition_4",
            "branch_along_drift",
            100 * float(along.mean()),
            len(along),
            block=f"{i:02d}",
        )


@dataclass(frozen=True)
class Growth:
    """Proposition 5 for one block, image by image (n,): γ, η, and by what factor drift has
    grown.
    """

    gamma: Tensor  # the largest that Eq. 34 allows, ‖p‖/‖e_before‖ − 1
    eta: Tensor  # the smallest that Eq. 35 allows, ‖m‖/‖e_before‖
    factor: Tensor  # ‖e‖/‖e_before‖

    @property
    def applies(self) -> Tensor:
        """γ > 0 and η < γ. With η = γ, which Eq. 35 as printed includes, the strict growth of Eq.
        36 does not follow.
        """
        return (self.gamma > 0) & (self.eta < self.gamma)

    @property
    def promised(self) -> Tensor:
        """The factor 1 + γ − η of Eq. 36."""
        return 1 + self.gamma - self.eta


def growth(drift: BlockDrift) -> Growth:
    """γ, η and the growth of one block; drift before it must not vanish."""
    length = norms(drift.before)
    return Growth(
        norms(drift.propagated) / length - 1,
        norms(drift.mismatch) / length,
        norms(drift.after) / length,
    )


def check_growth(drifts: list[BlockDrift], found: Found) -> None:
    """Proposition 5 and Corollary 1.

    Eq. 36 and its product follow from the triangle inequality wherever 1 + γ − η is not negative,
    so both are checked on all such cases, and not only on those that meet the condition, which
    promises growth.
    """
    grown = {i: growth(d) for i, d in enumerate(drifts) if bool((norms(d.before) > 0).all())}
    if not grown:
        return
    applies, factor, promised = (
        torch.stack([getattr(g, name) for g in grown.values()])
        for name in ("applies", "factor", "promised")
    )  # (blocks, n)
    found.add("proposition_5", "applies", 100 * float(applies.double().mean()), applies.numel())
    found.add("proposition_5", "grows", 100 * float((factor > 1).double().mean()), factor.numel())
    found.bounded("proposition_5", factor.flatten(), promised.flatten())
    for i, g in grown.items():
        found.show("proposition_5", g.factor, g.promised, f"{i:02d}", g.applies, most=1)
    found.add("corollary_1", "applies", 100 * float(applies[-1].double().mean()), applies.shape[1])
    found.bounded(
        "corollary_1",
        to_the_end(factor)[:-1].flatten(),
        to_the_end(promised.clamp_min(0))[:-1].flatten(),
    )


def to_the_end(factors: Tensor) -> Tensor:
    """Products from every block to the last, (blocks, n)."""
    return factors.flip(0).cumprod(0).flip(0)
