"""Propositions 3 and 6: how far drift of final features can move the scores, at two places where
"final" may be read.

Legend: n images · h width of the tower · p width shared with text · K classes. A score is logit
scale × cosine.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reproduction.theory.found import Found
from reproduction.theory.path import directional
from reproduction.theory.tower import Tower

PLACES = 33  # even steps along a segment at which a local Lipschitz constant is looked for


@dataclass(frozen=True)
class Head:
    """What all models of a task share behind the last norm: projection (p, h), if any, unit class
    vectors (K, p), logit scale.
    """

    projection: Tensor | None
    classes: Tensor
    scale: float

    def features(self, tower: Tower, token: Tensor | None = None) -> Tensor:
        """Projected features (n, p), before they get unit length; of what the model pools, or of a
        given one (n, h).
        """
        normed: Tensor = tower.norm(tower.pooled if token is None else token)
        return normed if self.projection is None else normed @ self.projection.T

    def scores(self, features: Tensor) -> Tensor:
        """Scaled cosines (n, K)."""
        return self.scale * (features / features.norm(dim=-1, keepdim=True)) @ self.classes.T


@dataclass(frozen=True)
class ScoreDrift:
    """Scores of both models and what bounds their difference, image by image (n,)."""

    expert: Tensor  # z_exp (n, K)
    merged: Tensor  # z_mer (n, K)
    # B ‖e_L‖ + δ with h_L the class token, or the mean over tokens, behind the last block
    by_block: Tensor
    by_feature: (
        Tensor  # B ‖e_L‖ with h_L the projected feature, where both models share the score map
    )

    @property
    def change(self) -> Tensor:
        """Δz of Eq. 6, (n, K)."""
        return self.merged - self.expert


@torch.no_grad()
def score_drift(merged: Tower, expert: Tower, head: Head) -> ScoreDrift:
    """Scores and both bounds."""
    ours, theirs = merged.pooled, expert.pooled

    def score_map(token: Tensor) -> Tensor:
        return head.scores(head.features(merged, token))

    z_mer, z_exp = score_map(ours), head.scores(head.features(expert))
    mismatch = (score_map(theirs) - z_exp).norm(
        dim=-1
    )  # δ: the last norm is fine-tuned too, so the score maps differ
    by_block = (
        along_segment(score_map, theirs, ours - theirs) * (ours - theirs).norm(dim=-1) + mismatch
    )
    f_mer, f_exp = head.features(merged), head.features(expert)
    by_feature = cosine_constant(head, f_exp, f_mer) * (f_mer - f_exp).norm(dim=-1)
    return ScoreDrift(z_exp, z_mer, by_block, by_feature)


def along_segment(function: Callable[[Tensor], Tensor], start: Tensor, change: Tensor) -> Tensor:
    """The Lipschitz constant on the segment itself, (n,): the largest ‖J(start + t·change) change‖
    / ‖change‖ of PLACES.
    """
    length = change.norm(dim=-1).clamp_min(1e-300)
    steps = [
        directional(function, start + i / (PLACES - 1) * change, change) for i in range(PLACES)
    ]
    return torch.stack([step.norm(dim=-1) / length for step in steps]).amax(0)


def cosine_constant(head: Head, start: Tensor, end: Tensor) -> Tensor:
    """A Lipschitz constant of scaled cosines in every direction, (n,): s ‖T‖₂ / (distance of the
    segment from the origin).

    The Jacobian of s T f/‖f‖ is s T (I − f̂ f̂ᵀ)/‖f‖, whose norm is at most s ‖T‖₂/‖f‖; no grid is
    needed.
    """
    change = end - start
    t = (-(start * change).sum(-1) / (change**2).sum(-1).clamp_min(1e-300)).clamp(
        0, 1
    )  # where the segment is nearest
    nearest = (start + t[:, None] * change).norm(dim=-1)
    return head.scale * torch.linalg.matrix_norm(head.classes, 2) / nearest


def check_scores(drift: ScoreDrift, found: Found) -> None:
    """The bound holds when it is at least the change, image by image."""
    change = drift.change.norm(dim=-1)
    for statement, bound in (
        ("proposition_3", drift.by_block),
        ("proposition_6", drift.by_feature),
    ):
        found.bounded(statement, bound, change)
        found.show(statement, change, bound)
