"""What a calibration depends on, as one short text: two runs with the same one give the same bytes
on the same machine."""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from featcal.calibration.models import Models
from featcal.calibration.report import BlockRecord
from featcal.core.moments import TokenRule
from featcal.errors import BadSetting
from featcal.files import atomic_path, read_json, write_json
from featcal.models.plan import Stack
from featcal.settings import Calibration

CODE = (
    "core",
    "blocks",
    "calibration",
    "models",
    "storage",
)  # of this package: where the numbers are made
SAMPLES, SAMPLE = 64, 4096  # pieces of a weight file that are read, bytes of each


class Digest:
    """A running hash of tensors and texts."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, *parts: object) -> None:
        """Tensors by shape, type and bytes, everything else by its text."""
        for part in parts:
            if isinstance(part, Tensor):
                flat = part.detach().cpu().contiguous()
                self._hash.update(f"{tuple(flat.shape)} {flat.dtype};".encode())
                self._hash.update(flat.reshape(-1).view(torch.uint8).numpy().data)
            else:
                self._hash.update(part if isinstance(part, bytes) else f"{part!r};".encode())

    def __str__(self) -> str:
        return self._hash.hexdigest()


def fingerprint(
    models: Models,
    batches: Mapping[str, str],
    settings: Calibration,
    rule: TokenRule | None,
    drift: bool,
) -> str:
    """Of models, batches (digest by task), settings, plan, what is recorded, precision, this code
    and the versions it runs on.
    """
    digest = Digest()
    digest.add(
        settings.model_dump(), sorted(batches.items()), models.device.type, models.dtype, drift
    )
    digest.add(torch.__version__, transformers.__version__)
    for stack in models.plan.stacks:
        weigh = rule or models.plan.rule(stack)
        code = getattr(weigh, "__code__", None)
        digest.add(
            stack.name, stack.blocks, stack.mask, getattr(weigh, "__qualname__", type(weigh))
        )
        digest.add(*(code.co_code, code.co_consts, code.co_names) if code else ())
    for label, model in sorted(models.given.items()):
        digest.add(label)
        add_model(digest, model)
    root = Path(__file__).parents[1]
    for file in sorted(file for part in CODE for file in (root / part).glob("*.py")):
        digest.add(file.name, file.read_bytes())
    return str(digest)


def add_model(digest: Digest, model: nn.Module | Path) -> None:
    """Add a module by its weights, or a folder by names, sizes, dates and samples of its files,
    which may be too large to read.
    """
    if isinstance(model, nn.Module):
        for name, p in model.named_parameters():
            digest.add(name, p)
        return
    for file in sorted([model / "config.json", *model.glob("*.safetensors")]):
        state = file.stat()
        digest.add(file.name, state.st_size, state.st_mtime_ns)
        with file.open("rb") as stream:
            for start in range(0, state.st_size, max(SAMPLE, state.st_size // SAMPLES)):
                stream.seek(start)
                digest.add(stream.read(SAMPLE))


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
