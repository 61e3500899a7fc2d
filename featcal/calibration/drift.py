"""Drift of whole models against an expert: block by block for measuring (Figures 1, 2, 6 and 7), or
behind the last block.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from featcal.calibration.features import on_device
from featcal.core.drift import Drift
from featcal.core.precision import exact_products
from featcal.models.batch import check_batch, naming, pad_token, padding_mask
from featcal.models.capture import StopForward, block_outputs, hooked, model_call
from featcal.models.families import plan_for
from featcal.models.load import evaluation_mode
from featcal.models.plan import BlockPlan, Stack, blocks_of
from featcal.models.streamed import ModelHandle


def features_by_stack(
    model: nn.Module, batch: Mapping[str, Any], plan: BlockPlan
) -> dict[str, tuple[Stack, Tensor]]:
    """Features (batch, tokens, d) of one batch with their stacks: "embeddings" before the first
    block, "00", "01", … after each.

    Names begin with that of the stack, as in "decoder.00", where the model has several.
    """
    with evaluation_mode([model]), exact_products(), ExitStack() as hooks:
        seen = [
            (stack, hooks.enter_context(block_outputs(model, blocks_of(model, stack))))
            for stack in plan.stacks
        ]
        model(**model_call(model, batch))
    found = {}
    for stack, features in seen:
        prefix = f"{stack.name}." if len(seen) > 1 else ""
        found.update({prefix + name: (stack, h) for name, h in features.items()})
    return found


def model_drift(
    model: nn.Module, expert: nn.Module, batches: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """One record per block: relative drift over all tokens, distance and cosine of the first
    (class) token.

    Returns: [{"block", "relative_drift", "l2", "cosine", "count"}, …] in forward order,
    "embeddings" first; count is samples.
    """
    tokens: dict[str, Drift] = {}
    first: dict[str, Drift] = {}
    plan = plan_for(model)
    for batch in batches:
        ours, theirs = features_by_stack(model, batch, plan), features_by_stack(expert, batch, plan)
        for block, (stack, h) in ours.items():
            h_exp = theirs[block][1]
            tokens.setdefault(block, Drift()).add(
                h, h_exp, padding_mask(batch, h, stack.mask, pad_token(model))
            )
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


@contextmanager
def last_outputs(
    model: nn.Module, plan: BlockPlan, stop: bool = False
) -> Iterator[dict[str, Tensor]]:
    """What leaves the last block of every stack during the next forward, (batch, tokens, d) by
    stack.

    stop: the forward ends behind the last of them, as what follows is not needed.
    """
    seen: dict[str, Tensor] = {}

    def note(name: str, output: Any) -> None:
        seen[name] = output if isinstance(output, Tensor) else output[0]
        if stop and len(seen) == len(plan.stacks):
            raise StopForward

    last = {stack.name: blocks_of(model, stack)[-1] for stack in plan.stacks}
    handles = [
        block.register_forward_hook(lambda _m, _a, out, n=name: note(n, out))
        for name, block in last.items()
    ]
    with suppress(StopForward), hooked(handles):
        yield seen


def last_features(model: nn.Module, batch: Mapping[str, Any], plan: BlockPlan) -> dict[str, Tensor]:
    """What leaves the last block of every stack, of one batch."""
    with last_outputs(model, plan, stop=True) as seen:
        model(**model_call(model, batch))
    return seen


def expert_drift(
    task: str,
    models: Mapping[str, ModelHandle],
    expert: ModelHandle,
    plan: BlockPlan,
    batches: Iterable[Mapping[str, Any]],
    device: torch.device,
) -> tuple[dict[str, dict[str, Drift]], int]:
    """Drift behind the last block of every stack, {stack: {model: Drift}}, on the same batches; and
    how many samples they hold.

    Of a model that lies in a folder a block is in memory while it computes, batch after batch.
    Raises: BadBatches.
    """
    found: dict[str, dict[str, Drift]] = {
        stack.name: {name: Drift() for name in models} for stack in plan.stacks
    }
    samples = 0
    for number, given in enumerate(batches):
        check_batch(task, number, given, expert.module)
        batch = on_device(given, device)
        with naming(task, number):
            with expert.running() as teacher:
                theirs = last_features(teacher, batch, plan)
            for name, held in models.items():
                with held.running() as model:
                    ours = last_features(model, batch, plan)
                    for stack in plan.stacks:
                        mask = padding_mask(batch, ours[stack.name], stack.mask, pad_token(model))
                        found[stack.name][name].add(ours[stack.name], theirs[stack.name], mask)
        samples += len(theirs[plan.stacks[0].name])
    return found, samples
