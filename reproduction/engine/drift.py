"""Measure the drift of a model from an expert after every block, over all tokens and of the class
token.
"""

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from featcal.core.drift import Drift
from featcal.core.precision import exact_products
from featcal.models.batch import Batch, Batches, pad_token, padding_mask
from featcal.models.blocks import block_outputs, model_call
from featcal.models.families import plan_for
from featcal.models.load import evaluation_mode
from featcal.models.plan import BlockPlan, Stack, blocks_of


def features_by_stack(
    model: nn.Module, batch: Batch, plan: BlockPlan
) -> dict[str, tuple[Stack, Tensor]]:
    """Return the features (batch, tokens, d) of one batch, with their stacks, by block.

    The names are "embeddings" before the first block, then "00", "01", …; where the model has
    several stacks, they begin with the stack's, as in "decoder.00".
    """
    with evaluation_mode([model]), exact_products(), ExitStack() as hooks:
        outputs = [
            (stack, hooks.enter_context(block_outputs(model, blocks_of(model, stack))))
            for stack in plan.stacks
        ]
        model(**model_call(model, batch))
    several = len(plan.stacks) > 1
    return {
        f"{stack.name}.{block}" if several else block: (stack, h)
        for stack, features in outputs
        for block, h in features.items()
    }


def model_drift(model: nn.Module, expert: nn.Module, batches: Batches) -> list[dict[str, Any]]:
    """Measure the relative drift after every block over all tokens, and distance and cosine of the
    first (class) token.

    Returns: [{"block", "relative_drift", "l2", "cosine", "count"}, …] in forward order,
        "embeddings" first; count is samples.
    """
    tokens: dict[str, Drift] = {}
    first: dict[str, Drift] = {}
    plan = plan_for(model)
    for batch in batches:
        features, theirs = (features_by_stack(m, batch, plan) for m in (model, expert))
        for block, (stack, h) in features.items():
            h_exp, mask = theirs[block][1], padding_mask(batch, h, stack.mask, pad_token(model))
            tokens.setdefault(block, Drift()).add(h, h_exp, mask)
            first.setdefault(block, Drift()).add(h[:, 0], h_exp[:, 0])
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
