"""What a calibration leaves behind when it is killed: every solved block, kept until the result is
written.

A run goes on from such a folder only where nothing that could change a number differs: models,
batches, settings, code, versions.
"""

import fcntl
import json
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from featcal.blocks.plan import Stack
from featcal.calibration.fingerprint import Digest
from featcal.calibration.record import BlockRecord
from featcal.errors import BadSetting
from featcal.storage.atomic import atomic_path
from featcal.storage.jsonfile import read_json, write_json


@dataclass(frozen=True)
class Solved:
    """A block that is done."""

    parameters: dict[str, Tensor]  # by name within the block
    record: BlockRecord


def block_name(stack: Stack, index: int) -> str:
    """How records and files call a block."""
    return f"{stack.name}.{index:02d}"


def beside(out: Path) -> Path:
    """Where a run keeps its blocks unless told otherwise: a hidden folder beside the result."""
    return out.with_name(f".{out.name}.unfinished")


def check_sum(parameters: Mapping[str, Tensor], record: str) -> str:
    """Of all that a solved block's file holds; a disk that filled up or a hand that edited changes
    it.
    """
    digest = Digest()
    digest.add(record, *(part for item in sorted(parameters.items()) for part in item))
    return str(digest)


class RunFolder(AbstractContextManager["RunFolder"]):
    """`with RunFolder(path) as run:`; one process at a time works in it.

    It stays where the body fails with blocks solved; `remove` is called once the result is written.
    writes: of several processes that share a run one writes and all read.
    Raises: BadSetting where another process works in it.
    """

    def __init__(self, path: Path, writes: bool = True):
        self.path, self._blocks, self._writes = path, path / "blocks", writes
        self._lock: IO[str] | None = None

    def __enter__(self) -> "RunFolder":
        if not self._writes:
            return self
        self._blocks.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise BadSetting(
                "work",
                str(self.path),
                "is in use by another calibration; wait for it or name another folder",
            ) from None
        for unfinished in self._blocks.glob(".*"):  # of a process that was killed while it wrote
            unfinished.unlink()
        return self

    def __exit__(self, *error: object) -> None:
        if self._writes and not any(
            self._blocks.glob("*")
        ):  # nothing that a next run could go on from
            self.remove()
        if self._lock:
            self._lock.close()

    def resume(self, fingerprints: Mapping[str, str], wanted: bool = True) -> None:
        """Keep what an earlier run has solved whose processes had the same fingerprints; remove
        what another one has.
        """
        if self._writes:
            stamp = self.path / "fingerprints.json"
            same = stamp.is_file() and read_json(stamp) == dict(fingerprints)
            for block in () if same and wanted else self._blocks.glob("*"):
                block.unlink()
            write_json(stamp, dict(fingerprints))

    def solved(self, block: str) -> Solved | None:
        """Parameters and record of a block that an earlier run has solved; None where there is
        none, or one that was damaged.
        """
        path = self._file(block)
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                told = file.metadata() or {}
                parameters = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError:
            return None
        if told.get("sum") != check_sum(parameters, told.get("record", "")):
            return None
        return Solved(parameters, BlockRecord(**json.loads(told["record"])))

    def keep(self, block: str, parameters: Mapping[str, Tensor], record: BlockRecord) -> None:
        """Write a solved block; it appears whole or not at all. Raises: DiskFull."""
        if not self._writes:
            return
        with atomic_path(self._file(block), sum(p.nbytes for p in parameters.values())) as part:
            tensors = {name: p.detach().cpu().contiguous() for name, p in parameters.items()}
            text = json.dumps(record.told)
            save_file(tensors, part, metadata={"record": text, "sum": check_sum(tensors, text)})

    def remove(self) -> None:
        """Nothing is left to go on from: the result is written."""
        if self._writes:
            shutil.rmtree(self.path, ignore_errors=True)

    def _file(self, block: str) -> Path:
        return self._blocks / f"{block}.safetensors"
