"""One step of a fine-tuning, whatever is fine-tuned."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from featcal.errors import Diverged


class Descent(Protocol):
    """What the settings of a fine-tuning tell of its steps."""

    @property
    def lr(self) -> float: ...
    @property
    def clip(self) -> float: ...
    def rate(self, step: int) -> float: ...


def descend(
    loss: Tensor,
    optimiser: torch.optim.Optimizer,
    learning: Iterable[nn.Parameter],
    settings: Descent,
    task: str,
    step: int,
    suspect: str,
) -> None:
    """Step along the clipped gradient of `loss`, at the rate of this step, counted from 0.

    suspect: what else than the rate may have made a loss that is no number.   Raises: Diverged with
    task and step then.
    """
    if not torch.isfinite(loss):
        raise Diverged(
            f"fine-tuning {task!r}", step, "fine_tune.lr in the suite file", settings.lr, suspect
        )
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(learning, settings.clip)
    for group in optimiser.param_groups:
        group["lr"] = settings.rate(step)
    optimiser.step()
