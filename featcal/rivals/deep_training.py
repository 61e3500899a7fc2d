"""Adapters inside a merged model, trained with gradients through it: of each task those of all
places together.

n samples · d width where an adapter sits.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from featcal.blocks.batches import naming, padding_mask
from featcal.blocks.capture import first_inputs, hooked
from featcal.blocks.coverage import solved_modules
from featcal.blocks.plan import Stack, blocks_of
from featcal.blocks.plans import plan_for
from featcal.blocks.replay import step
from featcal.blocks.residual import residual_streams
from featcal.core.precision import exact_products
from featcal.errors import BadPlan, Diverged
from featcal.models.mode import evaluation_mode
from featcal.models.pooling import token_mean
from featcal.rivals.adapters import Adapters
from featcal.rivals.corrections import Weights, correction_of
from featcal.rivals.deep_adapters import FEATURE, DeepAdapters, Settings, corrected, hidden_of
from featcal.rivals.draws import batch_order, generator
from featcal.rivals.features import Batch, Head, output_embeddings, projected
from featcal.rivals.pool import Model, as_module, checked
from featcal.rivals.settings import IntervMerge, SurgeryV2
from featcal.rivals.steps import Samples, samples_of
from featcal.rivals.training import TOLD_EVERY


def features(model: nn.Module, batch: Batch, head: Head, paths: Sequence[str]) -> dict[str, Tensor]:
    """Of one batch, what modules put out as a mean over tokens without padding, (n, d) each, and
    the last feature (n, p).
    """
    seen: dict[str, Tensor] = {}

    def note(path: str, out: Any) -> None:
        seen[path] = hidden_of(out)

    with hooked(
        [
            model.get_submodule(p).register_forward_hook(lambda _m, _a, out, p=p: note(p, out))
            for p in paths
        ]
    ):
        last = projected(model, batch, head)
    means = {}
    for path, hidden in seen.items():
        mask = padding_mask(batch, hidden)
        means[path] = token_mean(
            hidden, hidden.new_ones(hidden.shape[:2]) if mask is None else mask
        )
    return {**means, FEATURE: last}


def encoder_stack(model: nn.Module) -> Stack:
    """The one stack of an encoder. Raises: BadPlan for a model with several, or with a language
    head.
    """
    stacks = plan_for(model).stacks
    if len(stacks) != 1 or output_embeddings(model) is not None:
        raise BadPlan(
            type(model).__name__,
            "is no encoder of images or texts with one list of blocks, which these adapters need",
        )
    return stacks[0]


def block_paths(model: nn.Module, stack: Stack) -> list[str]:
    """Where the blocks of a stack are."""
    return [f"{stack.blocks}.{number}" for number in range(len(blocks_of(model, stack)))]


def attention_paths(model: nn.Module, stack: Stack, batch: Batch) -> list[str]:
    """In every block, the linear whose output is the first to be added to the residual stream: the
    attention's last one.
    """
    blocks, found = blocks_of(model, stack), []
    with evaluation_mode([model]):
        hidden, arguments = first_inputs(model, blocks, batch, stack.mixed)
        for path, block in zip(block_paths(model, stack), blocks, strict=True):
            with residual_streams(block, solved_modules(block)[0], hidden) as streams:
                hidden, arguments = step(block, stack, hidden, arguments)
            if not streams:
                raise BadPlan(
                    type(model).__name__, f"no linear of {path} writes into the residual stream"
                )
            found.append(f"{path}.{next(iter(streams))}")
    return found


def deep_adapters(
    settings: Settings,
    merged: Model,
    experts: Mapping[str, Model],
    batches: Mapping[str, Iterable[Batch]],
    head: Head,
    seed: int,
    device: str | torch.device | None,
    progress: Callable[[str], None] | None,
) -> DeepAdapters:
    """Adapters inside the merged model, one task after the other: none touches another's.

    Raises: BadPlan, BadSetting, UnknownKey; BadBatches; Diverged naming task and step.
    """
    model = checked(settings, merged, experts, batches, seed, device)
    stack = encoder_stack(model)
    samples = {task: samples_of(task, batches[task]) for task in sorted(experts)}
    deep = isinstance(settings, SurgeryV2)
    paths = (
        block_paths(model, stack)
        if deep
        else attention_paths(model, stack, next(iter(samples.values())).batch([0]))
    )
    places, compared = ([*paths, FEATURE], paths) if deep else (paths, [])
    own: dict[str, dict[str, Weights]] = {}  # by task and place
    losses: dict[str, list[float]] = {}
    wanted = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.requires_grad_(False)
        for task, drawn in samples.items():
            expert = as_module(experts[task], device)
            with evaluation_mode([model, expert]), exact_products():
                first = features(model, drawn.batch([0]), head, paths)
                weights = {
                    path: first_weights(settings, first[path], task, path, seed) for path in places
                }
                losses[task] = train(
                    settings, model, expert, task, drawn, head, weights, compared, seed, progress
                )
            own[task] = {
                path: {n: w.detach().cpu() for n, w in named.items()}
                for path, named in weights.items()
            }
    finally:
        for parameter, flag in wanted:
            parameter.requires_grad_(flag)
    return DeepAdapters(
        {p: Adapters(settings, seed, {task: own[task][p] for task in own}) for p in places}, losses
    )


def first_weights(
    settings: Settings, like: Tensor, task: str, path: str, seed: int
) -> dict[str, Tensor]:
    """Weights at one place, uniform in ±1/√d; Surgery's second matrix is zero, so that nothing is
    corrected yet.
    """
    draws, d = generator(task, f"initialisation {path}", seed), like.shape[-1]
    weights = {}
    for number, (name, shape) in enumerate(correction_of(settings).shapes(d).items()):
        drawn = torch.empty(shape).uniform_(-(d**-0.5), d**-0.5, generator=draws)
        kept = drawn if isinstance(settings, IntervMerge) or number == 0 else torch.zeros(shape)
        weights[name] = kept.to(like).requires_grad_()
    return weights


@torch.enable_grad()
def train(
    settings: Settings,
    model: nn.Module,
    expert: nn.Module,
    task: str,
    samples: Samples,
    head: Head,
    weights: Mapping[str, Mapping[str, Tensor]],
    compared: Sequence[str],
    seed: int,
    progress: Callable[[str], None] | None,
) -> list[float]:
    """Adam on one task's weights: Σ over compared places and the last feature of the mean absolute
    difference to the expert's.

    Returns: the loss before every step.
    """
    with torch.no_grad(), naming(task, 0):  # the expert's features of every sample are kept
        parts = torch.arange(len(samples)).split(settings.batch)
        kept = [features(expert, samples.batch(part.tolist()), head, compared) for part in parts]
        targets = {path: torch.cat([part[path] for part in kept]) for path in kept[0]}
    optimiser = torch.optim.Adam(
        [w for named in weights.values() for w in named.values()], lr=settings.lr
    )
    losses: list[float] = []
    for number, chosen in enumerate(
        islice(batch_order(task, len(samples), settings, seed), settings.steps)
    ):
        batch = samples.batch(chosen.tolist())
        with naming(task, number), corrected(model, settings, weights):
            ours = features(model, batch, head, compared)
        if FEATURE in weights:
            ours[FEATURE] = ours[FEATURE] - correction_of(settings).correction(
                weights[FEATURE], ours[FEATURE]
            )
        wanted = {
            path: rows[chosen.to(rows.device)].to(ours[path]) for path, rows in targets.items()
        }
        loss = torch.stack(
            [(ours[path] - rows).abs().mean() for path, rows in wanted.items()]
        ).sum()
        losses.append(float(loss.detach()))
        if not torch.isfinite(loss):
            look = "NaN in the features: the merged model, the expert, or the samples of this task"
            raise Diverged(
                f"{settings.name} {task!r}", number, f"{settings.name}.lr", settings.lr, look
            )
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        if progress and (number + 1) % TOLD_EVERY == 0:
            progress(f"{settings.name}  {task}  step {number + 1}  loss {losses[-1]:.5f}")
    return losses
