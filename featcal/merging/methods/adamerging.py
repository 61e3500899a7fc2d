"""AdaMerging: coefficients of the task vectors, per tensor or per expert, learnt without labels.

Adam lowers the entropy of the zero-shot answers to unlabelled images or texts. Every expert is in
memory. Source: Yang et al., 2024; FusionBench's and the official code differ in clamping and in the
batches of a step.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from typing import Any, Literal

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from featcal.core.precision import exact_products
from featcal.errors import BadBatches, Diverged
from featcal.merging.answers import answer_logits, encoder
from featcal.merging.registry import Job, Named, method
from featcal.models.batch import check_batch, check_tasks, naming

REPORTS = 20  # lines of progress, whatever the number of steps


def entropy(logits: Tensor) -> Tensor:
    """Mean over rows of −Σ p log(p + 1e-8), p = softmax of logits (n, K), as in the source."""
    p = logits.softmax(-1)
    return -(p * (p + 1e-8).log()).sum(-1).mean()


class Mixture:
    """θ = θ₀ + Σ λᵢ τᵢ as a function of coefficients (experts, tensors) or (experts, 1), and its
    derivative.
    """

    def __init__(
        self, job: Job, granularity: str = "layer", start: float = 0.3, clamp: bool = False
    ):
        self.names = job.names
        self.base: dict[str, Tensor] = {}
        self.vectors: dict[str, Tensor] = {}  # (experts, ...) each
        for name in self.names:
            self.base[name], experts = job.read(name)
            self.vectors[name] = torch.stack(
                [(e.double() - self.base[name].double()).to(self.base[name].dtype) for e in experts]
            )
        shape = (len(job.experts), len(self.names) if granularity == "layer" else 1)
        self.coefficients = torch.full(shape, start, dtype=torch.float64, requires_grad=True)
        self._clamp = clamp

    def effective(self) -> Tensor:
        """Return the factors of the task vectors, (experts, tensors)."""
        used = self.coefficients.clamp(0, 1) if self._clamp else self.coefficients
        return used.expand(-1, len(self.names))

    def described(self) -> list[float | dict[str, float]]:
        """Return each expert's coefficient, or its coefficients by tensor."""
        one = self.coefficients.shape[1] == 1
        return [
            row[0] if one else dict(zip(self.names, row, strict=True))
            for row in self.effective().tolist()
        ]

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """Return θ, each tensor a leaf that accumulates a gradient."""
        used = self.effective()
        mixed = {}
        for i, name in enumerate(self.names):
            vectors = self.vectors[name]
            change = torch.tensordot(used[:, i].to(vectors), vectors, dims=1)
            mixed[name] = (self.base[name] + change).requires_grad_()
        return mixed

    def pull_back(self, mixed: Mapping[str, Tensor]) -> None:
        """Set the coefficients' gradient ∂L/∂λᵢ = ⟨∂L/∂θ, τᵢ⟩ from the gradients of θ."""
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
    """Yield the batches with their numbers without end; an iterable that shuffles does so every
    round. Raises: BadBatches.
    """
    number = -1
    rounds = [cycle(batches)] if isinstance(batches, Iterator) else cycle([batches])
    for again in rounds:
        for number, batch in enumerate(again):
            check_batch(task, number, batch, model)
            yield number, batch
        if number < 0:
            raise BadBatches(task, "is empty; at least one batch with at least one image is needed")


@method(
    "adamerging", source="Yang et al., 2024; defaults of FusionBench", needs=("batches", "head")
)
def adamerging(
    job: Job,
    granularity: Literal["layer", "task"] = "layer",
    steps: NonNegativeInt = 1000,
    rate: PositiveFloat = 1e-3,
    start: float = 0.3,
    clamp: bool = False,
    batches_per_step: PositiveInt = 1,
) -> Iterator[Named]:
    """Yield every tensor by AdaMerging; the record keeps the loss of every step (summed over tasks)
    and the last coefficients.

    granularity: one coefficient per expert and tensor ("layer") or per expert ("task").
    steps, rate: of Adam; 1,000 and 0.001 are the paper's.
    start:       every coefficient before the first step.
    clamp:       keep coefficients in [0, 1] (the official code; FusionBench, which the paper used,
                 does not).
    batches_per_step: of each task, their losses added; the official code takes two.
    """
    models = [encoder(job, "adamerging") for _ in range(min(job.n_jobs, len(job.experts)))]
    check_tasks(job.experts, job.batches)
    mixture = Mixture(job, granularity, start, clamp)
    job.record["loss"] = descended(job, models, mixture, steps, rate, batches_per_step)
    job.record["coefficients"] = dict(zip(job.experts, mixture.described(), strict=True))
    for name, tensor in mixture.tensors().items():
        yield name, tensor.detach()


@torch.enable_grad()  # even under a caller's no_grad
def descended(
    job: Job,
    models: Sequence[nn.Module],
    mixture: Mixture,
    steps: int,
    rate: float,
    batches_per_step: int = 1,
) -> list[float]:
    """Move the coefficients by Adam. Returns: the loss before every step. Raises: Diverged.

    models: one thread and one batch at a time each; gradients are added in the tasks' order, so
    their number changes no bit.
    """
    losses: list[float] = []
    streams = {task: endless(task, job.batches[task], models[0]) for task in job.experts}
    turns = [task for task in job.experts for _ in range(batches_per_step)]
    adam = torch.optim.Adam([mixture.coefficients], lr=rate)
    with ThreadPoolExecutor(len(models)) as threads, exact_products():
        for step in range(steps):
            mixed, loss = mixture.tensors(), 0.0
            for first in range(0, len(turns), len(models)):
                now = turns[first : first + len(models)]
                drawn = [(task, *next(streams[task])) for task in now]
                answers = threads.map(partial(answer_gradients, job, mixed), models, drawn)
                for entropies, gradients in answers:
                    loss += entropies
                    for tensor, gradient in zip(mixed.values(), gradients, strict=True):
                        if gradient is not None:
                            old = tensor.grad
                            tensor.grad = gradient if old is None else old.add_(gradient)
            if not abs(loss) < float("inf"):
                look = "overflowing numbers in the experts or the data"
                raise Diverged("adamerging", step, "merge.rate", rate, look)
            losses.append(loss)
            adam.zero_grad()
            mixture.pull_back(mixed)
            adam.step()
            if (step + 1) % max(1, steps // REPORTS) == 0:
                job.progress(f"adamerging {step + 1}/{steps}: entropy {loss:.4f}")
    return losses


def answer_gradients(
    job: Job,
    mixed: Mapping[str, Tensor],
    model: nn.Module,
    drawn: tuple[str, int, Mapping[str, Any]],
) -> tuple[float, Sequence[Tensor | None]]:
    """Return the entropy of the answers to one batch and its gradient for every tensor; None for a
    tensor it does not depend on.
    """
    task, number, batch = drawn
    with naming(task, number):
        loss = entropy(answer_logits(job.head, model, mixed, task, batch))
        return float(loss.detach()), torch.autograd.grad(
            loss, list(mixed.values()), allow_unused=True
        )
