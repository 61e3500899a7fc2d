"""The public function `prodistill`: a merged model's blocks brought to its experts' features by
gradients, block by block.

Source: Xu et al., Scalable Model Merging with Progressive Layer-wise Distillation, 2025 (arXiv
2502.12706); the authors' code,
JingXuTHU/Scalable_Model_Merging_with_Progressive_Layerwise_Distillation, Vision/main_prodistill.py
and merge_models.py.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from featcal.blocks.batches import check_tasks
from featcal.blocks.plan import Stack, blocks_of
from featcal.blocks.plans import plan_for
from featcal.blocks.replay import step
from featcal.calibration.tracks import HandedOn, Tracks, advance, hand_on, start_tracks
from featcal.core.precision import exact_products
from featcal.errors import Diverged
from featcal.merging.forward_order import become
from featcal.merging.job import Batches, Named, silent
from featcal.merging.merge import Model
from featcal.merging.repair import Repair, opened
from featcal.rivals.draws import generator
from featcal.settings import require
from featcal.storage.spool import Spool


def prodistill(
    merged: Model,
    base: Model,
    experts: Mapping[str, Model] | Sequence[Model],
    batches: Batches,
    *,
    out: str | Path | None = None,
    epochs: int = 100,
    rate: float = 0.01,
    seed: int = 42,
    device: str | torch.device = "cpu",
    progress: Callable[[str], None] = silent,
) -> nn.Module | Path:
    """The merged model with coefficients of the task vectors in every block, one per entry, fitted
    to the experts' features.

    In each block θ = θ_m + Σ cₜ ∘ τₜ, where cₜ starts at 0 and Adam lowers Σₜ Σ_z ‖block(z; θ) −
    block(zₜ; θₜ)‖²: z is what reaches the block in the model repaired so far, zₜ what reaches it in
    expert t. Behind task arithmetic with a scale of 0.3 it is the source's method, whose
    coefficients are these + 0.3. What lies outside the blocks stays the merged model's.

    merged, base, experts: modules or checkpoint folders, as of `merge`.   out: a folder to write
    instead of returning a module.
    batches:  per task an iterable of keyword dictionaries for the model's forward; a step sees one
              batch of every task, in an order drawn anew in every epoch. The source mixes tasks in
              batches of 128: of eight tasks, 16 samples each.
    epochs, rate: of Adam, in every block; the authors take 64 samples of each task.   seed: of the
    order.
    Returns:  the module, or the path `out`.
    Raises:   BadSetting, BadBatches, BadPlan; MissingTensor, TensorsDiffer when the models do not
              fit; Diverged; DiskFull.
    """
    require(epochs >= 0, "prodistill.epochs", epochs, "must be at least 0")
    require(rate > 0, "prodistill.rate", rate, "must be above 0")
    pool = opened("prodistill", merged, base, experts)
    check_tasks(pool.experts, batches)
    place = torch.device(device)
    work = Distillation(
        pool,
        batches,
        epochs,
        rate,
        seed,
        pool.module().to(place).eval(),
        pool.module().to(place).eval(),
        progress,
    )
    return pool.result(work.tensors(), out)


@dataclass(frozen=True)
class Distillation:
    """One run: two modules walk through the blocks, the repaired model and, with their tensors in
    turn, the experts.
    """

    pool: Repair
    batches: Batches
    epochs: int
    rate: float
    seed: int
    student: nn.Module
    teacher: nn.Module
    progress: Callable[[str], None]

    @torch.no_grad()
    def tensors(self) -> Iterator[Named]:
        """Every tensor, in the merged model's dtypes."""
        become(self.student, self.pool.merged)
        plan, done = plan_for(self.student), set[str]()
        several = len(plan.stacks) > 1  # then batches are read once per stack
        batches = {
            task: list(self.batches[task]) if several else self.batches[task]
            for task in self.pool.experts
        }
        with Spool(0, sys.maxsize, tempfile.gettempdir()) as spool, exact_products():
            tracks: dict[str, Tracks] = {}
            for source, stack in plan.in_order:
                fed = (
                    {task: self.handed_on(task, source, track) for task, track in tracks.items()}
                    if source
                    else {}
                )
                for task, expert in self.pool.experts.items():
                    become(self.teacher, expert)
                    tracks[task] = start_tracks(
                        task,
                        self.student,
                        self.teacher,
                        stack,
                        batches[task],
                        spool,
                        source,
                        fed.get(task),
                    )
                for i, block in enumerate(blocks_of(self.student, stack)):
                    path = f"{stack.blocks}.{i}."
                    for task, expert in self.pool.experts.items():
                        become(self.teacher, expert, path)
                        advance(blocks_of(self.teacher, stack)[i], stack, tracks[task].teacher)
                    found = self.fitted(path, block, stack, tracks)
                    for name, tensor in found.items():
                        block.get_parameter(name.removeprefix(path)).copy_(tensor)
                    for track in tracks.values():
                        advance(block, stack, track.student)
                    done |= found.keys()
                    yield from found.items()
        yield from (
            (name, self.pool.merged.finite_tensor(name))
            for name in self.pool.merged.names
            if name not in done
        )

    def handed_on(self, task: str, source: Stack, track: Tracks) -> HandedOn:
        """What a stack feeds to the next one."""
        become(self.teacher, self.pool.experts[task], f"{source.exit}.")
        return HandedOn(
            hand_on(self.student, source, track.student),
            hand_on(self.teacher, source, track.teacher),
            track.masks,
        )

    def fitted(
        self, path: str, block: nn.Module, stack: Stack, tracks: Mapping[str, Tracks]
    ) -> dict[str, Tensor]:
        """The block's parameters after Adam on their coefficients; the loss of an epoch is told."""
        start = {name: parameter.detach() for name, parameter in block.named_parameters()}
        vectors = {
            name: self.vectors(path + name, tensor) for name, tensor in start.items()
        }  # (tasks, …) each
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
                theta = {
                    name: start[name] + mixed(coefficients[name], vectors[name]) for name in start
                }
                for tensor in theta.values():
                    tensor.requires_grad_()
                for task, order in orders.items():
                    if k < len(order):
                        total += distance(
                            partial(functional_call, block, theta), stack, tracks[task], order[k]
                        )
                for name, own in coefficients.items():
                    gradient = theta[name].grad
                    own.grad = (
                        None if gradient is None else gradient * vectors[name]
                    )  # ∂L/∂cₜ = ∂L/∂θ ∘ τₜ
                adam.step()
            if not abs(total) < float("inf"):
                look = "overflowing numbers in the experts or the data"
                raise Diverged(f"prodistill {path[:-1]}", epoch, "prodistill.rate", self.rate, look)
            if epoch in (0, self.epochs - 1):
                self.progress(f"prodistill {path[:-1]}  epoch {epoch + 1}  loss {total:.5g}")
        return {
            path + name: start[name] + mixed(coefficients[name], vectors[name]) for name in start
        }

    def vectors(self, name: str, like: Tensor) -> Tensor:
        """τₜ of every task, (tasks, …)."""
        base = self.pool.base.finite_tensor(name).double()
        return torch.stack(
            [expert.finite_tensor(name).double() - base for expert in self.pool.experts.values()]
        ).to(like)


def mixed(coefficients: Tensor, vectors: Tensor) -> Tensor:
    """Σ cₜ ∘ τₜ of (tasks, …)."""
    return (coefficients * vectors).sum(0)


@torch.enable_grad()
def distance(block: Callable[..., Any], stack: Stack, tracks: Tracks, k: int) -> float:
    """Σ ‖block(z) − target‖² over the tokens of batch k without padding; its gradient is added to
    that of the block's.
    """
    hidden, arguments = tracks.student[k]
    out, _ = step(lambda h, **more: block((h,), more), stack, hidden, arguments)  # type: ignore[arg-type]
    squares = (out - tracks.teacher[k][0]).square().sum(-1)  # (n, tokens)
    mask = tracks.masks[k]
    loss = squares.sum() if mask is None else (squares * mask).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())
