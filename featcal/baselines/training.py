"""Training of adapters: from models and batches, or from features computed before.

The adapters of all tasks train together: their weights are stacked, and no task affects another.
T tasks · n rows of a batch, one per image or per token of a text · d width of a feature.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from itertools import chain, islice
from typing import Any, ClassVar, Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from featcal.baselines.adapters import Adapters, Audit, Baseline, Pair, Progress
from featcal.core import generator
from featcal.core.precision import exact_products
from featcal.errors import BadBatches, BadSetting, Diverged, counted
from featcal.models import batch as of_batches
from featcal.models.batch import Batch, Batches, Head, Model, TaskBatches, single_samples
from featcal.models.load import evaluation_mode, load_as_calibrated, torch_device
from featcal.models.lora import unwrapped
from featcal.settings import require

REPORT_EVERY = 100  # steps
Device = str | torch.device | None
Experts = Mapping[str, Model]  # by task
Pairs = Mapping[str, Pair]  # features of every task: all of them, or those of one step


class Training(Baseline):
    """Adapters that are trained by Adam, one step per batch; `Surgery` explains the settings.

    A subclass has `row_losses`, the loss (T, n) from weights, features (T, n, d), noise if `noisy`.
    """

    noisy: ClassVar[bool] = False
    steps: PositiveInt = 1000
    lr: PositiveFloat = 1e-3
    batch: PositiveInt = 16
    features: Literal["unit", "raw"] = "raw"
    reshuffle: PositiveInt | None = None
    encode: Literal["once", "each_step"] = "once"

    def fit(
        self, pairs: Pairs, seed: int = 42, progress: Progress = None, audit: Audit = None
    ) -> Adapters:
        """Train one adapter per task from features computed before; `audit` as in `train`."""
        expected = "must be once where features are given"
        require(self.encode == "once", f"{self.name}.encode", self.encode, expected)
        steps = islice(cached_steps(pairs, self, seed), self.steps)
        return train(self, steps, seed, progress, audit)


def public(kind: type[Baseline]) -> Callable[..., Adapters]:
    """Return the public function of a baseline; the settings are its keyword arguments."""

    @exact_products()
    def run(merged: Model, experts: Experts, batches: TaskBatches, **keywords: Any) -> Adapters:
        options = {name: keywords.pop(name, default) for name, (_, default) in shared.items()}
        settings = kind.from_mapping(keywords, kind.name)
        module = as_module(merged, options["device"])
        if "features" not in keywords and of_batches.output_embeddings(module) is not None:
            settings = settings.but(features="raw")
        return adapters_for(settings, module, experts, batches, **options)

    shared: dict[str, Any] = {"head": (Head, None), "device": (Device, None)}
    if issubclass(kind, Training):
        shared |= {"seed": (int, 42), "progress": (Progress, None)}
    fields = {name: (field.annotation, field.default) for name, field in kind.model_fields.items()}
    parameters = list(signature(run).parameters.values())[:-1]
    for name, (kind_of, default) in (shared | fields).items():
        keyword = Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind_of, default=default)
        parameters.append(keyword)
    run.__signature__ = Signature(parameters, return_annotation=Adapters)
    run.__name__ = run.__qualname__ = kind.name
    run.__module__, run.__doc__ = kind.__module__, kind.__doc__
    return run


def adapters_for(
    settings: Baseline,
    merged: Model,
    experts: Experts,
    batches: TaskBatches,
    head: Head = None,
    seed: int = 0,
    device: Device = None,
    progress: Progress = None,
    audit: Audit = None,
) -> Adapters:
    """Make one adapter per task for a merged model; `audit` as in `train`."""
    of_batches.check_tasks(experts, batches)
    require(seed >= 0, f"{settings.name}.seed", seed, "must be at least 0")
    module = as_module(merged, device)
    if settings.features == "unit" and of_batches.output_embeddings(module) is not None:
        expected = "must be raw for a language model, whose head also uses the norm"
        raise BadSetting(f"{settings.name}.features", "unit", expected)
    if isinstance(settings, Training) and settings.encode == "each_step":
        modules = {task: as_module(experts[task], device) for task in sorted(experts)}
        with evaluation_mode([module, *modules.values()]):
            steps = encoded_steps(module, modules, batches, head, settings, seed)
            return train(settings, islice(steps, settings.steps), seed, progress, audit)
    pairs = pool_features(module, experts, batches, head, device)
    return settings.fit(pairs, seed, progress, audit)


def pool_features(
    merged: Model, experts: Experts, batches: TaskBatches, head: Head = None, device: Device = None
) -> dict[str, Pair]:
    """Compute features of every task by the merged model and its expert, one expert at a time."""
    module, pairs = as_module(merged, device), {}
    for task in sorted(experts):
        expert = as_module(experts[task], device)
        pairs[task] = pairs_of_several(task, {"": module}, expert, batches[task], head)[""]
    return pairs


def pairs_of_several(
    task: str, merged: Mapping[str, nn.Module], expert: nn.Module, batches: Batches, head: Head
) -> dict[str, Pair]:
    """Compute features of one task by each merged model and the expert."""
    merged_rows: dict[str, list[Tensor]] = {name: [] for name in merged}
    expert_rows, sizes = [], []
    with evaluation_mode([*merged.values(), expert]):
        for number, batch in enumerate(batches):
            with of_batches.naming(task, number):
                for name, model in merged.items():
                    rows, counts = of_batches.rows_before_head(model, batch, head)
                    merged_rows[name].append(rows)
                features, _ = of_batches.rows_before_head(expert, batch, head)
                expert_rows.append(features.to(rows.device))
                sizes.append(counts)  # tokens without padding, the same for every model
    if not sizes:
        raise BadBatches(task, "is empty; an adapter needs at least one batch")
    shared = torch.cat(expert_rows), torch.cat(sizes)
    return {name: pair_of(task, torch.cat(rows), *shared) for name, rows in merged_rows.items()}


def pair_of(task: str, merged: Tensor, expert: Tensor, sizes: Tensor) -> Pair:
    """Return the features of both models. Raises: BadBatches if they differ in shape."""
    if merged.shape != expert.shape:
        shapes = f"{(*expert.shape,)} by the expert, but {(*merged.shape,)} by the merged model"
        raise BadBatches(task, f"gives features {shapes}; both need one architecture")
    return Pair(merged, expert, sizes)


def as_module(model: Model, device: Device) -> nn.Module:
    """Return a module unwrapped; load a folder onto the device (for CLIP its vision tower)."""
    device = torch_device(device or "cpu")
    model = unwrapped(model)
    return model if isinstance(model, nn.Module) else load_as_calibrated(model).to(device)


@dataclass(frozen=True)
class InMemorySamples:
    """Samples in memory, each a batch of one."""

    task: str
    singles: Sequence[Batch]
    pad: int | None = None  # the model's padding token, which ends a decoder's tokens

    def __len__(self) -> int:
        return len(self.singles)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return these samples as one batch."""
        return together(self.task, [self.singles[i] for i in indices], self.pad)


def samples_of(task: str, batches: Batches, pad: int | None = None) -> Any:
    """Return `batches.by_number()`, or else all samples, read into memory. Raises: BadBatches."""
    by_number = getattr(batches, "by_number", None)
    samples = by_number() if by_number else InMemorySamples(task, single_samples(batches), pad)
    if not len(samples):
        raise BadBatches(task, "is empty; an adapter needs at least one sample")
    return samples


def together(task: str, samples: Sequence[Batch], pad: int | None = None) -> Batch:
    """Return samples, each a batch of one, as one batch; shorter texts are padded at the end."""
    batch = dict(samples[0])
    sizes = [[v.shape[1:] for v in s.values() if getattr(v, "ndim", 2) != 2] for s in samples]
    if len({(*sample, *size) for sample, size in zip(samples, sizes, strict=True)}) > 1:
        way_out = "give all the same keys and one size, or encode='once'"
        raise BadBatches(task, f"holds samples that make no batch; {way_out}")
    for name, first in samples[0].items():
        if not isinstance(first, Tensor):
            continue
        values = [sample[name] for sample in samples]
        several = len({value.shape[-1] for value in values}) > 1
        if name == "input_ids" and several and "attention_mask" not in samples[0]:
            raise BadBatches(task, "texts differ in length; give an attention_mask with them")
        if first.dim() == 2:
            fill = {"labels": of_batches.IGNORED, "decoder_input_ids": pad or 0}.get(name, 0)
            rows = [value[0] for value in values]
            batch[name] = pad_sequence(rows, batch_first=True, padding_value=fill)
        else:
            batch[name] = torch.cat(values)
    return batch


def batch_order(task: str, count: int, settings: Any, seed: int) -> Iterator[Tensor]:
    """Yield the indices (n,) of each step's samples; the last step of a shuffle may have fewer."""
    draws = generator(task, "batches", seed)
    while True:
        shuffled = torch.randperm(count, generator=draws)
        yield from shuffled.split(settings.batch)[: settings.reshuffle]


def cached_steps(pairs: Pairs, settings: Training, seed: int) -> Iterator[Pairs]:
    """Yield batches of features that were computed once."""
    orders = {t: batch_order(t, len(pair.sizes), settings, seed) for t, pair in pairs.items()}
    while True:
        yield {task: pair.of(next(orders[task])) for task, pair in pairs.items()}


def encoded_steps(
    merged: nn.Module,
    experts: Mapping[str, nn.Module],
    batches: TaskBatches,
    head: Head,
    settings: Training,
    seed: int,
) -> Iterator[Pairs]:
    """Yield the same batches, running both models for each, as published, all in memory."""
    pad = getattr(getattr(merged, "config", None), "pad_token_id", None)
    samples = {task: samples_of(task, batches[task], pad) for task in experts}
    orders = {task: batch_order(task, len(samples[task]), settings, seed) for task in experts}
    while True:
        step = {}
        for task, expert in experts.items():
            batch = samples[task].batch(next(orders[task]).tolist())
            with torch.no_grad(), of_batches.naming(task, 0):
                rows, sizes = of_batches.rows_before_head(merged, batch, head)
                expert_rows, _ = of_batches.rows_before_head(expert, batch, head)
            step[task] = pair_of(task, rows, expert_rows.to(rows.device), sizes)
        yield step


def train(
    settings: Training, steps: Iterable[Pairs], seed: int, progress: Progress, audit: Audit
) -> Adapters:
    """Train adapters of all tasks, one optimiser step per item of `steps`. Raises: Diverged.

    Every task has its own generators, Adam moments and loss: trained alone it gets the same
    adapter. `audit` receives the result of a training with that many steps.
    """
    steps = iter(steps)
    first = next(steps)
    tasks, weights, losses = list(first), first_weights(settings, first, seed), list[Tensor]()
    generators = {task: generator(task, "noise", seed) for task in tasks}
    optimiser = torch.optim.Adam(weights.values(), lr=settings.lr, fused=True)

    def adapters_so_far() -> Adapters:
        curves = torch.stack(losses, dim=1).tolist()  # (T, steps)
        by_task = {
            task: {name: weight[i].detach().cpu().clone() for name, weight in weights.items()}
            for i, task in enumerate(tasks)
        }
        return Adapters(settings, seed, by_task, dict(zip(tasks, curves, strict=True)))

    def require_finite(step: int, values: Tensor) -> None:
        for task, finite in zip(tasks, torch.isfinite(values).tolist(), strict=True):
            if not finite:
                look = "NaN in the features: the merged model, the expert, or this task's samples"
                key = f"{settings.name}.lr, 1e-3 in the paper"
                raise Diverged(f"{settings.name} {task!r}", step, key, settings.lr, look)

    with torch.enable_grad(), exact_products():
        for number, step in enumerate(chain([first], steps)):
            counts = [len(pair.merged) for pair in step.values()]
            # padded with zeros: without biases a row of zeros has neither correction nor loss
            merged_rows = [settings.prepared(pair.merged) for pair in step.values()]
            expert_rows = [settings.prepared(pair.expert) for pair in step.values()]
            merged = pad_sequence(merged_rows, batch_first=True)
            expert = pad_sequence(expert_rows, batch_first=True)
            noise = None
            if settings.noisy:  # drawn on the CPU: the same on every device
                shapes = ((pair.merged.shape, generators[task]) for task, pair in step.items())
                draws = [torch.randn(n, generator=g, dtype=torch.float32) for n, g in shapes]
                noise = pad_sequence(draws, batch_first=True).to(merged)
            rows = settings.row_losses(weights, merged, expert, noise)  # (T, n)
            loss = rows.sum(1) / torch.tensor(counts, device=rows.device)  # (T,)
            require_finite(number, loss.detach())
            optimiser.zero_grad()
            loss.sum().backward()
            optimiser.step()
            losses.append(loss.detach())
            if progress and (number + 1) % REPORT_EVERY == 0:
                done = f"{settings.name}  step {number + 1}  {counted(len(tasks), 'task')}"
                progress(f"{done}  loss {float(losses[-1].mean()):.5f}")
            if audit and number + 1 in audit:
                audit[number + 1](adapters_so_far())
    for weight in weights.values():  # the weights of the last step have not been through a loss
        require_finite(len(losses) - 1, weight.detach().flatten(1).sum(1))
    return adapters_so_far()


def first_weights(settings: Training, step: Pairs, seed: int) -> dict[str, nn.Parameter]:
    """Return initial weights of all tasks, (T, …): the first uniform in ±1/√d, the others 0."""
    example = next(iter(step.values())).merged
    shapes = settings.shapes(example.shape[-1])
    stacks = {n: torch.zeros(len(step), *s, dtype=torch.float32) for n, s in shapes.items()}
    for task, weight in zip(step, next(iter(stacks.values())), strict=True):
        draws = generator(task, "initialisation", seed)
        nn.init.kaiming_uniform_(weight, a=5**0.5, generator=draws)
    dtype = torch.float64 if example.dtype == torch.float64 else torch.float32
    return {name: nn.Parameter(stack.to(example.device, dtype)) for name, stack in stacks.items()}
