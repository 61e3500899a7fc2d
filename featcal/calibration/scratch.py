"""The scratch folder of a run: features that do not fit in memory, and solved blocks.

Tensors come back with the same bits, and blocks with the same fingerprint, which covers everything
that the result depends on, are used again after an interruption.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from glob import glob
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from featcal import files
from featcal.card import BlockRecord
from featcal.errors import BadFile
from featcal.models.checkpoint import LazyCheckpoint
from featcal.models.load import copy_other_files, shard_writer
from featcal.models.plan import BlockPlan
from featcal.models.streamed import Override, StreamedModel

PREFIX = "featcal-spool-"  # of the folders with features


class Handle:
    """One tensor that a spool keeps for as long as this handle exists."""

    def __init__(
        self,
        tensor: Tensor,
        strides: list[int],
        flat: Tensor,
        file: Path | None,
        kept: Counter[str],
        tier: str,
    ):
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.strides = strides  # in memory without gaps; 0 along expanded axes
        self.flat = None if file else flat  # all values in order of memory
        self.file, self.bytes, self.kept, self.tier = file, flat.nbytes, kept, tier
        kept[tier] += self.bytes

    def __del__(self) -> None:
        self.kept[self.tier] -= self.bytes
        if self.file is not None:
            self.file.unlink(missing_ok=True)


class Spool(AbstractContextManager["Spool"]):
    """Keep tensors within budgets of bytes: on their GPU, in (pinned) host memory, then on disk.

    Files are below `folder`, removed at the end; those of killed processes at the beginning. A kept
    tensor is not copied, so it must not be overwritten.
    """

    def __init__(self, device_bytes: int, host_bytes: int, folder: str | Path):
        self._device_budget, self._host_budget, self.folder = device_bytes, host_bytes, Path(folder)
        self.kept = Counter[str]()  # bytes on "device", "host" and "disk"
        self._files: Path | None = None
        self._written = 0
        files.remove_abandoned(sorted(self.folder.glob(f"{PREFIX}*")))

    def keep(self, tensor: Tensor) -> Handle:
        """Keep a tensor. Raises: DiskFull naming the file."""
        compact = tensor = tensor.detach()  # without the copies along expanded axes
        for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            compact = compact.narrow(axis, 0, 1) if stride == 0 and size > 1 else compact
        if compact.untyped_storage().nbytes() != compact.nbytes:
            compact = compact.clone()  # a part would keep all of a larger tensor in memory
        flat = compact.as_strided((compact.numel(),), (1,))
        axes = zip(tensor.shape, compact.shape, compact.stride(), strict=True)
        strides = [stride if size == expanded else 0 for expanded, size, stride in axes]
        tier = "host" if self.kept["host"] + flat.nbytes <= self._host_budget else "disk"
        if flat.is_cuda and self.kept["device"] + flat.nbytes <= self._device_budget:
            tier = "device"
        file = self._write(flat) if tier == "disk" else None
        if tier == "host" and flat.is_cuda:
            flat = torch.empty_like(flat, device="cpu", pin_memory=True).copy_(flat)
        return Handle(tensor, strides, flat, file, self.kept, tier)

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
        return flat.to(handle.device, non_blocking=True).as_strided(handle.shape, handle.strides)

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
            files.locked(self._lock)  # the system drops it when this process ends
        self._written += 1
        file = self._files / f"{self._written}.raw"
        with files.atomic_path(file, flat.nbytes) as part:
            part.write_bytes(flat.cpu().view(torch.uint8).numpy().data)
        return file


class SpooledList:
    """A list of values that hold tensors; a tensor that is read and put back is kept once."""

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

    def _keep(self, value: Any, handles: dict[int, tuple[Tensor, Handle]]) -> Any:
        """Return the value with handles instead of tensors; one that occurs twice is kept once."""

        def keep(tensor: Tensor) -> Handle:
            if id(tensor) not in handles:
                handles[id(tensor)] = tensor, self.spool.keep(tensor)
            return handles[id(tensor)][1]

        return tree_map_only(Tensor, keep, value)


class Digest:
    """A running hash of tensors and texts."""

    def __init__(self, *parts: object) -> None:
        self._hash = hashlib.sha256()
        self.add(*parts)

    def add(self, *parts: object) -> None:
        """Add tensors by shape, type and bytes, and everything else by its text."""
        for part in parts:
            if isinstance(part, Tensor):
                flat = part.detach().cpu().contiguous()
                self._hash.update(f"{tuple(flat.shape)} {flat.dtype};".encode())
                self._hash.update(flat.reshape(-1).view(torch.uint8).numpy().data)
            else:
                self._hash.update(part if isinstance(part, bytes) else f"{part!r};".encode())

    def __str__(self) -> str:
        return self._hash.hexdigest()


def check_sum(parameters: Mapping[str, Tensor], record: str) -> str:
    """Return a digest of a solved block's file, to notice damage and edits."""
    return str(Digest(record, *(part for item in sorted(parameters.items()) for part in item)))


def scratch_folder(out: Path, work: Path | None = None) -> Path:
    """Return the hidden folder for solved blocks, in `work` or next to the result."""
    return (work or out.parent) / f".{out.name}.unfinished"


def holds_blocks(folder: Path) -> bool:
    """Return whether solved blocks are below a folder, which may vanish meanwhile."""
    return bool(glob("**/blocks/*.safetensors", root_dir=folder, recursive=True))


class RunFolder(AbstractContextManager["RunFolder"]):
    """Solved blocks in a folder, which its writer removes at the end, or on errors if it has none."""

    def __init__(self, path: Path, writes: bool = True):
        self.path, self._blocks, self._writes = path, path / "blocks", writes
        if writes:
            self._blocks.mkdir(parents=True, exist_ok=True)
            for unfinished in self._blocks.glob(".*"):  # of a process that was killed in `keep`
                unfinished.unlink()

    def __exit__(self, *error: object) -> None:
        if self._writes and not holds_blocks(self.path):
            self.remove()

    def resume(self, fingerprints: Mapping[str, str], wanted: bool = True) -> None:
        """Keep the blocks of an earlier run with the same fingerprints, and remove all others."""
        if self._writes:
            stamp = self.path / "fingerprints.json"
            same = stamp.is_file() and files.read_json(stamp) == dict(fingerprints)
            if not (same and wanted):
                for block in self._blocks.glob("*"):
                    block.unlink()
            files.write_json(stamp, dict(fingerprints))

    def solved(self, block: str) -> tuple[dict[str, Tensor], BlockRecord] | None:
        """Return a block's parameters by name and its record; None without a whole file."""
        try:
            with safe_open(self._blocks / f"{block}.safetensors", framework="pt") as file:
                metadata = file.metadata() or {}
                parameters = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (FileNotFoundError, SafetensorError):
            return None
        if metadata.get("sum") != check_sum(parameters, metadata.get("record", "")):
            return None
        return parameters, BlockRecord(**json.loads(metadata["record"]))

    def keep(self, block: str, parameters: Mapping[str, Tensor], record: BlockRecord) -> None:
        """Write a solved block; its file appears whole or not at all. Raises: DiskFull."""
        if not self._writes:
            return
        path = self._blocks / f"{block}.safetensors"
        with files.atomic_path(path, sum(p.nbytes for p in parameters.values())) as part:
            tensors = {name: p.detach().cpu().contiguous() for name, p in parameters.items()}
            text = json.dumps(record.stated)
            save_file(tensors, part, metadata={"record": text, "sum": check_sum(tensors, text)})

    def remove(self) -> None:
        """Remove the folder, once the result is written."""
        if self._writes:
            shutil.rmtree(self.path, ignore_errors=True)

    def solved_values(self, plan: BlockPlan) -> Override:
        """Return a function of a parameter's name: its solved value, or None. Raises: BadFile."""

        @lru_cache(maxsize=1)
        def parameters(block: str) -> Mapping[str, Tensor]:
            solved = self.solved(block)
            if solved is None:
                problem = f"lost block {block}, removed or changed by another program"
                raise BadFile(self.path, problem, "start the same run again")
            return solved[0]

        def value(name: str) -> Tensor | None:
            for stack in plan.stacks:
                if name.startswith(f"{stack.blocks}."):
                    index, _, inner = name.removeprefix(f"{stack.blocks}.").partition(".")
                    return parameters(stack.block_name(int(index))).get(inner)
            return None

        return value


def copy_with(student: StreamedModel, folder: Path, solved: Override) -> None:
    """Copy the student's folder, in its names and precision, with solved parameters instead."""
    checkpoint, written = LazyCheckpoint(student.folder), set[str]()  # both towers of a CLIP
    prefix = student.files.prefix

    def rounded() -> Iterator[tuple[str, Tensor]]:
        for name, _ in student.module.named_parameters():
            if (tensor := solved(name)) is not None:
                written.update(prefix + source for source in student.sources(name))
                yield name, tensor.to(student.stored[name].dtype)

    with shard_writer(folder, needed=sum(t.nbytes for t in checkpoint.values())) as writer:
        shutil.copyfile(checkpoint.folder / "config.json", writer.folder / "config.json")
        copy_other_files(checkpoint.folder, writer.folder)
        for name, tensor in student.to_files(rounded()):
            writer.write(prefix + name, tensor)
        for name, stored in checkpoint.items():
            if name not in written:
                writer.write(name, stored.read())
