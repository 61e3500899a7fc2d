"""WUDI: the task vector of a matrix that interferes least with every expert's own, by Adam or at
the minimum itself.

Source: Cheng et al., 2025; FusionBench's and the official code differ in which matrices they take
(matrices.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from featcal.errors import Diverged
from featcal.merging.arithmetic import average_tensor
from featcal.merging.job import Job, Named, tensor_by_tensor
from featcal.merging.matrices import linear_groups, matrix_groups
from featcal.merging.method_settings import Wudi


@dataclass(frozen=True)
class Interference:
    """L(τ) = Σ ‖(τ − τᵢ) τᵢᵀ‖² / ‖τᵢ‖² = ⟨τ, τG − 2R⟩ + c, in sums that do not grow with the number
    of experts.
    """

    G: Tensor  # (d, d)  Σ τᵢᵀτᵢ / ‖τᵢ‖²
    R: Tensor  # (o, d)  Σ τᵢ τᵢᵀτᵢ / ‖τᵢ‖²
    c: float  # Σ ‖τᵢτᵢᵀ‖² / ‖τᵢ‖²
    start: Tensor  # (o, d)  Σ τᵢ

    @classmethod
    def of(cls, vectors: Sequence[Tensor]) -> "Interference":
        """From the task vectors (o, d) in float64; one that is zero interferes with nothing and has
        no term.
        """
        o, d = vectors[0].shape
        G, R, c = vectors[0].new_zeros(d, d), vectors[0].new_zeros(o, d), 0.0
        for vector in vectors:
            size = vector.square().sum()
            if size > 0:
                gram = vector.T @ vector / size  # (d, d)
                G, R, c = G + gram, R + vector @ gram, c + float(gram.square().sum() * size)
        return cls(G, R, c, sum(vectors[1:], vectors[0]))

    def to(self, dtype: torch.dtype) -> "Interference":
        return Interference(self.G.to(dtype), self.R.to(dtype), self.c, self.start.to(dtype))

    def loss(self, tau: Tensor) -> float:
        """L(τ) in float64, at least 0."""
        tau = tau.double()
        return max(0.0, float((tau * (tau @ self.G.double() - 2 * self.R.double())).sum()) + self.c)

    def minimum(self, rtol: float | None = None) -> Tensor:
        """τ* = R G⁺, the smallest of all minimisers; eigenvalues of G below rtol times its largest
        count as 0.
        """
        smallest: Tensor = self.R @ torch.linalg.pinv(self.G, hermitian=True, rtol=rtol)
        return smallest


def descended(
    problem: Interference, steps: int, rate: float, place: str
) -> tuple[Tensor, list[float]]:
    """Adam from Σ τᵢ, and the loss before every step and at the end.

    Adam steps by about `rate` whatever the gradient, so that from a start that is a minimum already
    it can only climb: where the end lies above the start, the start is returned. Raises: Diverged
    naming matrix and step.
    """
    tau = problem.start.clone()
    adam = torch.optim.Adam([tau], lr=rate)
    losses = []
    for step in range(steps + 1):
        product = tau @ problem.G  # (o, d)
        losses.append(
            max(0.0, float((tau * (product - 2 * problem.R)).sum(dtype=torch.float64)) + problem.c)
        )
        if not losses[-1] < float("inf"):
            raise Diverged(
                f"wudi: {place}", step, "merge.rate", rate, "overflowing numbers in the experts"
            )
        if step < steps:
            tau.grad = 2 * (product - problem.R)
            adam.step()
    return (tau if losses[-1] <= losses[0] else problem.start), losses


def wudi(job: Job) -> Iterator[Named]:
    """Every tensor by WUDI; the record keeps the loss summed over matrices, and of each matrix its
    start and end.
    """
    official = job.settings.variant == "official"
    groups = linear_groups(job) if official else matrix_groups(job)
    ends: dict[str, dict[str, float]] = {}
    curve: list[float] = []
    for number, names in enumerate(groups, start=1):
        tau, losses = _solved(job, names)
        curve = [a + b for a, b in zip(curve, losses, strict=True)] if curve else losses
        ends[" + ".join(names)] = {"start": losses[0], "end": min(losses[0], losses[-1])}
        job.progress(f"wudi {number}/{len(groups)}: {names[0]}  {losses[0]:.4g} → {losses[-1]:.4g}")
        parts = torch.split(tau, [job.base.shape(name)[0] for name in names])
        for name, part in zip(names, parts, strict=True):
            base = job.base.finite_tensor(name)
            yield name, (base.double() + part.cpu().double()).to(base.dtype)
    job.record.update(loss=curve, matrices=ends)
    rest = sorted(set(job.names) - {name for names in groups for name in names})
    yield from tensor_by_tensor(
        job, rest, (lambda base, experts: base) if official else average_tensor
    )


def wudi_closed_form(job: Job) -> Iterator[Named]:
    """Every tensor by WUDI's closed form."""
    settings = Wudi(variant="closed_form", exclude=job.settings.exclude, rtol=job.settings.rtol)
    yield from wudi(replace(job, settings=settings))  # the record is the job's own


def _solved(job: Job, names: Sequence[str]) -> tuple[Tensor, list[float]]:
    """The merged task vector (Σo, d) of matrices on top of one another, and its losses."""
    tensors = [job.read(name) for name in names]
    base = torch.cat([ours for ours, _ in tensors]).double()
    experts = range(len(job.experts))
    problem = Interference.of(
        [torch.cat([theirs[i] for _, theirs in tensors]).double() - base for i in experts]
    )
    if job.settings.variant == "closed_form":
        tau = problem.minimum(job.settings.rtol)
        return tau, [problem.loss(problem.start), problem.loss(tau)]
    wide = (
        job.base.dtype(names[0]) == torch.float64
    )  # steps in float32 where the model holds no more
    problem = problem if wide else problem.to(torch.float32)
    return descended(problem, job.settings.steps, job.settings.rate, names[0])
