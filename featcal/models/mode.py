"""Models as they are evaluated: without dropout, without gradients."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluation_mode(models: Sequence[nn.Module]) -> Iterator[None]:
    """Without dropout and without gradients inside the `with`; every module's own mode is restored.

    `no_grad`, not `inference_mode`: the version counters that show overwritten inputs exist only in
    the former.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
