"""Mergers that use a model's zero-shot answers: AdaMerging, Fisher merging, gradient matching.

AdaMerging learns coefficients of the task vectors by lowering the entropy of answers to unlabelled
samples. Source: Yang et al., 2024; FusionBench's and the official code differ in clamping and in
the batches of a step. Fisher merging weights entries by how much the answers depend on them.
Source: Matena and Raffel, 2022 (arXiv 2111.09832), with a label drawn from each answer; normalised
as in FusionBench (fusion_bench/method/fisher_merging/fisher_merging.py), which squares one gradient
per batch, where the definition has one per sample. Gradient matching: Daheim et al., ICLR 2024
(arXiv 2310.12808); in the authors' code (UKPLab/iclr2024-model-merging,
code/uncertainty_based_gradient_matching.py) H₀ comes from pretraining samples, which are not
available here: it comes from the base's answers to the experts' samples. All models are in memory.

n samples · h width of the encoder · p width of a feature · K classes of a task."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from typing import Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.func import functional_call

from featcal.core import generator
from featcal.core.precision import SUM_DTYPE, wide
from featcal.errors import BadBatches, Diverged, counted
from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.merging.sources import Tensors
from featcal.merging.tensors import task_vectors, tensor_sum
from featcal.models import batch as of_batches
from featcal.models.batch import Batch, Batches, is_encoder, lasting
from featcal.settings import require

State = Mapping[str, Tensor]  # a model's tensors, or something about each, by name
REPORTS = 20  # lines of progress, whatever the number of steps


def encoder(job: MergeJob, method: str) -> nn.Module:
    """Return a module like the base on the job's device. Raises: BadSetting if it has a head."""
    model = job.structure().to(job.device).eval()
    kind, expected = type(model).__name__, "requires an encoder without classifier or language head"
    require(is_encoder(model), "merge.method", method, f"{expected}, and the base is a {kind}")
    return model


def zero_shot_logits(
    head: State, model: nn.Module, tensors: State, task: str, batch: Batch
) -> Tensor:
    """Return exp(logit_scale) f Wᵀ, (n, K), for unit features f (n, p) and a head W (K, p)."""
    weight, call = next(iter(tensors.values())), dict(batch)
    for name, value in batch.items():
        if isinstance(value, Tensor):
            dtype = weight.dtype if value.is_floating_point() else None
            call[name] = value.to(weight.device, dtype)
    output = functional_call(model, dict(tensors), kwargs=call)
    vectors = of_batches.pooled_output(model, output, call)  # (n, h)
    expected = "must give pooled features, which heads read, and this one gives none"
    require(vectors is not None, "merge.base", type(model).__name__, expected)
    projection = head.get("visual_projection")
    projected = vectors if projection is None else vectors @ projection.to(weight).T
    features = nn.functional.normalize(projected, dim=-1)  # (n, p)
    return head["logit_scale"].to(weight).exp() * features @ head[f"head/{task}"].to(weight).T


def entropy(logits: Tensor) -> Tensor:
    """Return the mean over rows of −Σ p log(p + 1e-8), p = softmax of logits (n, K)."""
    p = wide(logits).softmax(-1)  # in float16 1e-8 would be 0
    return -(p * (p + 1e-8).log()).sum(-1).mean()


class Mixture:
    """θ = θ₀ + Σ λᵢ τᵢ as a function of coefficients λ, (experts, tensors) or (experts, 1)."""

    def __init__(
        self, job: MergeJob, granularity: str = "layer", start: float = 0.3, clamp: bool = False
    ):
        self.names = job.names
        self.base = dict[str, Tensor]()
        self.vectors = dict[str, Tensor]()  # (experts, ...) each
        for name in self.names:
            self.base[name], experts = job.read(name)
            vectors = task_vectors(self.base[name], experts)
            self.vectors[name] = torch.stack(vectors).to(self.base[name].dtype)
        shape = (len(job.experts), len(self.names) if granularity == "layer" else 1)
        self.coefficients = torch.full(shape, start, dtype=torch.float64, requires_grad=True)
        self._clamp = clamp

    def effective(self) -> Tensor:
        """Return the factors of the task vectors, (experts, tensors)."""
        used = self.coefficients.clamp(0, 1) if self._clamp else self.coefficients
        return used.expand(-1, len(self.names))

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """Return θ, each tensor a leaf that accumulates a gradient."""
        factors, mixed = self.effective(), {}
        for i, name in enumerate(self.names):
            vectors = self.vectors[name]
            change = torch.tensordot(factors[:, i].to(vectors), vectors, dims=1)
            mixed[name] = (self.base[name] + change).requires_grad_()
        return mixed

    def pull_back(self, mixed: State) -> None:
        """Set the coefficients' gradient ∂L/∂λᵢ = ⟨∂L/∂θ, τᵢ⟩ from the gradients of θ."""
        columns = []
        for name in self.names:
            gradient, flat = mixed[name].grad, self.vectors[name].flatten(1)
            unused = gradient is None
            columns.append(flat.new_zeros(len(flat)) if unused else flat @ gradient.flatten())
        torch.autograd.backward(self.effective(), torch.stack(columns, dim=1).to(self.coefficients))


def endless(task: str, batches: Batches, model: nn.Module) -> Iterator[tuple[int, Batch]]:
    """Yield numbered batches forever; an iterable that shuffles does so in every round."""
    rounds = [cycle(lasting(batches))] if isinstance(batches, Iterator) else cycle([batches])
    for shuffled in rounds:
        number = -1
        for number, batch in enumerate(shuffled):
            of_batches.check_batch(task, number, batch, model)
            yield number, batch
        if number < 0:
            raise BadBatches(task, "is empty; at least one batch with at least one image is needed")


@method(source="Yang et al., 2024; defaults of FusionBench", needs=("batches", "head"))
def adamerging(
    job: MergeJob,
    granularity: Literal["layer", "task"] = "layer",
    steps: NonNegativeInt = 1000,
    rate: PositiveFloat = 1e-3,
    start: float = 0.3,
    clamp: bool = False,
    batches_per_step: PositiveInt = 1,
) -> NamedTensors:
    """Yield every tensor by AdaMerging; the record keeps all losses and the last coefficients.

    granularity: one coefficient per expert and tensor ("layer") or per expert ("task").
    steps, rate: of Adam; 1,000 and 0.001 are FusionBench's, the official code takes 500 steps.
    start:       every coefficient before the first step.
    clamp:       keep coefficients in [0, 1], as the official code does; FusionBench does not.
    batches_per_step: of each task, their losses added; the official code takes two.
    """
    models = [encoder(job, "adamerging") for _ in range(min(job.n_jobs, len(job.experts)))]
    mixture = Mixture(job, granularity, start, clamp)
    job.record["loss"] = learn(job, models, mixture, steps, rate, batches_per_step)
    job.record["coefficients"] = {
        task: dict(zip(job.names, row, strict=True)) if granularity == "layer" else row[0]
        for task, row in zip(job.experts, mixture.effective().tolist(), strict=True)
    }
    yield from ((name, tensor.detach()) for name, tensor in mixture.tensors().items())


@torch.enable_grad()  # even under a caller's no_grad
def learn(
    job: MergeJob,
    models: Sequence[nn.Module],
    mixture: Mixture,
    steps: int,
    rate: float,
    batches_per_step: int = 1,
) -> list[float]:
    """Move the coefficients by Adam; `models` answer batches in parallel. Returns: all losses."""
    losses: list[float] = []
    streams = {task: endless(task, job.batches[task], models[0]) for task in job.experts}
    turns = [task for task in job.experts for _ in range(batches_per_step)]
    adam = torch.optim.Adam([mixture.coefficients], lr=rate)
    with ThreadPoolExecutor(len(models)) as threads:
        for step in range(steps):
            mixed, loss = mixture.tensors(), 0.0
            for first in range(0, len(turns), len(models)):
                tasks = turns[first : first + len(models)]
                numbered = [(task, *next(streams[task])) for task in tasks]
                run = partial(entropy_gradients, job, mixed)
                for task_entropy, gradients in threads.map(run, models, numbered):
                    loss += task_entropy
                    for tensor, gradient in zip(mixed.values(), gradients, strict=True):
                        if gradient is not None:
                            old = tensor.grad
                            tensor.grad = gradient if old is None else old.add_(gradient)
            if not abs(loss) < float("inf"):
                look = "overflowing values in the experts or the data"
                raise Diverged("adamerging", step, "merge.rate", rate, look)
            losses.append(loss)
            adam.zero_grad()
            mixture.pull_back(mixed)
            adam.step()
            if (step + 1) % max(1, steps // REPORTS) == 0:
                job.progress(f"adamerging {step + 1}/{steps}: entropy {loss:.4f}")
    return losses


def entropy_gradients(
    job: MergeJob, mixed: State, model: nn.Module, item: tuple[str, int, Batch]
) -> tuple[float, Sequence[Tensor | None]]:
    """Return the entropy of the answers to a numbered batch, and its gradient for every tensor."""
    task, number, batch = item
    with of_batches.naming(task, number):
        loss = entropy(zero_shot_logits(job.head, model, mixed, task, batch))
        gradients = torch.autograd.grad(loss, list(mixed.values()), allow_unused=True)
        return float(loss.detach()), gradients


@torch.enable_grad()  # even under a caller's no_grad
def squared_gradients(
    job: MergeJob, model: nn.Module, source: Tensors, task: str, seed: int, purpose: str = "fisher"
) -> tuple[dict[str, Tensor], int]:
    """Return Σ (∂ log p(y | x) / ∂θ)² over the n samples of a task by tensor in float64, and n."""
    tensors = {n: source[n].finite().to(job.device).requires_grad_() for n in job.names}
    sums = {name: torch.zeros_like(tensor, dtype=SUM_DTYPE) for name, tensor in tensors.items()}
    draws, count = generator(task, purpose, seed), 0
    for number, batch in enumerate(job.batches[task]):
        of_batches.check_batch(task, number, batch, model)
        for sample in of_batches.single_samples([batch]):
            with of_batches.naming(task, number):
                logits = zero_shot_logits(job.head, model, tensors, task, sample)  # (1, K)
                log_p = logits.log_softmax(-1)  # from which the label y is drawn
                label = torch.multinomial(log_p.detach().double().exp().cpu(), 1, generator=draws)
                log_p_of_label, leaves = log_p[0, int(label)], list(tensors.values())
                gradients = torch.autograd.grad(log_p_of_label, leaves, allow_unused=True)
            for total, gradient in zip(sums.values(), gradients, strict=True):
                if gradient is not None:
                    _add_squares(total, gradient)
            count += 1
    if not count:
        raise BadBatches(task, "is empty; at least one batch with at least one sample is needed")
    job.progress(f"{purpose}: {task}, {counted(count, 'sample')}")
    return sums, count


def _add_squares(total: Tensor, gradient: Tensor) -> None:
    """Add gradient² to the total; in a token table only to the few rows that a sample uses."""
    rows = gradient.any(1).nonzero().flatten() if gradient.dim() == 2 else ()
    if gradient.dim() == 2 and len(rows) < len(gradient) // 2:
        total[rows] += gradient[rows].to(total.dtype).square()
    else:
        exact = gradient.to(total.dtype)
        total.addcmul_(exact, exact)


def fisher_weights(fishers: Sequence[State], floor: float) -> list[float]:
    """Return cᵢ = 1 / (‖Fᵢ‖ + floor) over the whole model."""
    squares = (torch.stack([F.square().sum() for F in fisher.values()]) for fisher in fishers)
    return [1 / (float(square.sum().sqrt()) + floor) for square in squares]


def fisher_tensor(
    base: Tensor, experts: Sequence[Tensor], fishers: Sequence[Tensor], weights: Sequence[float]
) -> Tensor:
    """Return θ = Σ cᵢ Fᵢ θᵢ / Σ cᵢ Fᵢ, entry by entry, in the base's shape and dtype."""
    scaled = [c * F for c, F in zip(weights, fishers, strict=True)]
    top = tensor_sum([F * expert.double() for F, expert in zip(scaled, experts, strict=True)])
    return (top / tensor_sum(scaled)).to(base.dtype)


@method(source="Matena and Raffel, 2022; normalised as FusionBench does", needs=("batches", "head"))
def fisher(
    job: MergeJob, normalize: bool = True, floor: PositiveFloat = 1e-6, seed: NonNegativeInt = 42
) -> NamedTensors:
    """Yield every tensor by Fisher merging, Fᵢ = (1/n) Σ (∂ log p(y | x) / ∂θ)².

    normalize: give the diagonals of all experts the same length.
    floor:     added to every entry of them.
    seed:      of the drawn labels.
    """
    model, fishers = encoder(job, "fisher"), []
    for task, expert in job.experts.items():
        sums, count = squared_gradients(job, model, expert, task, seed)
        fishers.append({name: total / count for name, total in sums.items()})
    weights = fisher_weights(fishers, floor) if normalize else [1.0] * len(fishers)
    for name in job.names:
        base, experts = job.read(name)
        yield name, fisher_tensor(base, experts, [F[name] + floor for F in fishers], weights)


def matched_tensor(
    base: Tensor, experts: Sequence[Tensor], H0: Tensor, curvatures: Sequence[Tensor], scale: float
) -> Tensor:
    """Return θ = θ₀ + α Σ (H₀ + Hᵢ) τᵢ / (H₀ + α Σ Hᵢ), entry by entry, in the base's dtype.

    A large H₀ gives task arithmetic of scale α; H₀ = 0 with α = 1 gives Fisher merging.
    """
    total = H0 + scale * tensor_sum(curvatures)
    vectors = task_vectors(base, experts)
    weighted = [(H0 + H) * vector for H, vector in zip(curvatures, vectors, strict=True)]
    return (base.double() + scale * tensor_sum(weighted) / total).to(base.dtype)


@method(
    source="Daheim et al., 2024",
    needs=("batches", "head"),
    note="the base's curvature comes from its answers to the experts' samples, "
    "as its own samples are not available",
)
def gradient_matching(
    job: MergeJob,
    scale: float = 1.0,
    base_weight: NonNegativeFloat = 1.0,
    floor: PositiveFloat = 1e-12,
    seed: NonNegativeInt = 42,
) -> NamedTensors:
    """Yield every tensor by gradient matching: Hᵢ sums expert i's squared gradients over its task's
    samples, H₀ the base's over all samples, divided by the number of tasks.

    scale:       α of every task vector.
    base_weight: factor of the base's curvature.
    floor:       δ, added to every entry. All defaults but the seed are the authors'.
    seed:        of the drawn labels.
    """
    job.batches = {task: [*lasting(job.batches[task])] for task in job.experts}  # read twice
    squares = partial(squared_gradients, job, encoder(job, "gradient_matching"), seed=seed)
    of_experts = [squares(expert, task)[0] for task, expert in job.experts.items()]
    of_base = [squares(job.base, task, purpose="base's fisher")[0] for task in job.experts]
    for name in job.names:
        base, experts = job.read(name)
        H0 = base_weight * tensor_sum([sums[name] for sums in of_base]) / len(of_base) + floor
        yield name, matched_tensor(base, experts, H0, [sums[name] for sums in of_experts], scale)
