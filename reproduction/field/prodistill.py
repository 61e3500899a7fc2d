"""ProDistill: fit a merged model's blocks to its experts' features by gradients, block by block.

Source: Xu et al., Scalable Model Merging with Progressive Layer-wise Distillation, 2025 (arXiv
2502.12706); the authors' code,
JingXuTHU/Scalable_Model_Merging_with_Progressive_Layerwise_Distillation, Vision/main_prodistill.py
and merge_models.py.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from featcal.calibration.features import (
    StudentTeacherFeatures,
    advance,
    encoder_outputs,
    features_by_task,
)
from featcal.core import generator
from featcal.errors import Diverged
from featcal.models.batch import Model, TaskBatches
from featcal.models.blocks import step
from featcal.models.load import save_model
from featcal.models.plan import Stack, blocks_of
from featcal.models.streamed import in_turn
from featcal.settings import Calibration
from reproduction.field.walk import opened


@torch.no_grad()
def prodistill(
    merged: Model,
    base: Model,
    experts: Mapping[str, Model],
    batches: TaskBatches,
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
    these + 0.3, but a step sees one batch of every task, the source's 128 samples of any task.

    Returns: the module, or the folder `out`.
    """
    with opened(merged, base, experts, Calibration(), device) as (models, spool):
        student, encoded = models.student.module, dict[str, StudentTeacherFeatures]()
        for source, stack in models.plan.in_order:
            ends = (models, [models.student], stack)
            features = features_by_task(*ends, batches, spool, source, encoded)
            for number, block in enumerate(blocks_of(student, stack)):
                path, vectors = f"{stack.blocks}.{number}", []
                with models.base.block(path) as base_block:
                    start = {n: p.double() for n, p in base_block.named_parameters()}
                for task, teacher in in_turn(models.experts, path):
                    parameters = teacher.named_parameters()
                    vectors.append({name: p.double() - start[name] for name, p in parameters})
                    advance(teacher, stack, features[task].teacher)
                fit(block, path, stack, vectors, features, epochs, rate, seed)
                for task_features in features.values():
                    advance(block, stack, task_features.students[0])
            encoded = dict(encoder_outputs(*ends, features))
    return save_model(student, out, like=merged) if out else student


def fit(
    block: nn.Module,
    path: str,
    stack: Stack,
    vectors: list[dict[str, Tensor]],
    features: Mapping[str, StudentTeacherFeatures],
    epochs: int,
    rate: float,
    seed: int,
) -> None:
    """Move a block's parameters by Adam on their coefficients. vectors: by task, τₜ by name."""
    start = {name: parameter.detach().clone() for name, parameter in block.named_parameters()}
    tau = {name: torch.stack([v[name] for v in vectors]).to(p) for name, p in start.items()}
    coefficients = {name: torch.zeros_like(vector) for name, vector in tau.items()}  # (tasks, …)
    adam = torch.optim.Adam(coefficients.values(), lr=rate)
    draws = {task: generator(task, f"prodistill {path}.", seed) for task in features}

    def current() -> dict[str, Tensor]:
        return {name: start[name] + (coefficients[name] * tau[name]).sum(0) for name in start}

    for epoch in range(epochs):
        orders, total = {}, 0.0
        for task, task_features in features.items():
            orders[task] = torch.randperm(len(task_features.masks), generator=draws[task]).tolist()
        for k in range(max(map(len, orders.values()))):
            theta = {name: tensor.requires_grad_() for name, tensor in current().items()}
            run = partial(functional_call, block, theta)
            for task, order in orders.items():
                if k < len(order):
                    total += distance(run, stack, features[task], order[k])
            for name, coefficient in coefficients.items():
                gradient = theta[name].grad  # ∂L/∂cₜ = ∂L/∂θ ∘ τₜ
                coefficient.grad = None if gradient is None else gradient * tau[name]
            adam.step()
        if not abs(total) < float("inf"):
            look = "overflowing values in the experts or the data"
            raise Diverged(f"prodistill {path}", epoch, "prodistill.rate", rate, look)
    for name, tensor in current().items():
        block.get_parameter(name).copy_(tensor)


@torch.enable_grad()
def distance(
    block: Callable[..., Any], stack: Stack, features: StudentTeacherFeatures, k: int
) -> float:
    """Return Σ ‖block(z) − target‖² over the tokens of batch k, and add its gradient to the block's."""
    hidden, arguments = features.students[0][k]
    out, _ = step(lambda h, **options: block((h,), options), stack, hidden, arguments)
    squares = (out - features.teacher[k][0]).square().sum(-1)  # (n, tokens)
    mask = features.masks[k]
    loss = squares.sum() if mask is None else (squares * mask).sum()
    loss.backward()
    return float(loss.detach())
