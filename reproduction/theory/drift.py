"""Propositions 1 to 7: drift within one block, along the blocks, and on to scores and answers.

Propositions 1, 2, 4 and 5 and Corollary 1 are about blocks; 3, 6 and 7, Corollary 2 and the margin
condition (Eq. 44) about scores, losses and answers.

Legend: e = h_mer − h_exp drift · m local mismatch · p propagated drift · r residual branch, all (n,
tokens, d) · n images · h width of the tower · p width shared with text (in scores), softmax (in
losses) · K classes · z scores (n, K), logit scale × cosine · u one-hot labels (n, K). Averages of a Jacobian along a segment, A = ∫₀¹ J(start + t·change) dt (Eqs. 19 and 31),
are never formed: Gauss-Legendre nodes and Jacobian-vector products at each give A v.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from reproduction.theory.tower import Checks, Tower, dots, norms, relative

POINTS = 33  # even steps along a segment at which a local Lipschitz constant is looked for
FINER = 8  # nodes of the loss per node of a Jacobian: scaled cosines make softmax turn sharply
Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class BlockDrift:
    """Drift around one block."""

    before: Tensor  # e of the block before
    after: Tensor  # e, by the two models' own forwards
    mismatch: Tensor  # m = f_mer(h_exp) − f_exp(h_exp)
    propagated: Tensor  # p = f_mer(h_mer) − f_mer(h_exp)
    branch: Tensor | None  # r = g_mer(h_mer) − g_mer(h_exp), where a block adds its branches
    size: Tensor  # h_exp after the block


@torch.no_grad()
def decomposed(merged: Tower, expert: Tower) -> list[BlockDrift]:
    """Return every block's drift; maps run by themselves, so m + p is computed apart from e."""
    drifts = []
    for i, (f_mer, f_exp) in enumerate(zip(merged.maps, expert.maps, strict=True)):
        h_mer, h_exp = merged.features[i], expert.features[i]
        at_expert = f_mer(h_exp)
        after = merged.features[i + 1] - expert.features[i + 1]
        m, p = at_expert - f_exp(h_exp), f_mer(h_mer) - at_expert
        r = merged.branches(i, h_mer) - merged.branches(i, h_exp) if merged.adds else None
        drifts.append(BlockDrift(h_mer - h_exp, after, m, p, r, expert.features[i + 1]))
    return drifts


def residual(drift: BlockDrift) -> Tensor:
    """Return ‖e − (m + p)‖ / ‖e‖ of every image (Eq. 3), (n,)."""
    return relative(drift.after - (drift.mismatch + drift.propagated), drift.after)


def check_decomposition(drifts: list[BlockDrift], checks: Checks) -> None:
    """Check Proposition 1; add ⟨m, e⟩/‖e‖ and ⟨p, e⟩/‖e‖, whose sum is ‖e‖, in percent of ‖h_exp‖."""
    checks.exact("proposition_1", "digits", torch.cat([residual(d) for d in drifts]))
    first = drifts[0]
    at_input = 100 * float(norms(first.before).sum() / norms(first.size).sum())
    checks.add("proposition_1", "input_drift", at_input, len(first.after))
    for i, d in enumerate(drifts):
        size, length = norms(d.size).mean(), norms(d.after).clamp_min(1e-300)
        quantities = {"drift": length, "from_mismatch": dots(d.mismatch, d.after) / length}
        quantities |= {"from_upstream": dots(d.propagated, d.after) / length}
        quantities |= {"mismatch": norms(d.mismatch), "propagated": norms(d.propagated)}
        for name, value in quantities.items():
            share = 100 * float(value.mean() / size)
            checks.add("proposition_1", name, share, len(value), block=f"{i:02d}")


def check_residual(drifts: list[BlockDrift], checks: Checks) -> None:
    """Check Proposition 4, p = e_before + r, and how much of the skip's drift the branch adds."""
    errors, shares = [], {}
    for i, d in enumerate(drifts):
        if d.branch is not None and norms(d.before).any():
            errors.append(relative(d.propagated - d.before - d.branch, d.propagated))
            shares[f"{i:02d}"] = dots(d.branch, d.before) / norms(d.before) ** 2
    if errors:
        checks.exact("proposition_4", "digits", torch.cat(errors))
    for block, along in shares.items():
        share = 100 * float(along.mean())
        checks.add("proposition_4", "branch_along_drift", share, len(along), block=block)


def check_growth(drifts: list[BlockDrift], checks: Checks) -> None:
    """Check Proposition 5 and Corollary 1 on all cases, not only where growth is promised."""
    grown = {i: d for i, d in enumerate(drifts) if bool((norms(d.before) > 0).all())}
    if not grown:
        return
    before, propagated, mismatch, after = (
        torch.stack([norms(getattr(d, name)) for d in grown.values()])
        for name in ("before", "propagated", "mismatch", "after")
    )  # (blocks, n)
    # the largest γ that Eq. 34 allows, and the smallest η that Eq. 35 allows
    gamma, eta, factor = propagated / before - 1, mismatch / before, after / before
    # with η = γ, which Eq. 35 allows, Eq. 36's strict growth does not follow
    applies, promised = (gamma > 0) & (eta < gamma), 1 + gamma - eta
    checks.add("proposition_5", "applies", 100 * float(applies.double().mean()), applies.numel())
    checks.add("proposition_5", "grows", 100 * float((factor > 1).double().mean()), factor.numel())
    checks.bounded("proposition_5", factor.flatten(), promised.flatten())
    for i, actual, bound, kept in zip(grown, factor, promised, applies, strict=True):
        checks.show("proposition_5", actual, bound, f"{i:02d}", kept, most=1)
    checks.add("corollary_1", "applies", 100 * float(applies[-1].double().mean()), applies.shape[1])
    # products from every block to the last
    ends = (x.flip(0).cumprod(0).flip(0)[:-1].flatten() for x in (factor, promised.clamp_min(0)))
    checks.bounded("corollary_1", *ends)


def nodes_and_weights(count: int) -> list[tuple[float, float]]:
    """Return Gauss-Legendre nodes and weights on [0, 1], exact up to degree 2·count − 1."""
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return [(float(x + 1) / 2, float(w) / 2) for x, w in zip(nodes, weights, strict=True)]


def path_average(
    function: Map, start: Tensor, change: Tensor, vectors: Tensor, nodes: int
) -> Tensor:
    """Return ∫₀¹ J(start + t·change) v dt of a map of (n, …) for several v at once, (k, n, …)."""
    points, weights = start.new_tensor(nodes_and_weights(nodes)).T

    def moved(t: Tensor, v: Tensor) -> Tensor:
        return directional(function, start + t * change, v)

    products: Tensor = vmap(vmap(moved, (None, 0)), (0, None))(points, vectors)  # (nodes, k, n, …)
    return torch.tensordot(weights, products, 1)


def directional(function: Map, point: Tensor, vector: Tensor) -> Tensor:
    """Return J(place) vector, by forward differentiation, which only plain attention has."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        moved: Tensor = jvp(function, (point,), (vector,))[1]
    return moved


def check_propagation(
    pairs: Sequence[tuple[Tower, Tower]], nodes: Sequence[int], checks: Checks
) -> None:
    """Check Proposition 2, p = A e_before and the unrolled sum, for every number of nodes.

    With the most nodes, also each mismatch's share of the final drift, ⟨P m, e_L⟩ / ‖e_L‖².
    """
    cases = [(merged, expert, decomposed(merged, expert)) for merged, expert in pairs]
    finals = [drifts[-1].after for _, _, drifts in cases]
    for count in sorted(nodes):
        carried = (carry(*case, count, split=count == max(nodes)) for case in cases)
        errors, parts = zip(*carried, strict=True)
        recursion = torch.cat(errors)
        ends = zip(parts, finals, strict=True)
        unrolled = torch.cat([relative(part.sum(0) - final, final) for part, final in ends])
        checks.exact("proposition_2", "recursion_digits", recursion, nodes=count)
        checks.exact("proposition_2", "unrolled_digits", unrolled, nodes=count)
    checks.exact("proposition_2", "digits", torch.cat([recursion, unrolled]))  # with the most nodes
    ends = zip(parts, finals, strict=True)
    shares = [torch.stack([dots(m, e) / dots(e, e) for m in part]) for part, e in ends]
    for i, share in enumerate(torch.cat(shares, dim=1)):
        name, value = f"{i - 1:02d}" if i else "embeddings", 100 * float(share.mean())
        checks.add("proposition_2", "share_of_final", value, len(share), block=name)


def carry(
    merged: Tower, expert: Tower, drifts: Sequence[BlockDrift], nodes: int, split: bool
) -> tuple[Tensor, Tensor]:
    """Return the errors of A e_before against p, and every mismatch as later blocks carry it."""
    errors, carried = [], drifts[0].before[None]  # (k, n, …)
    for i, (function, drift) in enumerate(zip(merged.maps, drifts, strict=True)):
        sent = carried if split else carried.sum(0, keepdim=True)
        # only e itself reaches the first block
        vectors = torch.cat([drift.before[None], sent]) if i else sent
        # A v, (k, n, …)
        moved = path_average(function, expert.features[i], drift.before, vectors, nodes)
        nonzero = norms(drift.propagated) > 0
        errors.append(relative(moved[0] - drift.propagated, drift.propagated)[nonzero])
        carried = torch.cat([moved[-len(sent) :], drift.mismatch[None]])
    return torch.cat(errors), carried


@dataclass(frozen=True)
class ScoreHead:
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
        """Return Δz of Eq. 6, (n, K)."""
        return self.merged - self.expert


@torch.no_grad()
def score_drift(merged: Tower, expert: Tower, head: ScoreHead) -> ScoreDrift:
    h_mer, h_exp = merged.pooled, expert.pooled

    def score_map(token: Tensor) -> Tensor:
        return head.scores(head.features(merged, token))

    z_mer, z_exp = score_map(h_mer), head.scores(head.features(expert))
    # δ: the last norm is fine-tuned too, so the score maps differ
    mismatch = (score_map(h_exp) - z_exp).norm(dim=-1)
    steepest = along_segment(score_map, h_exp, h_mer - h_exp)
    by_block = steepest * (h_mer - h_exp).norm(dim=-1) + mismatch
    f_mer, f_exp = head.features(merged), head.features(expert)
    by_feature = cosine_constant(head, f_exp, f_mer) * (f_mer - f_exp).norm(dim=-1)
    return ScoreDrift(z_exp, z_mer, by_block, by_feature)


def along_segment(function: Map, start: Tensor, change: Tensor) -> Tensor:
    """Return the largest ‖J(start + t·change) change‖ / ‖change‖ of PLACES, (n,)."""
    length = change.norm(dim=-1).clamp_min(1e-300)
    points = (start + i / (POINTS - 1) * change for i in range(POINTS))
    steps = [directional(function, point, change) for point in points]
    return torch.stack([step.norm(dim=-1) / length for step in steps]).amax(0)


def cosine_constant(head: ScoreHead, start: Tensor, end: Tensor) -> Tensor:
    """Return s ‖T‖₂ / (least ‖f‖ on the segment), (n,): s T f/‖f‖ changes by s T (I − f̂ f̂ᵀ)/‖f‖."""
    change = end - start
    t = -(start * change).sum(-1) / (change**2).sum(-1).clamp_min(1e-300)
    t = t.clamp(0, 1)  # where the segment is nearest
    nearest = (start + t[:, None] * change).norm(dim=-1)
    return head.scale * torch.linalg.matrix_norm(head.classes, 2) / nearest


def check_scores(drift: ScoreDrift, checks: Checks) -> None:
    """Check that both bounds are at least the change of the scores, image by image."""
    change = drift.change.norm(dim=-1)
    checks.bounded_and_shown("proposition_3", drift.by_block, change)
    checks.bounded_and_shown("proposition_6", drift.by_feature, change)


def gradient(z: Tensor, u: Tensor) -> Tensor:
    """Return ∇L = p − u, (n, K)."""
    return z.softmax(-1) - u


def averaged(function: Map, z: Tensor, change: Tensor, nodes: int) -> Tensor:
    """Return ∫₀¹ function(z + t·change) dt."""
    parts = [weight * function(z + t * change) for t, weight in nodes_and_weights(nodes)]
    return torch.stack(parts).sum(0)


def check_loss(drift: ScoreDrift, labels: Tensor, nodes: Sequence[int], checks: Checks) -> None:
    """Check Proposition 7, the softmax bridge and Corollary 2; errors are relative to ‖ḡ‖ ‖Δz‖."""
    z, change = drift.expert, drift.change
    u = torch.nn.functional.one_hot(labels, z.shape[-1]).to(z)

    def loss(z_t: Tensor) -> Tensor:
        return torch.logsumexp(z_t, -1) - (z_t * u).sum(-1)

    def moved(z_t: Tensor) -> Tensor:  # J_sm(z_t) Δz = p ∘ (Δz − ⟨p, Δz⟩)
        p = z_t.softmax(-1)
        return p * (change - (p * change).sum(-1, keepdim=True))

    loss_change = loss(drift.merged) - loss(z)
    for count in sorted(nodes):
        mean = averaged(lambda z_t: gradient(z_t, u), z, change, FINER * count)
        bound = mean.norm(dim=-1) * change.norm(dim=-1)
        error = (loss_change - (mean * change).sum(-1)).abs() / bound
        checks.exact("proposition_7", "digits_by_nodes", error, nodes=FINER * count)
        turned = drift.merged.softmax(-1) - z.softmax(-1)
        bridge = (averaged(moved, z, change, FINER * count) - turned).norm(dim=-1)
        bridge = bridge / change.norm(dim=-1)
        checks.exact("proposition_7", "softmax_digits", bridge, nodes=FINER * count)
    checks.exact("proposition_7", "digits", error)  # with the most nodes
    checks.bounded_and_shown("proposition_7", bound, loss_change.abs())
    points = (z + i / (POINTS - 1) * change for i in range(POINTS))
    steepest = torch.stack([gradient(z_t, u).norm(dim=-1) for z_t in points]).amax(0)  # G
    checks.bounded_and_shown("corollary_2", steepest * drift.by_block, loss_change.abs())


def check_margins(drift: ScoreDrift, checks: Checks) -> None:
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
        checks.add("margin", name, 100 * float(sure.double().mean()), len(sure))
    checks.add("margin", "kept_in_fact", 100 * float(kept.double().mean()), len(kept))
    wrong = (torch.stack([*guaranteed.values()]).any(0) & ~kept).sum()
    checks.add("margin", "lost_though_guaranteed", float(wrong), len(kept))
    # an answer that changed with ‖Δz‖∞ below half its margin would refute Eq. 44
    changed = ~kept & (margin > 0)  # two equal scores give no answer
    if changed.any():
        room = 100 * (float((2 * largest / margin)[changed].min()) - 1)
        checks.add("margin", "room", room, int(changed.sum()))
    checks.show("margin", largest, margin / 2, kept=kept, most=len(kept))
