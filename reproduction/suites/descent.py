"""One step of a fine-tuning, whatever is fine-tuned."""

from collections.abc import Iterable
from typing import Protocol
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from featcal.errors import Diverged


class Descent(Protocol):
    """What the settings of a fine-tuning tell of its steps."""

    @property
    def lr(self) -> float: ...
    @property
    def clip(self) -> float: ...
    def rate(self, step: int) -> float: ...


def batch_indices(task: str, count: int, batch: int, step: int, seed: int) -> NDArray[np.int64]:
    """Return the samples of one training step, (batch,): each at most once per epoch, the
    incomplete batch at its end left out.
    """
    batch = min(batch, count)
    epoch, number = divmod(step, count // batch)
    order = np.random.default_rng([seed, crc32(task.encode()), epoch]).permutation(count)
    return order[number * batch : (number + 1) * batch].astype(np.int64)


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
