"""Keep every task's features on their device, in host memory or on disk, and move them past blocks.

A tensor that was kept comes back with the same bits, and with the same strides if it fills its
memory without gaps or is expanded; else contiguous.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from featcal.core.moments import Drift
from featcal.errors import BadBatches, BadFile
from featcal.files import atomic_path, locked, remove_abandoned
from featcal.models.batch import Batch, Batches, check_batch, naming, pad_token, padding_mask
from featcal.models.blocks import first_inputs, stack_output, step
from featcal.models.plan import Stack

PREFIX = "featcal-spool-"  # of the folders with tensors on disk
NO_SAMPLES = "is empty; calibration needs at least one batch with at least one sample"


@dataclass
class Kept:
    """The bytes that a spool keeps at one location."""

    now: int = 0


class Handle:
    """One tensor that a spool keeps, for as long as the handle is referred to."""

    def __init__(
        self, tensor: Tensor, strides: list[int], flat: Tensor, kept: Kept, file: Path | None
    ):
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.strides = strides  # in memory without gaps; 0 along expanded axes
        self.flat = None if file else flat  # all values in order of memory
        self.file, self.bytes, self.kept = file, flat.nbytes, kept
        kept.now += self.bytes

    def __del__(self) -> None:
        self.kept.now -= self.bytes
        if self.file is not None:
            self.file.unlink(missing_ok=True)


class Spool(AbstractContextManager["Spool"]):
    """Keep tensors within budgets of bytes: on their GPU, in (pinned) host memory, then on disk.

    Files are in a folder of their own below `folder`, removed at the end; those of killed processes
    are removed at the beginning. A kept tensor is not copied, so it must not be overwritten.
    """

    def __init__(self, device_bytes: int, host_bytes: int, folder: str | Path):
        self._device_budget, self._host_budget, self.folder = device_bytes, host_bytes, Path(folder)
        self.device, self.host, self.disk = Kept(), Kept(), Kept()
        self._files: Path | None = None
        self._written = 0
        remove_abandoned(sorted(self.folder.glob(f"{PREFIX}*")))

    def keep(self, tensor: Tensor) -> Handle:
        """Keep a tensor. Raises: DiskFull naming the file."""
        once = tensor = tensor.detach()
        for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            once = once.narrow(axis, 0, 1) if stride == 0 and size > 1 else once
        if once.untyped_storage().nbytes() != once.nbytes:
            once = once.clone()  # a part would keep the whole of a larger tensor in memory
        flat = once.as_strided((once.numel(),), (1,))
        sizes = zip(tensor.shape, once.shape, once.stride(), strict=True)
        strides = [stride if size == whole else 0 for whole, size, stride in sizes]
        kept = self.host if self.host.now + flat.nbytes <= self._host_budget else self.disk
        if flat.is_cuda and self.device.now + flat.nbytes <= self._device_budget:
            kept = self.device
        file = self._write(flat) if kept is self.disk else None
        handle = Handle(tensor, strides, flat, kept, file)
        if kept is self.host and flat.is_cuda:
            handle.flat = torch.empty_like(flat, device="cpu", pin_memory=True).copy_(flat)
        return handle

    def get(self, handle: Handle) -> Tensor:
        """Return the tensor as it was given, on the device it came from; it stays kept."""
        flat = handle.flat
        if handle.file is not None:
            pinned = handle.device.type == "cuda"
            content = torch.empty(handle.bytes, dtype=torch.uint8, pin_memory=pinned)
            read = 0
            with suppress(FileNotFoundError), handle.file.open("rb") as file:
                read = file.readinto(content.numpy().data)
            if read != handle.bytes:
                problem = f"{read} of {handle.bytes} bytes are left by another program"
                raise BadFile(handle.file, problem, "start the same run again")
            flat = content.view(handle.dtype)
        assert flat is not None
        flat = flat.to(handle.device, non_blocking=True)
        return flat.as_strided(handle.shape, handle.strides)

    def __exit__(self, *error: object) -> None:
        if self._files is not None:
            shutil.rmtree(self._files, ignore_errors=True)
            os.close(self._lock)
            self._files = None

    def _write(self, flat: Tensor) -> Path:
        if self._files is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._files = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self.folder))
            self._lock = os.open(self._files, os.O_RDONLY)
            locked(self._lock)  # the system drops it when this process ends
        self._written += 1
        file = self._files / f"{self._written}.raw"
        with atomic_path(file, flat.nbytes) as part:
            part.write_bytes(flat.cpu().view(torch.uint8).numpy().data)
        return file


class SpooledList:
    """Keep a list of values with tensors in them, such as features, until others replace them.

    A tensor of the value read last that is part of its replacement is not kept again.
    """

    def __init__(self, spool: Spool, values: Iterable[Any] = ()):
        self.spool = spool
        self._values = [self._keep(value, {}) for value in values]  # handles instead of tensors
        # number of the value read last, and its tensors by identity
        self._last: tuple[int, dict[int, tuple[Tensor, Handle]]] = -1, {}

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Any:
        """Return a value with its tensors."""
        leaves = tree_leaves(self._values[number])
        tensors = {leaf: self.spool.get(leaf) for leaf in leaves if isinstance(leaf, Handle)}
        self._last = number, {id(tensor): (tensor, handle) for handle, tensor in tensors.items()}
        return tree_map_only(Handle, tensors.__getitem__, self._values[number])

    def __setitem__(self, number: int, value: Any) -> None:
        """Replace a value; tensors that only the old one has are dropped."""
        read_last, tensors = self._last
        self._last = -1, {}
        self._values[number] = self._keep(value, tensors if read_last == number else {})

    def append(self, value: Any) -> None:
        """Keep one more value."""
        self._values.append(self._keep(value, {}))

    def clear(self) -> None:
        """Drop all values."""
        self._values, self._last = [], (-1, {})

    def _keep(self, value: Any, known: dict[int, tuple[Tensor, Handle]]) -> Any:
        """Return the value with handles instead of tensors; one that occurs twice is kept once."""

        def keep(tensor: Tensor) -> Handle:
            if id(tensor) not in known:
                known[id(tensor)] = tensor, self.spool.keep(tensor)
            return known[id(tensor)][1]

        return tree_map_only(Tensor, keep, value)


@dataclass
class StudentTeacherFeatures:
    """Features of one task before the current block: per batch hidden states (batch, tokens, d) and
    other arguments; after the last block of a stack that feeds another, what it feeds.
    """

    students: list[SpooledList]  # in each model that is being calibrated
    teacher: SpooledList  # in the task's expert
    masks: list[Tensor | None] = field(default_factory=list)  # (batch, tokens), 0 at padding
    encoder_masks: list[Tensor | None] = field(default_factory=list)  # of the stack that feeds it
    tokens: int = 0  # without padding

    @property
    def tracks(self) -> list[SpooledList]:
        """Return the features of every model, the teacher's last."""
        return [*self.students, self.teacher]


def first_features(
    task: str,
    students: Sequence[nn.Module],
    teacher: nn.Module,
    stack: Stack,
    batches: Batches,
    spool: Spool,
    source: Stack | None = None,
    encoder: StudentTeacherFeatures | None = None,
) -> StudentTeacherFeatures:
    """Return what reaches the first block of a stack in every student and in the teacher.

    `encoder` is the result of the stack `source` that feeds this one, and is consumed.
    """
    features = StudentTeacherFeatures([SpooledList(spool) for _ in students], SpooledList(spool))
    models = [*students, teacher]
    for number, batch in enumerate(batches):
        check_batch(task, number, batch, models[0])
        with naming(task, number):
            for which, model in enumerate(models):
                fed = encoder.tracks[which][number] if encoder else None
                inputs = first_inputs(model, stack, batch, source, fed)
                features.tracks[which].append(inputs)
        hidden = inputs[0]
        mask = padding_mask(batch, hidden, stack.mask, pad_token(models[0]))
        features.masks.append(mask)
        features.encoder_masks.append(encoder.masks[number] if encoder else None)
        features.tokens += hidden.shape[:-1].numel() if mask is None else int(mask.sum())
    for track in encoder.tracks if encoder else ():
        track.clear()
    if features.tokens == 0:
        raise BadBatches(task, NO_SAMPLES)
    return features


def advance(block: nn.Module, stack: Stack, track: SpooledList) -> None:
    """Move the features of one model past a block."""
    for number in range(len(track)):
        track[number] = step(block, stack, *track[number])


def advance_student(
    block: nn.Module, stack: Stack, features: StudentTeacherFeatures, student: int = 0
) -> Drift:
    """Move one student's features past a solved block and return their drift from the teacher's."""
    drift, track = Drift(), features.students[student]
    for number, mask in enumerate(features.masks):
        output = step(block, stack, *track[number])
        drift.add(output[0], features.teacher[number][0], mask)
        track[number] = output
    return drift


def leave_stack(model: nn.Module, stack: Stack, track: SpooledList) -> None:
    """Replace the features of one model after a stack's last block by what it feeds to the next."""
    for number in range(len(track)):
        track[number] = stack_output(model, stack, track[number][0])


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch with its tensors on a device; `check_batch` refuses what is not a mapping."""
    if not isinstance(batch, Mapping):
        return batch
    return {key: x.to(device) if isinstance(x, Tensor) else x for key, x in batch.items()}
