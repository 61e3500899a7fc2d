"""Propositions 3, 6 and 7, Corollary 2 and the margin condition (Eq. 44): from drift of final
features to scores, losses and answers.

Legend: n images · h width of the tower · p width shared with text (in scores), softmax (in losses)
· K classes · z scores (n, K), logit scale × cosine · u one-hot labels (n, K).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reproduction.theory.drift import directional, nodes_and_weights
from reproduction.theory.tower import Checks, Tower

PLACES = 33  # even steps along a segment at which a local Lipschitz constant is looked for


@dataclass(frozen=True)
class Head:
    """Projection (p, h) or None, unit class vectors (K, p) and logit scale of a task's models."""

    projection: Tensor | None
    classes: Tensor
    scale: float

    def features(self, tower: Tower, token: Tensor | None = None) -> Tensor:
        """Return projected features (n, p) of the pooled feature, or of a given one (n, h)."""
        normed: Tensor = tower.norm(tower.pooled if token is None else token)
        return normed if self.projection is None else normed @ self.projection.T

    def scores(self, features: Tensor) -> Tensor:
        return self.scale * (features / features.norm(dim=-1, keepdim=True)) @ self.classes.T


@dataclass(frozen=True)
class ScoreDrift:
    """Scores of both models, and bounds of their difference, (n,)."""

    expert: Tensor  # z_exp (n, K)
    merged: Tensor  # z_mer (n, K)
    by_block: Tensor  # B ‖e_L‖ + δ with h_L the pooled feature after the last block
    by_feature: Tensor  # B ‖e_L‖ with h_L the projected feature, where the score map is shared

    @property
    def change(self) -> Tensor:
        """Δz of Eq. 6, (n, K)."""
        return self.merged - self.expert


@torch.no_grad()
def score_drift(merged: Tower, expert: Tower, head: Head) -> ScoreDrift:
    ours, theirs = merged.pooled, expert.pooled

    def score_map(token: Tensor) -> Tensor:
        return head.scores(head.features(merged, token))

    z_mer, z_exp = score_map(ours), head.scores(head.features(expert))
    # δ: the last norm is fine-tuned too, so the score maps differ
    mismatch = (score_map(theirs) - z_exp).norm(dim=-1)
    steepest = along_segment(score_map, theirs, ours - theirs)
    by_block = steepest * (ours - theirs).norm(dim=-1) + mismatch
    f_mer, f_exp = head.features(merged), head.features(expert)
    by_feature = cosine_constant(head, f_exp, f_mer) * (f_mer - f_exp).norm(dim=-1)
    return ScoreDrift(z_exp, z_mer, by_block, by_feature)


def along_segment(function: Callable[[Tensor], Tensor], start: Tensor, change: Tensor) -> Tensor:
    """Return the largest ‖J(start + t·change) change‖ / ‖change‖ of PLACES, (n,)."""
    length = change.norm(dim=-1).clamp_min(1e-300)
    places = (start + i / (PLACES - 1) * change for i in range(PLACES))
    steps = [directional(function, place, change) for place in places]
    return torch.stack([step.norm(dim=-1) / length for step in steps]).amax(0)


def cosine_constant(head: Head, start: Tensor, end: Tensor) -> Tensor:
    """Return s ‖T‖₂ / (least ‖f‖ on the segment), (n,): s T f/‖f‖ changes by s T (I − f̂ f̂ᵀ)/‖f‖."""
    change = end - start
    t = -(start * change).sum(-1) / (change**2).sum(-1).clamp_min(1e-300)
    t = t.clamp(0, 1)  # where the segment is nearest
    nearest = (start + t[:, None] * change).norm(dim=-1)
    return head.scale * torch.linalg.matrix_norm(head.classes, 2) / nearest


def check_scores(drift: ScoreDrift, found: Checks) -> None:
    """Check that both bounds are at least the change of the scores, image by image."""
    change = drift.change.norm(dim=-1)
    found.bounded_and_shown("proposition_3", drift.by_block, change)
    found.bounded_and_shown("proposition_6", drift.by_feature, change)


FINER = 8  # nodes of the loss per node of a Jacobian: scaled cosines make softmax turn sharply


def gradient(z: Tensor, u: Tensor) -> Tensor:
    """Return ∇L = p − u, (n, K)."""
    return z.softmax(-1) - u


def averaged(function: Callable[[Tensor], Tensor], z: Tensor, change: Tensor, nodes: int) -> Tensor:
    """Return ∫₀¹ function(z + t·change) dt."""
    parts = [weight * function(z + t * change) for t, weight in nodes_and_weights(nodes)]
    return torch.stack(parts).sum(0)


def check_loss(drift: ScoreDrift, labels: Tensor, nodes: Sequence[int], found: Checks) -> None:
    """Check Proposition 7, the softmax bridge and Corollary 2; errors are relative to ‖ḡ‖ ‖Δz‖."""
    z, change = drift.expert, drift.change
    u = torch.nn.functional.one_hot(labels, z.shape[-1]).to(z)

    def loss(here: Tensor) -> Tensor:
        return torch.logsumexp(here, -1) - (here * u).sum(-1)

    def moved(here: Tensor) -> Tensor:  # J_sm(here) Δz = p ∘ (Δz − ⟨p, Δz⟩)
        p = here.softmax(-1)
        return p * (change - (p * change).sum(-1, keepdim=True))

    lost = loss(drift.merged) - loss(z)
    for count in sorted(nodes):
        mean = averaged(lambda here: gradient(here, u), z, change, FINER * count)
        bound = mean.norm(dim=-1) * change.norm(dim=-1)
        error = (lost - (mean * change).sum(-1)).abs() / bound
        found.exact("proposition_7", "digits_by_nodes", error, nodes=FINER * count)
        turned = drift.merged.softmax(-1) - z.softmax(-1)
        bridge = (averaged(moved, z, change, FINER * count) - turned).norm(dim=-1)
        bridge = bridge / change.norm(dim=-1)
        found.exact("proposition_7", "softmax_digits", bridge, nodes=FINER * count)
    found.exact("proposition_7", "digits", error)  # with the most nodes
    found.bounded_and_shown("proposition_7", bound, lost.abs())
    places = (z + i / (PLACES - 1) * change for i in range(PLACES))
    steepest = torch.stack([gradient(here, u).norm(dim=-1) for here in places]).amax(0)  # G
    found.bounded_and_shown("corollary_2", steepest * drift.by_block, lost.abs())


def check_margins(drift: ScoreDrift, found: Checks) -> None:
    """Check Eq. 44, weaker conditions by Propositions 3 and 6, and max Δz − min Δz < μ."""
    best = drift.expert.topk(2, dim=-1)
    margin = best.values[:, 0] - best.values[:, 1]  # μ
    kept = drift.merged.argmax(-1) == best.indices[:, 0]
    largest = drift.change.abs().amax(-1)
    spread = drift.change.amax(-1) - drift.change.amin(-1)
    guaranteed = {
        "kept_by_block": drift.by_block < margin / 2, "kept_by_feature": drift.by_feature < margin / 2,
        "kept_by_score": largest < margin / 2, "kept_by_spread": spread < margin,
    }  # fmt: skip
    for name, sure in guaranteed.items():
        found.add("margin", name, 100 * float(sure.double().mean()), len(sure))
    found.add("margin", "kept_in_fact", 100 * float(kept.double().mean()), len(kept))
    wrong = (torch.stack([*guaranteed.values()]).any(0) & ~kept).sum()
    found.add("margin", "lost_though_guaranteed", float(wrong), len(kept))
    # an answer that changed with ‖Δz‖∞ below half its margin would refute Eq. 44
    if not kept.all():
        room = 100 * (float((2 * largest / margin)[~kept].min()) - 1)
        found.add("margin", "room", room, int((~kept).sum()))
    found.show("margin", largest, margin / 2, kept=kept, most=len(kept))
