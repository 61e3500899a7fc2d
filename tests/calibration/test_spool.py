"""Tensors on their device, in host memory or on disk come back as they were, within the budgets."""

import errno
import os
import signal
from multiprocessing import get_context

import pytest
import torch

from featcal.calibration import scratch as spools
from featcal.calibration.scratch import Spool
from featcal.errors import BadFile, DiskFull

MEMORY, DISK = 1 << 20, 0  # budgets of host memory


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


LAYOUTS = {
    "in order": lambda: random(2, 3, 4),
    "axes exchanged": lambda: random(2, 3, 4).transpose(1, 2),
    "heads of attention": lambda: random(2, 3, 4, 5).permute(0, 2, 1, 3),
    "expanded": lambda: random(1, 1, 4).expand(3, 2, 4),
    "expanded and exchanged": lambda: random(4, 3).T[None].expand(2, 3, 4),
    "one number for all": lambda: torch.tensor(3.5).expand(2, 3),
    "one number of many": lambda: random(5)[::4][1:],
    "scalar": lambda: torch.tensor(1.5),
    "empty": lambda: torch.zeros(0, 4),
    "one row": lambda: random(1, 3, 1),
    "not finite": lambda: torch.tensor([float("nan"), -0.0, float("inf")]),
}
KINDS = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
LAYOUTS |= {str(dtype): lambda dtype=dtype: random(5, 3, dtype=dtype) for dtype in KINDS}


@pytest.mark.parametrize("budget", [MEMORY, DISK])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_come_back_with_bits_and_strides(layout, budget, tmp_path):
    tensor = LAYOUTS[layout]()
    with Spool(0, budget, tmp_path) as spool:
        back = spool.get(spool.keep(tensor))
    assert back.dtype == tensor.dtype and back.shape == tensor.shape
    bits = [torch.cat([each.flatten()] * 2).view(torch.uint8) for each in (back, tensor)]
    assert torch.equal(*bits)
    wide = [axis for axis, size in enumerate(tensor.shape) if size > 1 and tensor.numel()]
    assert [back.stride(axis) for axis in wide] == [tensor.stride(axis) for axis in wide]


@pytest.mark.parametrize("budget", [MEMORY, DISK])
def test_gaps_are_not_kept_and_expanded_axes_once(budget, tmp_path):
    gaps, expanded = random(6, 8)[::2, 1:4], random(1, 4).expand(100, 4)
    with Spool(0, budget, tmp_path) as spool:
        kept = [spool.keep(gaps), spool.keep(expanded)]
        back = spool.get(kept[0])
        assert torch.equal(back, gaps) and back.is_contiguous()
        assert spool.kept["disk" if budget == DISK else "host"] == gaps.nbytes + 16


def test_host_memory_is_used_up_to_its_budget_then_the_disk(tmp_path):
    tensors = [random(10, seed=i) for i in range(4)]  # of 40 bytes each
    with Spool(0, 100, tmp_path) as spool:
        handles = [spool.keep(tensor) for tensor in tensors]
        assert (spool.kept["host"], spool.kept["disk"]) == (80, 80)
        for handle, tensor in zip(handles, tensors, strict=True):
            assert torch.equal(spool.get(handle), tensor)
        del handles[0], handle
        later = spool.keep(random(5, seed=9))  # there is room in memory again
        assert (spool.kept["host"], spool.kept["disk"]) == (60, 80)
        assert torch.equal(spool.get(later), random(5, seed=9)) and len(files(tmp_path)) == 2
        del handles, later
        assert (spool.kept["host"], spool.kept["disk"], files(tmp_path)) == (0, 0, [])


def files(folder):
    return sorted(str(path) for path in folder.rglob("*.raw"))


def test_nothing_is_left_on_disk_whatever_ends_the_run(tmp_path):
    with pytest.raises(KeyboardInterrupt), Spool(0, DISK, tmp_path) as spool:
        handle = spool.keep(random(10))
        assert spool.get(handle).shape == (10,)
        raise KeyboardInterrupt
    del handle
    assert os.listdir(tmp_path) == [] and spool.kept["disk"] == 0


def killed_with_a_file(folder):
    handle = Spool(0, DISK, folder).keep(random(10))
    os.kill(os.getpid(), signal.SIGKILL)
    return handle


def test_files_of_a_killed_process_are_removed_and_those_of_a_live_one_kept(tmp_path):
    with Spool(0, DISK, tmp_path) as living:
        handle = living.keep(random(10))
        process = get_context("fork").Process(target=killed_with_a_file, args=(tmp_path,))
        process.start()
        process.join()
        assert len(files(tmp_path)) == 2
        with Spool(0, DISK, tmp_path):
            assert len(files(tmp_path)) == 1
        assert torch.equal(living.get(handle), random(10))


def test_full_disk_is_one_error_and_leaves_no_file(tmp_path, monkeypatch):
    def full(self, data):
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with Spool(0, DISK, tmp_path / "spool") as spool:
        monkeypatch.setattr(spools.Path, "write_bytes", full)
        with pytest.raises(DiskFull, match=r"spool/featcal-spool-.*no space left.*40 bytes"):
            spool.keep(random(10))
        assert files(tmp_path) == [] and spool.kept["disk"] == 0


def test_truncated_or_missing_file_is_refused(tmp_path):
    with Spool(0, DISK, tmp_path) as spool:
        handle = spool.keep(random(10))
        os.truncate(files(tmp_path)[0], 30)
        with pytest.raises(BadFile, match="30 of 40 bytes"):
            spool.get(handle)
        os.unlink(files(tmp_path)[0])
        with pytest.raises(BadFile, match="0 of 40 bytes"):
            spool.get(handle)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_tensors_stay_there_then_in_pinned_memory_then_on_disk(tmp_path):
    tensors = [random(10, seed=i).cuda()[:, None].expand(10, 3) for i in range(6)]
    with Spool(80, 80, tmp_path) as spool:
        handles = [spool.keep(tensor) for tensor in tensors]
        assert (spool.kept["device"], spool.kept["host"], spool.kept["disk"]) == (80, 80, 80)
        for handle, tensor in zip(handles, tensors, strict=True):
            back = spool.get(handle)
            assert back.device == tensor.device and back.stride() == tensor.stride()
            assert torch.equal(back, tensor)
