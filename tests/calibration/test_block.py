"""What a block needs in float64 while it is calibrated, counted in bytes of living tensors."""

import pytest
import torch
from tiny import PAPER, clip, experiment
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from featcal import calibrate
from featcal.core.moments import Moments
from featcal.core.ridge import anchor, solve_ridge, task_system

WIDTH = 96
SITES = [(WIDTH, n * WIDTH) for n in (1, 2, 1, 3)] + [(3 * WIDTH, WIDTH)]  # (d, o), last block
MOMENTS = sum(d * d + (d * o if o < d / 2 else d * d) for d, o in SITES)
SYSTEMS = sum(d * d + d * o for d, o in SITES)
LARGEST = max(d * o for d, o in SITES)  # a weight


class Float64Peak(TorchDispatchMode):
    """Most float64 numbers alive at once among those made inside the `with`."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float64:
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes() // 8
        self.alive = {key: one for key, one in self.alive.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def peak(tasks):
    build = lambda dtype: clip(dtype=dtype, width=WIDTH)  # noqa: E731
    given = experiment(torch.float32, tasks, count=30, batch=15, build=build)
    with Float64Peak() as counted:
        calibrate(**given, settings=PAPER)
    return counted.peak


def test_block_needs_systems_moments_of_one_task_and_a_few_weights_however_many_tasks():
    needed = peak("abc")
    assert SYSTEMS + MOMENTS <= needed <= SYSTEMS + MOMENTS + 2 * LARGEST + 100 * WIDTH
    assert peak("ab") == needed == peak("abcde")


@pytest.mark.parametrize(("d", "o"), [(200, 40), (40, 200)])
def test_one_system_and_its_solution_need_a_few_weights(d, o):
    moments, W, few = Moments.zero(d), torch.randn(o, d), 10 * (d + o)
    moments.add(x := torch.randn(300, d), x, torch.ones(300))
    with Float64Peak() as counted:
        system = task_system(moments, W, torch.zeros(o), 0.3)
    assert counted.peak <= 2 * d * d + 2 * d * o + few  # G, C; right side, W
    with Float64Peak() as counted:
        solve_ridge(system, W, W[:, 0], 0.05)
    assert counted.peak <= d * d + 3 * d * o + few  # left side; right side, A, the solution


def test_anchor_needs_one_extra_weight():
    merged, base = torch.randn(2, 300, 200)
    with Float64Peak() as counted:
        anchor(merged, base, 2.0)
    assert counted.peak == 2 * merged.numel()
