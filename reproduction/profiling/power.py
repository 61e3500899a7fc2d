"""Power of the GPU that torch calls its first, through NVML (package nvidia-ml-py, extra `gpu`)."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Watts = Callable[[], float]


@contextmanager
def power_meter() -> Iterator[Watts | None]:
    """A function that asks for the power now, in watts; None without the package, without a driver
    or without a GPU.
    """
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield _watts_of(pynvml)
    finally:
        pynvml.nvmlShutdown()


def _watts_of(nvml: Any) -> Watts | None:
    """The meter of one GPU; None where the board does not tell its power."""
    try:
        handle = _first(nvml)
        nvml.nvmlDeviceGetPowerUsage(handle)
    except nvml.NVMLError:
        return None
    return lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000  # NVML tells milliwatts


def _first(nvml: Any) -> Any:
    """The GPU behind torch's device 0: CUDA_VISIBLE_DEVICES may begin with a number or with a name
    such as GPU-8a2f…
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if chosen and not chosen.isdigit():
        return nvml.nvmlDeviceGetHandleByUUID(chosen)
    return nvml.nvmlDeviceGetHandleByIndex(int(chosen or 0))
