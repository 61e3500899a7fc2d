"""Keep solved blocks on disk to continue an interrupted run, and write the result from them.

A fingerprint covers everything that the result depends on: two runs with the same one give the same
bytes on the same machine, and only then are blocks of the earlier run used.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from featcal.calibration.models import Models
from featcal.calibration.report import BlockRecord, Result
from featcal.card import RECORD, write_card
from featcal.core.moments import TokenRule
from featcal.errors import BadFile
from featcal.files import atomic_folder, atomic_path, read_json, write_json
from featcal.models.checkpoint import LazyCheckpoint
from featcal.models.load import copy_other_files, save_model, shard_writer
from featcal.models.plan import BlockPlan
from featcal.models.streamed import InMemoryModel, Override, StreamedModel
from featcal.settings import Calibration

CODE = ("core", "models", "calibration")  # subpackages that weights depend on
SAMPLES, SAMPLE = 64, 4096  # pieces of a weight file that are read, bytes of each


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


def fingerprint(
    models: Models,
    batches: Mapping[str, str],
    settings: Calibration,
    token_weights: TokenRule | None,
    block_drift: bool,
) -> str:
    """Return a digest of models, digests of batches, settings, plan, this code and its versions."""
    digest = Digest(settings.model_dump(), sorted(batches.items()), models.device.type)
    digest.add(models.dtype, block_drift, torch.__version__, transformers.__version__)
    for stack in models.plan.stacks:
        rule = token_weights or models.plan.rule(stack)
        code = getattr(rule, "__code__", None)
        digest.add(stack.name, stack.blocks, stack.mask, getattr(rule, "__qualname__", type(rule)))
        digest.add(*(code.co_code, code.co_consts, code.co_names) if code else ())
    roles = {"merged": models.merged, "base": models.base}
    roles |= {f"expert {task}": expert for task, expert in models.experts.items()}
    for role, handle in roles.items():
        digest.add(role)
        if isinstance(handle, InMemoryModel):
            digest.add(*(part for named in handle.module.named_parameters() for part in named))
            continue
        for file in sorted([handle.folder / "config.json", *handle.folder.glob("*.safetensors")]):
            state = file.stat()  # the whole may be too large to read
            digest.add(file.name, state.st_size, state.st_mtime_ns)
            with file.open("rb") as stream:
                for start in range(0, state.st_size, max(SAMPLE, state.st_size // SAMPLES)):
                    stream.seek(start)
                    digest.add(stream.read(SAMPLE))
    root = Path(__file__).parents[1]
    for file in sorted(file for part in CODE for file in (root / part).glob("*.py")):
        digest.add(file.name, file.read_bytes())
    return str(digest)


def check_sum(parameters: Mapping[str, Tensor], record: str) -> str:
    """Return a digest of a solved block's file, which a full disk or an editor changes."""
    return str(Digest(record, *(part for item in sorted(parameters.items()) for part in item)))


def scratch_folder(out: Path) -> Path:
    """Return the default folder for solved blocks: a hidden one next to the result."""
    return out.with_name(f".{out.name}.unfinished")


class RunFolder(AbstractContextManager["RunFolder"]):
    """Solved blocks in a folder, which stays if the body fails with blocks solved, until `remove`.

    Of several processes that share a run, one `writes` and all read.
    """

    def __init__(self, path: Path, writes: bool = True):
        self.path, self._blocks, self._writes = path, path / "blocks", writes
        if writes:
            self._blocks.mkdir(parents=True, exist_ok=True)
            for unfinished in self._blocks.glob(".*"):  # of a process that was killed in `keep`
                unfinished.unlink()

    def __exit__(self, *error: object) -> None:
        if not any(self.path.rglob("blocks/*.safetensors")):
            self.remove()

    def resume(self, fingerprints: Mapping[str, str], wanted: bool = True) -> None:
        """Keep the blocks of an earlier run with the same fingerprints, and remove all others."""
        if self._writes:
            stamp = self.path / "fingerprints.json"
            same = stamp.is_file() and read_json(stamp) == dict(fingerprints)
            for block in () if same and wanted else self._blocks.glob("*"):
                block.unlink()
            write_json(stamp, dict(fingerprints))

    def solved(self, block: str) -> tuple[dict[str, Tensor], BlockRecord] | None:
        """Return parameters by name and record of a block; None if its file is missing or damaged."""
        path = self._blocks / f"{block}.safetensors"
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                parameters = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError:
            return None
        if metadata.get("sum") != check_sum(parameters, metadata.get("record", "")):
            return None
        return parameters, BlockRecord(**json.loads(metadata["record"]))

    def keep(self, block: str, parameters: Mapping[str, Tensor], record: BlockRecord) -> None:
        """Write a solved block; its file appears whole or not at all. Raises: DiskFull."""
        if not self._writes:
            return
        path = self._blocks / f"{block}.safetensors"
        with atomic_path(path, sum(p.nbytes for p in parameters.values())) as part:
            tensors = {name: p.detach().cpu().contiguous() for name, p in parameters.items()}
            text = json.dumps(record.stated)
            save_file(tensors, part, metadata={"record": text, "sum": check_sum(tensors, text)})

    def remove(self) -> None:
        """Remove the folder, once the result is written."""
        if self._writes:
            shutil.rmtree(self.path, ignore_errors=True)

    def solved_values(self, plan: BlockPlan) -> Override:
        """Return a function from a parameter's name in the model to its solved value, if it has one.

        It raises BadFile for a block that is gone.
        """

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


def write_calibrated(
    models: Models, out: str | Path, result: Result, folder: RunFolder, card: str
) -> None:
    """Write the calibrated model as a folder with the merged one's names and precision.

    Other files, such as the tokenizer, come from the merged folder, or from the base if that is a
    module. Raises: DiskFull; BadFile if a solved block is gone.
    """
    text = json.dumps(result.stated, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    student, base = models.student, models.base
    with atomic_folder(out) as path:
        if isinstance(student, StreamedModel):
            solved = folder.solved_values(models.plan) if result.settings else lambda _: None
            copy_with(student, path, solved)
        else:
            like = base.folder if isinstance(base, StreamedModel) else None
            save_model(student.module, path, like=like)
        (path / RECORD).write_text(text, encoding="utf-8")
        write_card(path, card)


def copy_with(student: StreamedModel, folder: Path, solved: Override) -> None:
    """Copy the student's folder with solved parameters in place of its own."""
    whole, written = LazyCheckpoint(student.folder), set[str]()  # of a whole CLIP both towers
    prefix = student.files.prefix

    def rounded() -> Iterator[tuple[str, Tensor]]:
        for name, _ in student.module.named_parameters():
            tensor = solved(name)
            if tensor is not None:
                written.update(prefix + source for source in student.sources(name))
                yield name, tensor.to(student.stored[name].dtype)

    with shard_writer(folder, needed=sum(each.nbytes for each in whole.values())) as writer:
        shutil.copyfile(whole.folder / "config.json", writer.folder / "config.json")
        copy_other_files(whole.folder, writer.folder)
        for name, tensor in student.to_files(rounded()):
            writer.write(prefix + name, tensor)
        for name, each in whole.items():
            if name not in written:
                writer.write(name, each.read())
