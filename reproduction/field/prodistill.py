"""ProDistill: fit a merged model's blocks to its experts' features by gradients, block by block.

Source: Xu et al., Scalable Model Merging with Progressive Layer-wise Distillation, 2025 (arXiv
2502.12706); the authors' code,
JingXuTHU/Scalable_Model_Merging_with_Progressive_Layerwise_Distillation, Vision/main_prodistill.py
and merge_models.py.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from featcal.calibration.features import (
    StudentTeacherFeatures,
    advance,
    first_features,
    leave_stack,
)
from featcal.calibration.scratch import Spool
from featcal.core import generator
from featcal.core.precision import exact_products
from featcal.errors import Diverged
from featcal.merging.forward_order import copy_tensors
from featcal.merging.registry import NamedTensors
from featcal.models.batch import Model
from featcal.models.batch import TaskBatches as Batches
from featcal.models.blocks import step
from featcal.models.plan import Stack, blocks_of, plan_for
from reproduction.field.svc import Models


def prodistill(
    merged: Model,
    base: Model,
    experts: Mapping[str, Model],
    batches: Batches,
    *,
    out: Path | None = None,
    epochs: int,
    rate: float = 0.01,
    seed: int = 42,
    device: str | torch.device = "cpu",
) -> nn.Module | Path:
    """Fit coefficients of the task vectors in every block, one per entry, to the experts' features.

    In each block θ = θ_m + Σ cₜ ∘ τₜ, where cₜ starts at 0 and Adam lowers Σₜ Σ_z ‖block(z; θ) −
    block(zₜ; θₜ)‖²: z reaches the block in the model fitted so far, zₜ reaches it in expert t.
    After task arithmetic with a scale of 0.3 this is the source's method, whose coefficients are
    these + 0.3. Tensors outside the blocks stay the merged model's.

    Args:
        merged, base, experts: modules or checkpoint folders.
        batches: per task an iterable of keyword dictionaries for the model's forward. A step sees
            one batch of every task, in a new order in every epoch; the source's batches of 128 are
            16 samples of each of eight tasks.
        epochs, rate: of Adam, in every block.   seed: of the order.

    Returns: the module, or the folder `out`.
    Raises: BadBatches, BadPlan; MissingTensor, TensorsDiffer; Diverged; DiskFull.
    """
    models, target = Models.opened(merged, base, experts), torch.device(device)
    student, teacher = (models.form.module().to(target).eval() for _ in range(2))
    work = Distillation(models, batches, epochs, rate, seed, student, teacher)
    return models.form.result(work.tensors(), out)


@dataclass(frozen=True)
class Distillation:
    """One run. The student holds the model fitted so far, the teacher each expert in turn."""

    models: Models
    batches: Batches
    epochs: int
    rate: float
    seed: int
    student: nn.Module
    teacher: nn.Module

    @torch.no_grad()
    def tensors(self) -> NamedTensors:
        """Yield every tensor in the merged model's dtype."""
        copy_tensors(self.models.merged, self.student)
        plan, done = plan_for(self.student), set[str]()
        several = len(plan.stacks) > 1  # then batches are read once per stack
        batches = {
            task: list(self.batches[task]) if several else self.batches[task]
            for task in self.models.experts
        }
        with Spool(0, sys.maxsize, tempfile.gettempdir()) as spool, exact_products():
            tracks: dict[str, StudentTeacherFeatures] = {}
            for source, stack in plan.in_order:
                if source is None:
                    tracks = {}
                else:
                    for task, track in tracks.items():
                        copy_tensors(self.models.experts[task], self.teacher, f"{source.exit}.")
                        leave_stack(self.student, source, track.students[0])
                        leave_stack(self.teacher, source, track.teacher)
                for task, expert in self.models.experts.items():
                    copy_tensors(expert, self.teacher)
                    ends = [self.student], self.teacher, stack, batches[task], spool, source
                    tracks[task] = first_features(task, *ends, tracks.get(task))
                for i, block in enumerate(blocks_of(self.student, stack)):
                    path = f"{stack.blocks}.{i}."
                    for task, expert in self.models.experts.items():
                        copy_tensors(expert, self.teacher, path)
                        advance(blocks_of(self.teacher, stack)[i], stack, tracks[task].teacher)
                    fitted = self.fitted(path, block, stack, tracks)
                    for name, tensor in fitted.items():
                        block.get_parameter(name.removeprefix(path)).copy_(tensor)
                    for track in tracks.values():
                        advance(block, stack, track.students[0])
                    done |= fitted.keys()
                    yield from fitted.items()
        for name, each in self.models.merged.items():
            if name not in done:
                yield name, each.finite()

    def fitted(
        self,
        path: str,
        block: nn.Module,
        stack: Stack,
        tracks: Mapping[str, StudentTeacherFeatures],
    ) -> dict[str, Tensor]:
        """Return the block's parameters after Adam on their coefficients."""
        start = {name: parameter.detach() for name, parameter in block.named_parameters()}
        vectors = {name: self.vectors(path + name, start[name]) for name in start}  # (tasks, …)
        coefficients = {name: torch.zeros_like(vector) for name, vector in vectors.items()}
        adam = torch.optim.Adam(coefficients.values(), lr=self.rate)
        draws = {task: generator(task, f"prodistill {path}", self.seed) for task in tracks}
        for epoch in range(self.epochs):
            orders = {
                task: torch.randperm(len(track.masks), generator=draws[task]).tolist()
                for task, track in tracks.items()
            }
            total = 0.0
            for k in range(max(map(len, orders.values()))):
                theta = {n: start[n] + (coefficients[n] * vectors[n]).sum(0) for n in start}
                for tensor in theta.values():
                    tensor.requires_grad_()
                run = partial(functional_call, block, theta)
                for task, order in orders.items():
                    if k < len(order):
                        total += distance(run, stack, tracks[task], order[k])
                for name, own in coefficients.items():
                    gradient = theta[name].grad  # ∂L/∂cₜ = ∂L/∂θ ∘ τₜ
                    own.grad = None if gradient is None else gradient * vectors[name]
                adam.step()
            if not abs(total) < float("inf"):
                look = "overflowing values in the experts or the data"
                raise Diverged(f"prodistill {path[:-1]}", epoch, "prodistill.rate", self.rate, look)
        return {path + n: start[n] + (coefficients[n] * vectors[n]).sum(0) for n in start}

    def vectors(self, name: str, like: Tensor) -> Tensor:
        """Return τₜ of every task, (tasks, …)."""
        base = self.models.base[name].finite().double()
        experts = self.models.experts.values()
        return torch.stack([e[name].finite().double() - base for e in experts]).to(like)


@torch.enable_grad()
def distance(
    block: Callable[..., Any], stack: Stack, tracks: StudentTeacherFeatures, k: int
) -> float:
    """Return Σ ‖block(z) − target‖² over the tokens of batch k without padding, and add its
    gradient to the block's.
    """
    hidden, arguments = tracks.students[0][k]
    out, _ = step(lambda h, **more: block((h,), more), stack, hidden, arguments)  # type: ignore[arg-type]
    squares = (out - tracks.teacher[k][0]).square().sum(-1)  # (n, tokens)
    mask = tracks.masks[k]
    loss = squares.sum() if mask is None else (squares * mask).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())
