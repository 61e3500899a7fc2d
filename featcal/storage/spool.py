"""Where tensors wait until they are needed again: on their device, in host memory, on disk, as far
as each budget goes.

What comes back has the same bits. Strides come back where a tensor fills its memory without gaps,
in whatever order of axes, and where it is expanded; otherwise it comes back without the gaps. Knows
nothing of what the tensors mean.
"""

import fcntl
import shutil
import tempfile
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from featcal.storage.atomic import atomic_path
from featcal.storage.ledger import Ledger

_PREFIX = "featcal-spool-"


@dataclass(eq=False)
class Handle:
    """One tensor that waits; only its spool reads it."""

    shape: torch.Size  # as it was given, expanded axes included
    axes: list[int]  # of the given tensor, from the widest stride to the narrowest
    dense: torch.Size  # in that order, expanded axes once
    dtype: torch.dtype
    device: torch.device
    bytes: int
    ledger: Ledger
    tensor: Tensor | None = None  # dense; where it waits in memory
    file: Path | None = None  # where it waits on disk


class Spool(AbstractContextManager["Spool"]):
    """Keeps tensors within budgets of bytes; a tensor on a GPU waits there, else in pinned host
    memory, else on disk.

    folder: where files go, in a folder of their own that is removed at the end; what a killed
    process left there is removed at
            the beginning.
    A tensor that is kept where it is is not copied: whoever overwrites it afterwards overwrites
    what is kept.
    """

    def __init__(self, device_bytes: int, host_bytes: int, folder: str | Path):
        self._device_budget, self._host_budget, self.folder = device_bytes, host_bytes, Path(folder)
        self.device, self.host, self.disk = Ledger(), Ledger(), Ledger()
        self._handles: set[Handle] = set()
        self._own: Path | None = None
        self._written = 0
        remove_abandoned(self.folder)

    def keep(self, tensor: Tensor) -> Handle:
        """Takes a tensor. Raises: DiskFull naming the file below the spool's folder."""
        tensor = tensor.detach()
        once = tensor
        for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            once = once.narrow(axis, 0, 1) if stride == 0 and size > 1 else once
        strides = once.stride()
        axes = sorted(range(once.dim()), key=lambda axis: (-strides[axis], axis))
        dense = once.permute(axes)
        where = self._where(dense)
        handle = Handle(
            tensor.shape, axes, dense.shape, tensor.dtype, tensor.device, dense.nbytes, where
        )
        if where is self.disk:
            handle.file = self._write(dense)
        elif where is self.host and dense.is_cuda:
            handle.tensor = torch.empty(dense.shape, dtype=dense.dtype, pin_memory=True).copy_(
                dense
            )
        else:
            # what is a part of something larger would keep all of that in memory
            alone = dense.is_contiguous() and dense.untyped_storage().nbytes() == dense.nbytes
            handle.tensor = dense if alone else dense.clone(memory_format=torch.contiguous_format)
        where.add(handle.bytes)
        self._handles.add(handle)
        return handle

    def get(self, handle: Handle) -> Tensor:
        """The tensor as it was given, on the device it came from; it stays kept."""
        assert handle in self._handles, "this tensor was dropped, or belongs to another spool"
        dense = _read(handle) if handle.tensor is None else handle.tensor
        dense = dense.to(handle.device, non_blocking=True)
        back = sorted(range(len(handle.axes)), key=lambda place: handle.axes[place])
        return dense.permute(back).expand(handle.shape)

    def drop(self, handle: Handle) -> None:
        """Forgets a tensor, its file included."""
        self._handles.remove(handle)
        handle.ledger.remove(handle.bytes)
        handle.tensor = None
        if handle.file is not None:
            handle.file.unlink(missing_ok=True)

    def close(self) -> None:
        """Forgets everything and removes the files."""
        for handle in list(self._handles):
            self.drop(handle)
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._lock.close()
            self._own = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _where(self, dense: Tensor) -> Ledger:
        if dense.is_cuda and self.device.now + dense.nbytes <= self._device_budget:
            return self.device
        return self.host if self.host.now + dense.nbytes <= self._host_budget else self.disk

    def _write(self, dense: Tensor) -> Path:
        if self._own is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self.folder))
            self._lock = (self._own / "lock").open("w")
            fcntl.flock(
                self._lock, fcntl.LOCK_EX
            )  # the system lets go of it however this process ends
        self._written += 1
        file = self._own / f"{self._written}.raw"
        host = dense.cpu().contiguous()
        flat = host.as_strided(
            (host.numel(),), (1,)
        )  # a reshape would leave a single value its stride, which may be 0
        with atomic_path(file, dense.nbytes) as hidden:
            hidden.write_bytes(flat.view(torch.uint8).numpy().data)
        return file


def _read(handle: Handle) -> Tensor:
    assert handle.file is not None
    flat = torch.empty(handle.bytes, dtype=torch.uint8, pin_memory=handle.device.type == "cuda")
    with handle.file.open("rb") as file:
        read = file.readinto(flat.numpy().data)
    if read != handle.bytes:
        raise OSError(
            f"{handle.file}: {read} of {handle.bytes} bytes are left; something else wrote to this file"
        )
    return flat.view(handle.dtype).reshape(handle.dense)


def remove_abandoned(folder: Path) -> None:
    """Removes the files of spools whose process has ended without doing so."""
    for left in sorted(folder.glob(f"{_PREFIX}*")):
        with (
            suppress(OSError),
            (left / "lock").open("r+") as lock,
        ):  # of a spool that is in use the lock cannot be had
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
