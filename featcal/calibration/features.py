"""Where tensors wait until they are needed again: on their device, in host memory, on disk, as far
as each budget goes.

What comes back has the same bits. Strides come back where a tensor fills its memory without gaps,
in whatever order of axes, and where it is expanded; otherwise it comes back without the gaps. Knows
nothing of what the tensors mean."""

import fcntl
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from featcal.calibration.resume import Digest
from featcal.core.drift import Drift
from featcal.errors import BadBatches
from featcal.files import Ledger, atomic_path
from featcal.models.batch import Batch, check_batch, naming, pad_token, padding_mask
from featcal.models.capture import feeding, first_inputs
from featcal.models.plan import Stack, blocks_of
from featcal.models.replay import stack_output, step

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


def tree_map(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The value with everything of one kind in it changed; tuples, lists and mappings are rebuilt,
    all else is left as it is.
    """
    if isinstance(value, kind):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(tree_map(part, kind, change) for part in value)
    if isinstance(value, dict):
        return {name: tree_map(part, kind, change) for name, part in value.items()}
    return value


def leaves(value: Any, kind: type) -> list[Any]:
    """Everything of one kind in a value."""
    parts: list[Any] = []
    tree_map(value, kind, parts.append)
    return parts


Borrowed = dict[int, tuple[Tensor, Handle]]  # by the tensor's identity


class SpooledList:
    """A list of values with tensors in them (features, batches); each is kept until another takes
    its place.
    """

    def __init__(self, spool: Spool):
        self._spool = spool
        self._kept: list[Any] = []  # the values, with handles where tensors were
        self._borrowed: tuple[int, Borrowed] = (
            -1,
            {},
        )  # number and tensors of the value asked for last

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Any:
        handles = {id(handle): handle for handle in leaves(self._kept[number], Handle)}
        tensors = {key: self._spool.get(handle) for key, handle in handles.items()}
        self._borrowed = (
            number,
            {id(tensors[key]): (tensors[key], handle) for key, handle in handles.items()},
        )
        return tree_map(self._kept[number], Handle, lambda handle: tensors[id(handle)])

    def __setitem__(self, number: int, value: Any) -> None:
        before, borrowed = leaves(self._kept[number], Handle), self._borrowed
        self._borrowed = -1, {}
        self._kept[number] = self._keep(value, borrowed[1] if borrowed[0] == number else {})
        self._drop(before, still=self._kept[number])

    def append(self, value: Any) -> None:
        """Keep one more."""
        self._kept.append(self._keep(value, {}))

    def empty(self) -> "SpooledList":
        """Another list of the same spool, with nothing in it."""
        return SpooledList(self._spool)

    def clear(self) -> None:
        """Let go of everything."""
        self._drop(leaves(self._kept, Handle), still=None)
        self._kept = []

    def _keep(self, value: Any, known: Borrowed) -> Any:
        """The value with handles where tensors were; a tensor that was borrowed, or stands twice in
        the value, is kept once.
        """

        def keep(tensor: Tensor) -> Handle:
            if id(tensor) not in known:
                known[id(tensor)] = (tensor, self._spool.keep(tensor))
            return known[id(tensor)][1]

        return tree_map(value, Tensor, keep)

    def _drop(self, handles: list[Handle], still: Any) -> None:
        left = {id(handle) for handle in leaves(still, Handle)}
        for handle in {id(handle): handle for handle in handles}.values():
            if id(handle) not in left:
                self._spool.drop(handle)


class Stream:
    """The batches of one task, read once and digested; kept for models with several stacks.

    check: called with the first batch before it is used.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        kept: SpooledList | None,
        check: Callable[[Batch], None] | None,
    ):
        self._batches, self._kept, self._check = batches, kept, check
        self._digest = Digest()

    def __iter__(self) -> Iterator[Batch]:
        if self._kept is not None and len(self._kept):
            yield from self._kept
            return
        for number, batch in enumerate(self._batches):
            if isinstance(batch, Mapping):
                self._digest.add(*batch, *leaves(dict(batch), Tensor))
            if number == 0 and self._check:
                self._check(batch)
            if self._kept is not None:
                self._kept.append(batch)
            yield batch

    @property
    def digest(self) -> str:
        """Return the digest of all batches, once they have been read."""
        return str(self._digest)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Move the tensors of a batch to a device; leave what is no mapping for `check_batch` to
    refuse.
    """
    if not isinstance(batch, Mapping):
        return batch
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def size(task: str, number: int, batch: Batch) -> int:
    """Return the number of samples of a batch. Raises: BadBatches for one without a tensor."""
    tensors = (
        [value for value in batch.values() if isinstance(value, Tensor)]
        if isinstance(batch, Mapping)
        else []
    )
    if not tensors:
        raise BadBatches(
            task,
            f"batch {number} holds no tensor; expected a mapping such as {{'pixel_values': tensor}}",
        )
    return len(tensors[0])


def rows(batch: Batch, chosen: Tensor) -> Batch:
    """Return some samples of a batch; values that are no tensor with one row per sample stay."""
    return {
        name: value[chosen.to(value.device)]
        if isinstance(value, Tensor) and len(value) == len(chosen)
        else value
        for name, value in batch.items()
    }


@dataclass
class StudentTeacherFeatures:
    """Features of one task before the current block of one stack; a track holds Features, batch
    by batch.
    """

    student: SpooledList
    teacher: SpooledList
    masks: list[Tensor | None] = field(default_factory=list)  # (batch, tokens), 0 at padding
    fed_masks: list[Tensor | None] = field(
        default_factory=list
    )  # of the tokens that another stack feeds
    tokens: int = 0  # without padding


@dataclass(frozen=True)
class EncoderOutputs:
    """Outputs of one stack that feed the next, of one task, batch by batch."""

    student: SpooledList  # by the calibrated stack
    teacher: SpooledList
    masks: list[Tensor | None]


def start_tracks(
    task: str,
    student: nn.Module,
    teacher: nn.Module,
    stack: Stack,
    batches: Iterable[Mapping[str, Any]],
    spool: Spool,
    source: Stack | None = None,
    fed: EncoderOutputs | None = None,
) -> StudentTeacherFeatures:
    """Return both tracks before the first block of a stack, which `source` feeds; batches are read
    once. Raises: BadBatches.
    """
    tracks = StudentTeacherFeatures(SpooledList(spool), SpooledList(spool))
    for number, batch in enumerate(batches):
        check_batch(task, number, batch, student)
        with naming(task, number):
            for model, track, handed in (
                (student, tracks.student, fed and fed.student[number]),
                (teacher, tracks.teacher, fed and fed.teacher[number]),
            ):
                with feeding(model, source, stack, handed):
                    features = first_inputs(model, blocks_of(model, stack), batch, stack.mixed)
                track.append(features)
        mask = padding_mask(batch, features[0], stack.mask, pad_token(student))
        tracks.masks.append(mask)
        tracks.fed_masks.append(fed.masks[number] if fed else None)
        tracks.tokens += int(mask.sum()) if mask is not None else features[0].shape[:-1].numel()
    if fed:
        fed.student.clear()
        fed.teacher.clear()
    if tracks.tokens == 0:
        raise BadBatches(
            task, "is empty; calibration needs at least one batch with at least one sample"
        )
    return tracks


def advance(block: nn.Module, stack: Stack, track: SpooledList) -> None:
    """Move one track past a block."""
    for number in range(len(track)):
        track[number] = step(block, stack, *track[number])


def moved(block: nn.Module, stack: Stack, track: SpooledList) -> SpooledList:
    """Return a track past a block; the given one stays where it is."""
    result = track.empty()
    for features in track:
        result.append(step(block, stack, *features))
    return result


def advance_student(block: nn.Module, stack: Stack, tracks: StudentTeacherFeatures) -> Drift:
    """Move the student's track past a block, and return its drift from the teacher's track."""
    drift = Drift()
    for number, mask in enumerate(tracks.masks):
        features = step(block, stack, *tracks.student[number])
        drift.add(features[0], tracks.teacher[number][0], mask)
        tracks.student[number] = features
    return drift


def hand_on(model: nn.Module, stack: Stack, track: SpooledList) -> SpooledList:
    """Return what a stack feeds to the next one, from a track past its last block, which is
    consumed.
    """
    result = track.empty()
    for hidden, _ in track:
        result.append(stack_output(model, stack, hidden))
    track.clear()
    return result
