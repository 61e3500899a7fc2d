"""Training the adapters of all tasks at once: their weights lie behind each other, and no task
touches another's.

T tasks · n rows of a batch · d width of a feature. Knows no models: features come in step by step.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from featcal.core.precision import exact_products
from featcal.errors import BadBatches, Diverged
from featcal.rivals.adapters import Adapters, unit
from featcal.rivals.corrections import Stacked, Trained, trained_correction
from featcal.rivals.draws import generator
from featcal.rivals.settings import Training
from featcal.rivals.steps import Step

TOLD_EVERY = 100  # steps
Audit = Mapping[
    int, Callable[[Adapters], object]
]  # what to do with the adapters after so many steps


def train(
    settings: Training,
    steps: Iterable[Step],
    seed: int,
    progress: Callable[[str], None] | None = None,
    audit: Audit | None = None,
) -> Adapters:
    """Adapters of all tasks from batches of features, one optimiser step per item of `steps`.

    Every task has its own generators, its own Adam moments (Adam works entry by entry) and its own
    loss; training the tasks one by one gives the same adapters. After k steps they are what a
    training of k steps returns, which is what `audit` sees.
    Returns: the adapters with the loss of every step.  Raises: Diverged naming task and step;
    BadBatches for no step.
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
            if progress and (number + 1) % TOLD_EVERY == 0:
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
    """Each task's own adapter out of the stacked weights (T, …), with its loss of every step so
    far.
    """
    curves = torch.stack(losses, dim=1).cpu()  # (T, steps)
    own = {
        task: {name: w[i].detach().cpu().clone() for name, w in weights.items()}
        for i, task in enumerate(tasks)
    }
    return Adapters(settings, seed, own, {task: curves[i].tolist() for i, task in enumerate(tasks)})


def first_weights(method: Trained, step: Step, seed: int) -> dict[str, nn.Parameter]:
    """Weights of all tasks, (T, …): the first of a method uniform in ±1/√d, the others zero, so
    nothing is corrected yet.
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
    """The batch of every task in one tensor, filled up with zeros."""
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
    """Standard normal noise for the rows of every task, (T, n, d), the same on every device."""
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
