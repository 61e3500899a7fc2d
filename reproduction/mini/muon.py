"""Two optimisers in one: Muon for the matrices inside the blocks, AdamW for everything else.

Muon's step is the momentum with all singular values brought near one (Jordan et al. 2024). A small
vision transformer
trained from scratch for minutes leaves its plateau much earlier that way: zero-shot 45 instead of
33 after 500 steps.
"""

import torch
from torch import Tensor, nn

LR, MUON_LR, DECAY, MOMENTUM = 2e-3, 0.02, 0.05, 0.95
MUON_DECAY = 0.25  # per unit of learning rate
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalised(matrices: Tensor, steps: int = 5) -> Tensor:
    """(k, r, c) with r <= c: singular values of each matrix moved towards one by the quintic
    Newton-Schulz iteration.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices / (
        matrices.flatten(1).norm(dim=1).view(-1, 1, 1) + 1e-7
    )  # an all-zero gradient stays zero
    for _ in range(steps):
        y = x @ x.mT
        x = a * x + (b * y + c * y @ y) @ x
    return x


class Optimiser:
    """One step for all parameters of a model, and its state as named tensors. `blocks`: how names
    inside its blocks begin.
    """

    def __init__(self, model: nn.Module, blocks: str | tuple[str, ...] = "vision_model.encoder"):
        self.named = dict(model.named_parameters())
        self.matrices = [n for n, p in self.named.items() if n.startswith(blocks) and p.ndim == 2]
        self.momentum = {name: torch.zeros_like(self.named[name]) for name in self.matrices}
        rest = {name: p for name, p in self.named.items() if name not in self.momentum}
        groups = [
            {"params": [p for p in rest.values() if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in rest.values() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.rest = rest
        self.adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.98), fused=True)

    def step(self, schedule: float) -> None:
        """Both learning rates times `schedule`; gradients are dropped afterwards."""
        for group in self.adamw.param_groups:
            group["lr"] = LR * schedule
        self.adamw.step()
        self._muon_step(MUON_LR * schedule)
        self.adamw.zero_grad(set_to_none=True)
        for name in self.matrices:
            self.named[name].grad = None

    @torch.no_grad()
    def _muon_step(self, lr: float) -> None:
        by_shape: dict[tuple[int, int], list[str]] = {}
        for name in self.matrices:
            rows, columns = self.named[name].shape
            by_shape.setdefault((min(rows, columns), max(rows, columns)), []).append(name)
        for names in by_shape.values():
            lying = torch.stack([_lying(self._nesterov(name)) for name in names])
            for name, update in zip(names, orthogonalised(lying), strict=True):
                weight = self.named[name]
                rows, columns = weight.shape
                update = update if rows <= columns else update.T
                weight.mul_(1 - MUON_DECAY * lr).add_(
                    update, alpha=-lr * max(1, rows / columns) ** 0.5
                )

    def _nesterov(self, name: str) -> Tensor:
        gradient, momentum = self.named[name].grad, self.momentum[name]
        momentum.lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(momentum, MOMENTUM)

    def state(self) -> dict[str, Tensor]:
        """Everything the next step depends on besides the weights."""
        tensors = {f"muon/{name}": value for name, value in self.momentum.items()}
        for name, parameter in self.rest.items():
            for key, value in self.adamw.state[parameter].items():
                tensors[f"adamw/{key}/{name}"] = value
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state`."""
        for name, value in self.momentum.items():
            value.copy_(tensors[f"muon/{name}"])
        for name, parameter in self.rest.items():
            keys = ("step", "exp_avg", "exp_avg_sq")
            self.adamw.state[parameter] = {
                key: tensors[f"adamw/{key}/{name}"].clone() for key in keys
            }


def _lying(matrix: Tensor) -> Tensor:
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
