"""Write checkpoint folders from tensors that come one at a time, in any order.

Each tensor is first written to a file of its own, and the files are joined at the end. So memory
holds one tensor, and the bytes do not depend on the order.
"""

import copy
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn
from transformers import CLIPConfig, PretrainedConfig

from featcal.errors import BadFile
from featcal.files import atomic_folder
from featcal.models.checkpoint import INDEX, KINDS
from featcal.models.sentences import modules_of

LIMIT = 5 * 10**9  # bytes per file, as transformers shards
_KINDS = {getattr(torch, name): kind for kind, name in KINDS.items()}
# files of weights and training states; an index lists shards
WEIGHTS = (
    ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5",
    ".msgpack", ".ot", ".gguf", ".onnx", ".onnx_data", ".pb", ".tflite",
)  # fmt: skip
# files that describe a folder's own model, and are written anew with every model
OWN_FILES = (
    "config.json", "open_clip_config.json", "adapter_config.json", "mergekit_config.yml",
    "merge.json", "featcal.json",
)  # fmt: skip


def require_replaceable(folder: Path) -> None:
    """Raise BadFile if a path is taken by anything but an empty folder or a folder of a model."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {""}
    model = "config.json" in names or any(name.endswith(".safetensors") for name in names)
    if folder.exists() and names and not model:
        problem = "exists and is not a model's folder; only those are replaced"
        raise BadFile(folder, problem, "name a new folder")


class ShardWriter:
    """Collect tensors in an unfinished folder, and join them to shards; see `shard_writer`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._spool = folder / ".spool"
        self._spool.mkdir()
        self._tensors: dict[str, tuple[Tensor, Path]] = {}  # on meta, with the file of the values

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor; each name once."""
        assert name not in self._tensors, f"{name} written twice"
        flat, file = tensor.detach().cpu().contiguous(), self._spool / str(len(self._tensors))
        file.write_bytes(flat.reshape(-1).view(torch.uint8).numpy().data)
        self._tensors[name] = flat.to("meta"), file

    def join(self, limit: int) -> None:
        """Write the shards, tensors by name, and their index if there are several."""
        tensors = {name: tensor for name, (tensor, _) in sorted(self._tensors.items())}
        split = split_torch_state_dict_into_shards(tensors, max_shard_size=limit)
        for file, names in split.filename_to_tensors.items():
            _write_safetensors(self.folder / file, {name: self._tensors[name] for name in names})
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self.folder / INDEX).write_text(text, "utf-8")
        shutil.rmtree(self._spool)


@contextmanager
def shard_writer(
    folder: str | Path, limit: int = LIMIT, needed: int | None = None
) -> Iterator[ShardWriter]:
    """Write a folder of shards: `with shard_writer(folder) as writer: writer.write(name, tensor)`.

    It appears complete at the end, or not at all; `writer.folder` is the unfinished one. More bytes
    than `limit` make numbered shards. Raises: BadFile, DiskFull.
    """
    require_replaceable(Path(folder))
    with atomic_folder(folder, needed) as hidden:
        writer = ShardWriter(hidden)
        yield writer
        writer.join(limit)


def _write_safetensors(path: Path, tensors: dict[str, tuple[Tensor, Path]]) -> None:
    """Write one file: length of the header, header padded to 8 bytes, bytes of every tensor."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end, files = 0, []
    # widest first keeps all aligned
    for name, (tensor, file) in sorted(tensors.items(), key=lambda t: (-t[1][0].itemsize, t[0])):
        offsets = [end, end := end + tensor.nbytes]
        entry = {"dtype": _KINDS[tensor.dtype], "shape": [*tensor.shape], "data_offsets": offsets}
        header[name] = entry
        files.append(file)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for file in files:
            with file.open("rb") as part:
                shutil.copyfileobj(part, out, 1 << 20)
            file.unlink()  # so that the disk never holds the model twice


def save_model(
    module: nn.Module, folder: str | Path, like: str | Path | None = None, limit: int = LIMIT
) -> Path:
    """Write config.json and safetensors, and copy the other files of the folder `like`.

    The folder appears complete or not at all; tensors that share memory are written once.
    """
    state = untied(module)
    needed = sum(tensor.nbytes for tensor in state.values())
    with shard_writer(folder, limit, needed) as writer:
        write_config(module.config, type(module).__name__, writer.folder)  # type: ignore[arg-type]
        copy_other_files(like, writer.folder)
        for name, tensor in state.items():
            writer.write(name, tensor)
    return Path(folder)


def untied(module: nn.Module) -> dict[str, Tensor]:
    """Return the state of a module, each tensor in memory under its first name only."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    state = {}
    for name, tensor in module.state_dict().items():
        memory = (tensor.data_ptr(), tuple(tensor.shape))
        if not tensor.numel() or memory not in seen:
            state[name] = tensor
        seen.add(memory)
    return state


def write_config(config: PretrainedConfig, architecture: str, folder: Path) -> None:
    """Write the config.json of a model class; for a CLIP vision tower the vision part."""
    part: Any = config
    if architecture == "CLIPVisionModel" and isinstance(config, CLIPConfig):
        part = config.vision_config
    config = copy.deepcopy(part)
    config.architectures = [architecture]
    for each in (config, *(getattr(config, name) for name in config.sub_configs)):
        each.dtype = None  # depends on how the model was loaded; the weights have their own
    config.save_pretrained(folder)


def copy_other_files(like: str | Path | None, folder: Path) -> None:
    """Copy all files of `like`, if given, but weights, its card and records of how it was made.

    Leaves out hidden files, links to folders, and sub-folders with weights that are no module.
    """
    if like is None:
        return
    parts = modules_of(Path(like))
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
            if not left_out and Path(path, name).is_file():
                (folder / inside).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(Path(path, name), folder / inside / name)
