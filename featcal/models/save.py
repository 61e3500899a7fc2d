"""Write a checkpoint folder from tensors that come one at a time, in any order.

Each tensor is spooled to a file of its own and all are joined at the end, so memory holds one
tensor and the bytes do not depend on the order."""

import copy
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPConfig, PretrainedConfig

from featcal.errors import BadFile
from featcal.files import atomic_folder
from featcal.models.checkpoint import INDEX, KINDS, SINGLE

LIMIT = 5 * 10**9  # bytes per file, as transformers shards
MODULES = "modules.json"  # the parts of a SentenceTransformer, each a sub-folder
_KINDS = {getattr(torch, name): kind for kind, name in KINDS.items()}
# what libraries keep weights and training states in; an index lists shards
WEIGHTS = (
    ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5",
    ".msgpack", ".ot", ".gguf", ".onnx", ".onnx_data", ".pb", ".tflite",
)  # fmt: skip
# what describes the folder's own model; whoever writes a new folder writes these anew
OWN_FILES = (
    "config.json", "open_clip_config.json", "adapter_config.json", "mergekit_config.yml",
    "merge.json", "featcal.json",
)  # fmt: skip


@dataclass(frozen=True)
class _Spooled:
    name: str
    kind: str
    shape: tuple[int, ...]
    bytes: int
    align: int
    file: Path


def require_replaceable(folder: Path) -> None:
    """Raise BadFile if a path is taken by anything but an empty folder or a folder of a model."""
    if not folder.exists():
        return
    if folder.is_dir():
        model = any(any(folder.glob(name)) for name in ("*.safetensors", "config.json"))
        if model or not any(folder.iterdir()):
            return
    problem = "exists and is not a model's folder; only those are replaced"
    raise BadFile(folder, problem, "name a new folder")


class ShardWriter(AbstractContextManager["ShardWriter"]):
    """`with ShardWriter(folder) as writer: writer.write(name, tensor)` writes a folder of shards.

    The folder appears complete at the end, or not at all. `writer.folder` is the unfinished folder,
    for config.json and the like. More bytes than `limit` make numbered shards and an index.
    """

    def __init__(self, folder: str | Path, limit: int = LIMIT, needed: int | None = None):
        require_replaceable(Path(folder))
        self._limit = limit
        self._atomic = atomic_folder(folder, needed)
        self._spooled: dict[str, _Spooled] = {}

    def __enter__(self) -> "ShardWriter":
        self.folder = self._atomic.__enter__()
        self._spool = self.folder / ".spool"
        self._spool.mkdir()
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Keep one tensor; each name once."""
        assert name not in self._spooled, f"{name} written twice"
        flat = tensor.detach().cpu().contiguous()
        raw, file = (
            flat.reshape(-1).view(torch.uint8).numpy(),
            self._spool / str(len(self._spooled)),
        )
        file.write_bytes(raw.data)
        self._spooled[name] = _Spooled(
            name, _KINDS[flat.dtype], tuple(flat.shape), raw.nbytes, flat.element_size(), file
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        try:
            if kind is None:
                self._join()
        except BaseException as failed:
            self._atomic.__exit__(type(failed), failed, failed.__traceback__)
            raise
        return self._atomic.__exit__(kind, error, trace)

    def _join(self) -> None:
        """Write the shards, tensors by name; a new one if the next tensor passes the limit."""
        shards: list[list[_Spooled]] = [[]]
        for _, tensor in sorted(self._spooled.items()):
            if shards[-1] and sum(t.bytes for t in shards[-1]) + tensor.bytes > self._limit:
                shards.append([])
            shards[-1].append(tensor)
        weight_map: dict[str, str] = {}
        for i, shard in enumerate(shards, start=1):
            name = SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            _write_safetensors(self.folder / name, shard)
            weight_map |= {t.name: name for t in shard}
        if len(shards) > 1:
            size = {"total_size": sum(t.bytes for t in self._spooled.values())}
            index = {"metadata": size, "weight_map": weight_map}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self.folder / INDEX).write_text(text, "utf-8")
        shutil.rmtree(self._spool)


def _write_safetensors(path: Path, tensors: list[_Spooled]) -> None:
    """Write one file: length of the header, header padded to 8 bytes, bytes of every tensor."""
    ordered = sorted(tensors, key=lambda t: (-t.align, t.name))  # widest first keeps all aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        offsets = [end, end := end + tensor.bytes]
        entry = {"dtype": tensor.kind, "shape": tensor.shape, "data_offsets": offsets}
        header[tensor.name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            with tensor.file.open("rb") as part:
                shutil.copyfileobj(part, out, 1 << 20)
            tensor.file.unlink()  # so that the disk never holds the model twice


def save_model(
    module: nn.Module, folder: str | Path, like: str | Path | None = None, limit: int = LIMIT
) -> Path:
    """Write config.json and safetensors, and copy the other files of the folder `like`.

    The folder appears complete or not at all. Tensors that share memory (tied embeddings) are
    written once. Returns: the folder. Raises: DiskFull.
    """
    state = untied(module)
    needed = sum(tensor.nbytes for tensor in state.values())
    with ShardWriter(folder, limit, needed) as writer:
        write_config(module.config, type(module).__name__, writer.folder)  # type: ignore[arg-type]
        copy_other_files(like, writer.folder)
        for name, tensor in state.items():
            writer.write(name, tensor)
    return Path(folder)


def untied(module: nn.Module) -> dict[str, Tensor]:
    """Return the state of a module, each memory under its first name only."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    state = {}
    for name, tensor in module.state_dict().items():
        memory = (tensor.data_ptr(), tuple(tensor.shape))
        if not tensor.numel() or memory not in seen:
            state[name] = tensor
        seen.add(memory)
    return state


def write_config(config: PretrainedConfig, architecture: str, folder: Path) -> None:
    """Write the config.json of a model class; of a CLIPConfig the vision part for the tower."""
    part: Any = config
    if architecture == "CLIPVisionModel" and isinstance(config, CLIPConfig):
        part = config.vision_config
    config = copy.deepcopy(part)
    config.architectures = [architecture]
    for each in (config, *(getattr(config, name) for name in config.sub_configs)):
        each.dtype = None  # the weights tell; whether a config does depends on how it was loaded
    config.save_pretrained(folder)


def copy_other_files(like: str | Path | None, folder: Path) -> None:
    """Copy what makes a folder usable besides its weights: tokenizer, processor, prompts, modules.

    These are all files of `like` and its sub-folders but weights, the card and records of how
    `like` was made. A sub-folder with weights is another form of the model (onnx/, checkpoint-500/)
    and is left out, unless modules.json lists it as a part of the model, such as a dense layer
    after pooling. Hidden files and links to folders are left out.
    Raises: BadFile for an unreadable modules.json.
    """
    if like is not None:
        for file in other_files(Path(like)):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(like) / file, folder / file)


def other_files(like: Path) -> Iterator[Path]:
    """Yield the files that `copy_other_files` copies, relative to the folder."""
    parts = _module_folders(like)
    for path, folders, files in os.walk(like):
        inside = Path(path).relative_to(like)
        top, part = not inside.name, inside.as_posix() in parts
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        weights = {name for name in files if name.lower().endswith(WEIGHTS)}
        if weights and not top and not part:
            folders.clear()
            continue
        for name in sorted(files):
            own = top and (name in OWN_FILES or Path(name).stem.lower() == "readme")
            left_out = name.startswith(".") or own or (name in weights and not part)
            if not left_out and (like / inside / name).is_file():
                yield inside / name


def _module_folders(like: Path) -> set[str]:
    """Return the sub-folders of a SentenceTransformer's parts besides the model itself."""
    file = like / MODULES
    if not file.is_file():
        return set()
    try:
        parts = json.loads(file.read_text("utf-8"))
        return {PurePosixPath(part["path"]).as_posix() for part in parts} - {"."}
    except (ValueError, TypeError, KeyError):
        problem = "is not the list of a SentenceTransformer's parts"
        raise BadFile(file, problem, "copy or download it again, or remove it") from None
