"""Training of adapters: from models and batches, or from features computed before.

The adapters of all tasks train together: their weights are stacked, and no task affects another.
T tasks · n rows of a batch · d width of a feature.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from featcal.baselines.adapters import Adapters, unit
from featcal.baselines.features import Pair, Step, encoded_steps, kept_steps, pairs_of_several
from featcal.baselines.settings import AdapterMethod, MeanShift, ProbSurgery, Surgery
from featcal.core.draws import generator
from featcal.core.precision import exact_products
from featcal.errors import BadBatches, BadSetting, Diverged
from featcal.models.batch import Batches, Model, check_tasks
from featcal.models.features import Head, output_embeddings
from featcal.models.load import evaluation_mode, load_as_calibrated
from featcal.settings import require

REPORT_EVERY = 100  # steps
Progress = Callable[[str], None] | None
Audit = Mapping[int, Callable[[Adapters], object]]  # called with the adapters after that many steps


def adapters_for(
    settings: AdapterMethod,
    merged: Model,
    experts: Mapping[str, Model],
    batches: Mapping[str, Batches],
    head: Head,
    seed: int,
    device: str | torch.device | None,
    progress: Progress,
    audit: Audit | None = None,
) -> Adapters:
    """Train one adapter per task for a merged model; `audit` as in `train`."""
    check_tasks(experts, batches)
    require(seed >= 0, f"{settings.name}.seed", seed, "must be at least 0")
    module = as_module(merged, device)
    if settings.features == "unit" and output_embeddings(module) is not None:
        expected = "must be raw for a language model, whose head also uses the norm"
        raise BadSetting(f"{settings.name}.features", "unit", expected)
    if not isinstance(settings, MeanShift) and settings.encode == "each_step":
        modules = {task: as_module(experts[task], device) for task in sorted(experts)}
        with evaluation_mode([module, *modules.values()]):
            steps = encoded_steps(module, modules, batches, head, settings, seed)
            return train(settings, islice(steps, settings.steps), seed, progress, audit)
    pairs = pool_features(module, experts, batches, head, device)
    return adapters_from(settings, pairs, seed, progress, audit)


def adapters_from(
    settings: AdapterMethod,
    pairs: Mapping[str, Pair],
    seed: int,
    progress: Progress = None,
    audit: Audit | None = None,
) -> Adapters:
    """Train one adapter per task from features computed before.

    Raises: BadSetting for encode="each_step".
    """
    if isinstance(settings, MeanShift):
        shifts = {task: {"shift": shift(settings, task, pair)} for task, pair in pairs.items()}
        return Adapters(settings, seed, shifts)
    expected = "must be once where features are given"
    require(settings.encode == "once", f"{settings.name}.encode", settings.encode, expected)
    steps = islice(kept_steps(pairs, settings, seed), settings.steps)
    return train(settings, steps, seed, progress, audit)


def pool_features(
    merged: Model,
    experts: Mapping[str, Model | Tensor],
    batches: Mapping[str, Batches],
    head: Head = None,
    device: str | torch.device | None = None,
) -> dict[str, Pair]:
    """Compute features of every task by the merged model and its expert, one expert at a time.

    experts: models, or their features of the same batches, (rows, d).
    """
    module, pairs = as_module(merged, device), {}
    for task in sorted(experts):
        expert = experts[task]
        theirs = expert if isinstance(expert, Tensor) else as_module(expert, device)
        pairs[task] = pairs_of_several(task, {"": module}, theirs, batches[task], head)[""]
    return pairs


def as_module(model: Model, device: str | torch.device | None) -> nn.Module:
    """Return a module as it is; load a folder onto the device (for CLIP its vision tower)."""
    if isinstance(model, nn.Module):
        return model
    loaded: nn.Module = load_as_calibrated(model)
    return loaded.to(device or "cpu")


def prepared(features: Tensor, settings: AdapterMethod) -> Tensor:
    """Return features in float32, or float64 where they are float64; of unit length if asked."""
    exact = features if features.dtype == torch.float64 else features.float()
    return unit(exact) if settings.features == "unit" else exact


def shift(settings: MeanShift, task: str, pair: Pair) -> Tensor:
    """Return the mean (1, d) of expert − merged features of one task, summed in float64, on the
    CPU.

    Raises: BadBatches for features that hold NaN or infinity.
    """
    expert, merged = (
        prepared(rows, settings).mean(0, keepdim=True, dtype=torch.float64)
        for rows in (pair.expert, pair.merged)  # (n, d)
    )
    difference = (expert - merged).cpu()
    if not torch.isfinite(difference).all():
        problem = "gives features that are not finite; look for NaN in the samples and both models"
        raise BadBatches(task, problem)
    return difference if pair.merged.dtype == torch.float64 else difference.float()


def train(
    settings: Surgery | ProbSurgery,
    steps: Iterable[Step],
    seed: int,
    progress: Progress = None,
    audit: Audit | None = None,
) -> Adapters:
    """Train adapters of all tasks from batches of features, one optimiser step per item of `steps`.

    Every task has its own generators, Adam moments and loss: training the tasks one by one gives
    the same adapters. `audit` receives the result of a training with that many steps.
    Returns: the adapters with the loss of every step.  Raises: Diverged; BadBatches for no step.
    """
    steps = iter(steps)
    first = next(steps, None)
    if first is None:
        raise BadBatches("*", "holds no step to train on")
    tasks, weights, losses = list(first), first_weights(settings, first, seed), list[Tensor]()
    generators = {task: generator(task, "noise", seed) for task in tasks}
    optimiser = torch.optim.Adam(
        weights.values(), lr=settings.lr, betas=(0.9, 0.999), weight_decay=0.0, fused=True
    )

    def adapters_so_far() -> Adapters:
        curves = torch.stack(losses, dim=1).tolist()  # (T, steps)
        own = {
            task: {name: weight[i].detach().cpu().clone() for name, weight in weights.items()}
            for i, task in enumerate(tasks)
        }
        return Adapters(settings, seed, own, dict(zip(tasks, curves, strict=True)))

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
            merged, expert = (
                pad_sequence(
                    [prepared(getattr(pair, side), settings) for pair in step.values()],
                    batch_first=True,
                )
                for side in ("merged", "expert")
            )  # (T, n, d) each
            noise = None
            if settings.noisy:  # drawn on the CPU: the same on every device
                draws = [
                    torch.randn(count, merged.shape[-1], generator=own)
                    for count, own in zip(counts, generators.values(), strict=True)
                ]
                noise = pad_sequence(draws, batch_first=True).to(merged)
            rows = settings.row_losses(weights, merged, expert, noise)  # (T, n)
            loss = rows.sum(1) / torch.tensor(counts, device=rows.device)  # (T,)
            require_finite(number, loss.detach())
            optimiser.zero_grad()
            loss.sum().backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            losses.append(loss.detach())
            if progress and (number + 1) % REPORT_EVERY == 0:
                mean = float(losses[-1].mean())
                progress(f"{settings.name}  step {number + 1}  {len(tasks)} tasks  loss {mean:.5f}")
            if audit and number + 1 in audit:
                audit[number + 1](adapters_so_far())
    for weight in weights.values():  # the weights of the last step have not been through a loss
        require_finite(len(losses) - 1, weight.detach().flatten(1).sum(1))
    return adapters_so_far()


def first_weights(
    settings: Surgery | ProbSurgery, step: Step, seed: int
) -> dict[str, nn.Parameter]:
    """Return initial weights of all tasks, (T, …): a method's first one uniform in ±1/√d, the
    others 0, so that nothing is corrected yet.
    """
    example = next(iter(step.values())).merged
    shapes = settings.shapes(example.shape[-1])
    stacks = {name: torch.zeros(len(step), *shape) for name, shape in shapes.items()}
    for task, weight in zip(step, next(iter(stacks.values())), strict=True):
        draws = generator(task, "initialisation", seed)
        nn.init.kaiming_uniform_(weight, a=5**0.5, generator=draws)
    dtype = torch.float64 if example.dtype == torch.float64 else torch.float32
    return {name: nn.Parameter(stack.to(example.device, dtype)) for name, stack in stacks.items()}
