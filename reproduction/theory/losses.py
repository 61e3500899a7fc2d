"""Proposition 7, Corollary 2 and the margin condition (Eq. 44): from scores to losses and to
answers.

Legend: n images · K classes · z scores (n, K) · u one-hot labels (n, K) · p softmax.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from reproduction.theory.found import Found
from reproduction.theory.path import nodes_and_weights
from reproduction.theory.scores import PLACES, ScoreDrift

# nodes of the loss per node of a Jacobian: scaled cosines make softmax turn sharply, and a score
# costs nothing
FINER = 8


def cross_entropy(z: Tensor, u: Tensor) -> Tensor:
    """L(y, z) of every image, (n,)."""
    return torch.logsumexp(z, -1) - (z * u).sum(-1)


def gradient(z: Tensor, u: Tensor) -> Tensor:
    """∇L = p − u, (n, K)."""
    return z.softmax(-1) - u


def averaged(function: Callable[[Tensor], Tensor], z: Tensor, change: Tensor, nodes: int) -> Tensor:
    """∫₀¹ function(z + t·change) dt."""
    return torch.stack(
        [weight * function(z + t * change) for t, weight in nodes_and_weights(nodes)]
    ).sum(0)


def check_loss(drift: ScoreDrift, labels: Tensor, nodes: Sequence[int], found: Found) -> None:
    """Proposition 7, the softmax bridge before it, and Corollary 2.

    Errors are relative to ‖ḡ‖ ‖Δz‖, because a loss may well not change at all.
    """
    z, change = drift.expert, drift.change
    u = torch.nn.functional.one_hot(labels, z.shape[-1]).to(z)
    lost = cross_entropy(drift.merged, u) - cross_entropy(z, u)

    def moved(here: Tensor) -> Tensor:  # J_sm(here) Δz = p ∘ (Δz − ⟨p, Δz⟩)
        p = here.softmax(-1)
        return p * (change - (p * change).sum(-1, keepdim=True))

    for count in sorted(nodes):
        mean = averaged(lambda here: gradient(here, u), z, change, FINER * count)
        bound = mean.norm(dim=-1) * change.norm(dim=-1)
        found.exact(
            "proposition_7",
            "digits_by_nodes",
            (lost - (mean * change).sum(-1)).abs() / bound,
            nodes=FINER * count,
        )
        bridge = averaged(moved, z, change, FINER * count) - (
            drift.merged.softmax(-1) - z.softmax(-1)
        )
        found.exact(
            "proposition_7",
            "softmax_digits",
            bridge.norm(dim=-1) / change.norm(dim=-1),
            nodes=FINER * count,
        )
    found.exact(
        "proposition_7", "digits", (lost - (mean * change).sum(-1)).abs() / bound
    )  # with the most nodes
    found.bounded("proposition_7", bound, lost.abs())
    found.show("proposition_7", lost.abs(), bound)
    steepest = torch.stack(
        [gradient(z + i / (PLACES - 1) * change, u).norm(dim=-1) for i in range(PLACES)]
    ).amax(0)  # G
    found.bounded("corollary_2", steepest * drift.by_block, lost.abs())
    found.show("corollary_2", lost.abs(), steepest * drift.by_block)


def check_margins(drift: ScoreDrift, found: Found) -> None:
    """Eq. 44, and three other conditions: weaker ones by the bounds of Propositions 3 and 6, a
    sharper one by the spread of Δz.

    A shift of all scores by the same amount changes no answer, but counts in ‖Δz‖∞; max Δz − min Δz
    < μ leaves it out.
    """
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
    found.add(
        "margin",
        "lost_though_guaranteed",
        float((torch.stack([*guaranteed.values()]).any(0) & ~kept).sum()),
        len(kept),
    )
    if (
        not kept.all()
    ):  # an answer that changed with ‖Δz‖∞ below half its margin would refute Eq. 44
        found.add(
            "margin",
            "room",
            100 * (float((2 * largest / margin)[~kept].min()) - 1),
            int((~kept).sum()),
        )
    found.show("margin", largest, margin / 2, kept=kept, most=len(kept))
