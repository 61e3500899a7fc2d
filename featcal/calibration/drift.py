"""Drift of a whole model against its expert, block by block, for measuring (Figures 1, 2, 6 and 7)."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from featcal.blocks.capture import block_outputs, model_call
from featcal.blocks.plan import BlockPlan
from featcal.blocks.plans import plan_for
from featcal.calibration.models import evaluation_mode
from featcal.calibration.tracks import padding_mask
from featcal.core.drift import Drift
from featcal.core.precision import exact_products


def block_features(model: nn.Module, batch: Mapping[str, Any], plan: BlockPlan | None = None) -> dict[str, Tensor]:
    """Features (batch, tokens, d) of one batch: "embeddings" before the first block, then "00", "01", … after each."""
    with evaluation_mode([model]), exact_products(), block_outputs(model, plan_for(model, plan).blocks(model)) as seen:
        model(**model_call(model, batch))
    return seen


def model_drift(
    model: nn.Module, expert: nn.Module, batches: Iterable[Mapping[str, Any]], plan: BlockPlan | None = None
) -> list[dict[str, Any]]:
    """One record per block: relative drift over all tokens, distance and cosine of the first (class) token.

    Returns: [{"block", "relative_drift", "l2", "cosine", "count"}, …] in forward order, "embeddings" first; count is samples.
    """
    tokens: dict[str, Drift] = {}
    first: dict[str, Drift] = {}
    for batch in batches:
        ours, theirs = block_features(model, batch, plan), block_features(expert, batch, plan)
        for block, h in ours.items():
            tokens.setdefault(block, Drift()).add(h, theirs[block], padding_mask(batch, h))
            first.setdefault(block, Drift()).add(h[:, 0], theirs[block][:, 0])
    return [
        {
            "block": block,
            "relative_drift": tokens[block].relative,
            "l2": first[block].l2,
            "cosine": first[block].cosine,
            "count": int(first[block].count),
        }
        for block in tokens
    ]
