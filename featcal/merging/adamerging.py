"""AdaMerging: coefficients of the task vectors, one per tensor or per expert, that make a model
sure of its answers.

Adam lowers the entropy of the zero-shot answers to unlabelled images or texts. Every expert is in
memory.
Source: Yang et al., 2024; FusionBench's and the official code differ in clamping and in the batches
of a step.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from featcal.blocks.batches import check_batch, check_tasks, naming
from featcal.core.precision import exact_products
from featcal.errors import BadBatches, Diverged
from featcal.merging.answers import answer_logits, encoder
from featcal.merging.job import Job, Named

REPORTS = 20  # lines of progress, whatever the number of steps


def entropy(logits: Tensor) -> Tensor:
    """Mean over rows of −Σ p log(p + 1e-8), p the softmax of logits (n, K); the constant is the
    source's.
    """
    p = logits.softmax(-1)
    return -(p * (p + 1e-8).log()).sum(-1).mean()


class Mixture:
    """θ = θ₀ + Σ λᵢ τᵢ as a function of coefficients (experts, tensors) or (experts, 1), and its
    derivative.
    """

    def __init__(self, job: Job):
        self.names, settings = job.names, job.settings
        self.base: dict[str, Tensor] = {}
        self.vectors: dict[str, Tensor] = {}  # (experts, ...) each
        for name in self.names:
            self.base[name], experts = job.read(name)
            self.vectors[name] = torch.stack(
                [(e.double() - self.base[name].double()).to(e.dtype) for e in experts]
            )
        shape = (len(job.experts), len(self.names) if settings.granularity == "layer" else 1)
        self.coefficients = torch.full(
            shape, settings.start, dtype=torch.float64, requires_grad=True
        )
        self._clamp = settings.clamp

    def effective(self) -> Tensor:
        """What multiplies every task vector: (experts, tensors)."""
        used = self.coefficients.clamp(0, 1) if self._clamp else self.coefficients
        return used.expand(-1, len(self.names))

    def described(self) -> list[float | dict[str, float]]:
        """What multiplies each expert's task vector; with one coefficient per tensor, by tensor."""
        one = self.coefficients.shape[1] == 1
        return [
            row[0] if one else dict(zip(self.names, row, strict=True))
            for row in self.effective().tolist()
        ]

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """θ, each tensor a leaf of its own that gathers a gradient."""
        used = self.effective()
        mixed = {}
        for i, name in enumerate(self.names):
            vectors = self.vectors[name]
            change = torch.tensordot(used[:, i].to(vectors), vectors, dims=1)
            mixed[name] = (self.base[name] + change).requires_grad_()
        return mixed

    def pull_back(self, mixed: Mapping[str, Tensor]) -> None:
        """Turns the gradients of θ into that of the coefficients: ∂L/∂λᵢ = ⟨∂L/∂θ, τᵢ⟩ for every
        tensor, added over them.
        """
        columns = []
        for name in self.names:
            gradient, vectors = mixed[name].grad, self.vectors[name]
            flat = vectors.flatten(1)
            columns.append(
                flat.new_zeros(len(flat)) if gradient is None else flat @ gradient.flatten()
            )
        torch.autograd.backward(self.effective(), torch.stack(columns, dim=1).to(self.coefficients))


def endless(
    task: str, batches: Iterable[Mapping[str, Any]], model: nn.Module
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The batches with their numbers, again and again; an iterable that shuffles does so every
    time. Raises: BadBatches.
    """
    number = -1
    rounds = [cycle(batches)] if isinstance(batches, Iterator) else cycle([batches])
    for again in rounds:
        for number, batch in enumerate(again):
            check_batch(task, number, batch, model)
            yield number, batch
        if number < 0:
            raise BadBatches(task, "is empty; at least one batch with at least one image is needed")


def adamerging(job: Job) -> Iterator[Named]:
    """Every tensor by AdaMerging; the record keeps the loss of every step (summed over tasks) and
    the last coefficients.
    """
    models = [encoder(job, "adamerging") for _ in range(min(job.at_once, len(job.experts)))]
    check_tasks(job.experts, job.batches)
    mixture = Mixture(job)
    job.record["loss"] = descended(job, models, mixture)
    job.record["coefficients"] = dict(zip(job.experts, mixture.described(), strict=True))
    for name, tensor in mixture.tensors().items():
        yield name, tensor.detach()


@torch.enable_grad()  # whatever the caller has switched off
def descended(job: Job, models: Sequence[nn.Module], mixture: Mixture) -> list[float]:
    """Moves the coefficients by Adam. Returns: the loss before every step. Raises: Diverged naming
    the step.

    models: as many as batches are answered at the same time, by a thread each; gradients are added
    in the tasks' order, so that their number changes no bit.
    """
    settings, losses = job.settings, []
    streams = {task: endless(task, job.batches[task], models[0]) for task in job.experts}
    adam = torch.optim.Adam([mixture.coefficients], lr=settings.rate)
    with ThreadPoolExecutor(len(models)) as threads, exact_products():
        for step in range(settings.steps):
            mixed, loss = mixture.tensors(), 0.0
            turns = [task for task in job.experts for _ in range(settings.batches_per_step)]
            for start in range(0, len(turns), len(models)):
                drawn = [
                    (task, *next(streams[task])) for task in turns[start : start + len(models)]
                ]
                for entropies, gradients in threads.map(
                    partial(answer_gradients, job, mixed), models, drawn
                ):
                    loss += entropies
                    gather(mixed, gradients)
            if not abs(loss) < float("inf"):
                raise Diverged(
                    "adamerging",
                    step,
                    "merge.rate",
                    settings.rate,
                    "overflowing numbers in the experts or the data",
                )
            losses.append(loss)
            adam.zero_grad()
            mixture.pull_back(mixed)
            adam.step()
            if (step + 1) % max(1, settings.steps // REPORTS) == 0:
                job.progress(f"adamerging {step + 1}/{settings.steps}: entropy {loss:.4f}")
    return losses


def answer_gradients(
    job: Job,
    mixed: Mapping[str, Tensor],
    model: nn.Module,
    drawn: tuple[str, int, Mapping[str, Any]],
) -> tuple[float, Sequence[Tensor | None]]:
    """Entropy of the answers to one batch, and its gradient with respect to every tensor; None for
    one that it does not ask.
    """
    task, number, batch = drawn
    with naming(task, number):
        loss = entropy(answer_logits(job.head, model, mixed, task, batch))
        return float(loss.detach()), torch.autograd.grad(
            loss, list(mixed.values()), allow_unused=True
        )


def gather(mixed: Mapping[str, Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Adds gradients to those that the tensors have gathered."""
    for tensor, gradient in zip(mixed.values(), gradients, strict=True):
        if gradient is not None:
            tensor.grad = gradient if tensor.grad is None else tensor.grad.add_(gradient)
