"""Adapters for a pool of tasks: from models and batches, or from features computed before.

The adapters of all tasks train together: their weights are stacked, and no task touches another's.
T tasks · n rows of a batch · d width of a feature.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from featcal.baselines.adapters import Adapters, unit
from featcal.baselines.corrections import Stacked, Trained, trained_correction
from featcal.baselines.features import (
    Head,
    Pair,
    Step,
    encoded_steps,
    kept_steps,
    output_embeddings,
    pairs_of_several,
)
from featcal.baselines.settings import AdapterMethod, MeanShift, Training
from featcal.core.draws import generator
from featcal.core.precision import exact_products
from featcal.errors import BadBatches, BadSetting, Diverged
from featcal.models.batch import Batch, Model, check_tasks
from featcal.models.load import evaluation_mode, load_as_calibrated
from featcal.settings import require

REPORT_EVERY = 100  # steps
Audit = Mapping[int, Callable[[Adapters], object]]  # called with the adapters after that many steps


def adapters_for(
    settings: AdapterMethod,
    merged: Model,
    experts: Mapping[str, Model],
    batches: Mapping[str, Iterable[Batch]],
    head: Head,
    seed: int,
    device: str | torch.device | None,
    progress: Callable[[str], None] | None,
    audit: Audit | None = None,
) -> Adapters:
    """Train one adapter per task for a merged model; `audit` as in `train`."""
    module = checked(settings, merged, experts, batches, seed, device)
    if settings.features == "unit" and output_embeddings(module) is not None:
        raise BadSetting(
            f"{settings.name}.features",
            "unit",
            "must be raw for a language model, whose head reads the length too",
        )
    if not isinstance(settings, MeanShift) and settings.encode == "each_step":
        modules = {task: as_module(experts[task], device) for task in sorted(experts)}
        with evaluation_mode([module, *modules.values()]):
            steps = encoded_steps(module, modules, batches, head, settings, seed)
            return train(settings, islice(steps, settings.steps), seed, progress, audit)
    return adapters_from(
        settings, pool_features(module, experts, batches, head, device), seed, progress, audit
    )


def checked(
    settings: AdapterMethod,
    merged: Model,
    experts: Mapping[str, Model],
    batches: Mapping[str, Iterable[Batch]],
    seed: int,
    device: str | torch.device | None,
) -> nn.Module:
    """Check tasks and seed, and return the merged model as a module."""
    check_tasks(experts, batches)
    require(seed >= 0, f"{settings.name}.seed", seed, "must be at least 0")
    return as_module(merged, device)


def adapters_from(
    settings: AdapterMethod,
    pairs: Mapping[str, Pair],
    seed: int,
    progress: Callable[[str], None] | None = None,
    audit: Audit | None = None,
) -> Adapters:
    """Train one adapter per task from features computed before.

    Raises: BadSetting for settings that compute the features of every batch anew.
    """
    if isinstance(settings, MeanShift):
        return Adapters(
            settings,
            seed,
            {task: {"shift": shift(settings, task, pair)} for task, pair in pairs.items()},
        )
    if settings.encode != "once":
        raise BadSetting(
            f"{settings.name}.encode", settings.encode, "must be once where features are given"
        )
    return train(
        settings, islice(kept_steps(pairs, settings, seed), settings.steps), seed, progress, audit
    )


def pool_features(
    merged: Model,
    experts: Mapping[str, Model | Tensor],
    batches: Mapping[str, Iterable[Batch]],
    head: Head = None,
    device: str | torch.device | None = None,
) -> dict[str, Pair]:
    """Compute features of every task by the merged model and its expert, one expert at a time.

    experts: models, or their features of the same batches, (rows, d).
    """
    module, found = as_module(merged, device), {}
    for task in sorted(experts):
        expert = experts[task]
        theirs = expert if isinstance(expert, Tensor) else as_module(expert, device)
        found[task] = pairs_of_several(task, {"": module}, theirs, batches[task], head)[""]
    return found


def as_module(model: Model, device: str | torch.device | None) -> nn.Module:
    """Return a module as it is; load a folder onto the device (of a CLIP its vision tower)."""
    return model if isinstance(model, nn.Module) else load_as_calibrated(model).to(device or "cpu")


def shift(settings: MeanShift, task: str, pair: Pair) -> Tensor:
    """Return the mean (1, d) of expert's − merged model's features of one task, on the CPU.

    Summed in float64; float64 only where the features are.
    Raises: BadBatches for features that hold NaN or infinity.
    """
    means = []
    for rows in (pair.expert, pair.merged):  # (n, d)
        exact = rows if rows.dtype == torch.float64 else rows.float()
        means.append(
            (unit(exact) if settings.features == "unit" else exact).mean(
                0, keepdim=True, dtype=torch.float64
            )
        )
    moved = (means[0] - means[1]).cpu()
    if not torch.isfinite(moved).all():
        raise BadBatches(
            task,
            "gives features that are not finite; look for NaN in the samples and in both models",
        )
    return moved if pair.merged.dtype == torch.float64 else moved.float()


def train(
    settings: Training,
    steps: Iterable[Step],
    seed: int,
    progress: Callable[[str], None] | None = None,
    audit: Audit | None = None,
) -> Adapters:
    """Train adapters of all tasks from batches of features, one optimiser step per item of `steps`.

    Every task has its own generators, Adam moments and loss: training the tasks one by one gives
    the same adapters. `audit` sees what a training of that many steps returns.
    Returns: the adapters with the loss of every step.  Raises: Diverged; BadBatches for no step.
    """
    steps = iter(steps)
    first = next(steps, None)
    if first is None:
        raise BadBatches("*", "holds no step to train on")
    method, tasks = trained_correction(settings), list(first)
    weights = first_weights(method, first, seed)
    noise = {task: generator(task, "noise", seed) for task in tasks}
    losses = []
    optimiser = torch.optim.Adam(
        weights.values(), lr=settings.lr, betas=(0.9, 0.999), weight_decay=0.0, fused=True
    )
    with torch.enable_grad(), exact_products():
        for number, step in enumerate(chain([first], steps)):
            batch = stacked(step, settings)
            loss = method.loss(
                weights, batch, drawn(noise, batch) if method.noisy else None
            )  # (T,)
            require_finite(settings, tasks, number, loss.detach())
            optimiser.zero_grad()
            loss.sum().backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            losses.append(loss.detach())
            if progress and (number + 1) % REPORT_EVERY == 0:
                progress(
                    f"{settings.name}  step {number + 1}  {len(tasks)} tasks  loss {float(loss.detach().mean()):.5f}"
                )
            if audit and number + 1 in audit:
                audit[number + 1](own_adapters(settings, seed, tasks, weights, losses))
    for weight in weights.values():  # what the last step made has not been through a loss
        require_finite(settings, tasks, len(losses) - 1, weight.detach().flatten(1).sum(1))
    return own_adapters(settings, seed, tasks, weights, losses)


def own_adapters(
    settings: Training,
    seed: int,
    tasks: list[str],
    weights: Mapping[str, Tensor],
    losses: list[Tensor],
) -> Adapters:
    """Split the stacked weights (T, …) into each task's adapter, with its losses so far."""
    curves = torch.stack(losses, dim=1).cpu()  # (T, steps)
    own = {
        task: {name: w[i].detach().cpu().clone() for name, w in weights.items()}
        for i, task in enumerate(tasks)
    }
    return Adapters(settings, seed, own, {task: curves[i].tolist() for i, task in enumerate(tasks)})


def first_weights(method: Trained, step: Step, seed: int) -> dict[str, nn.Parameter]:
    """Initialise the weights of all tasks, (T, …): a method's first uniform in ±1/√d, the others 0,
    so nothing is corrected yet.
    """
    like = next(iter(step.values())).merged
    shapes = method.shapes(like.shape[-1])
    drawn_name = next(iter(shapes))
    stacks = {name: torch.zeros(len(step), *shape) for name, shape in shapes.items()}
    for i, task in enumerate(step):
        nn.init.kaiming_uniform_(
            stacks[drawn_name][i], a=5**0.5, generator=generator(task, "initialisation", seed)
        )
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return {name: nn.Parameter(stack.to(like.device, dtype)) for name, stack in stacks.items()}


def stacked(step: Step, settings: Training) -> Stacked:
    """Stack the batches of all tasks in one tensor, padded with zeros."""
    sides = []
    for rows in ([pair.merged for pair in step.values()], [pair.expert for pair in step.values()]):
        exact = [r if r.dtype == torch.float64 else r.float() for r in rows]
        sides.append(
            pad_sequence(
                [unit(r) if settings.features == "unit" else r for r in exact], batch_first=True
            )
        )
    counts = torch.tensor([len(pair.merged) for pair in step.values()], device=sides[0].device)
    return Stacked(sides[0], sides[1], counts)


def drawn(noise: Mapping[str, torch.Generator], batch: Stacked) -> Tensor:
    """Draw standard normal noise (T, n, d), the same on every device."""
    width = batch.merged.shape[-1]
    rows = [
        torch.randn(int(n), width, generator=g)
        for n, g in zip(batch.counts.tolist(), noise.values(), strict=True)
    ]
    return pad_sequence(rows, batch_first=True).to(batch.merged)


def require_finite(settings: Training, tasks: list[str], step: int, values: Tensor) -> None:
    """Raise Diverged for the first task whose value (T,) is not a number."""
    if not torch.isfinite(values).all():
        task = tasks[int((~torch.isfinite(values)).nonzero()[0])]
        look = "NaN in the features: the merged model, the expert, or the samples of this task"
        raise Diverged(
            f"{settings.name} {task!r}",
            step,
            f"{settings.name}.lr, 1e-3 in the paper",
            settings.lr,
            look,
        )
