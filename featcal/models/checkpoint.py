"""Read checkpoint folders of safetensors: names, shapes and dtypes at once, tensors on demand.

Tensors are read, not mapped: every touched page of a map would count as memory of this process.
torch is imported only where tensors are read, so that headers can be checked first.
"""

import re
from math import prod
from os import PathLike
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from featcal.errors import (
    BadData,
    BadFile,
    BadSetting,
    MissingPath,
    MissingTensor,
    NotFinite,
    TruncatedFile,
)
from featcal.files import read_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

VARIANT = re.compile(r"model\.[^.]+\.safetensors")  # such as model.fp16.safetensors
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MODULES = "modules.json"  # of a SentenceTransformer: its modules, each in a sub-folder
ADAPTER = "adapter_config.json"
KINDS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


class _Entry(NamedTuple):
    """One tensor in a safetensors file."""

    file: Path
    name: str  # in the file
    kind: str  # of safetensors, such as F32
    shape: tuple[int, ...]


def no_safetensors(folder: Path, wanted: str = SINGLE) -> BadFile:
    """Return the error of a folder without safetensors, with a way out if it holds a pickle."""
    files = sorted(path.name for path in folder.iterdir())
    way_out = f"give the folder that holds {wanted}, or its shards with their index"
    for name in files:
        if name.endswith((".bin", ".pt", ".pth", ".ckpt")):
            way_out = (
                f"{name} is a pickle, which can run code when opened and is not read here; where "
                "you trust it, load it and write it with save_pretrained(folder), or its state "
                "dict with safetensors.torch.save_file"
            )
            break
    if variants := [name for name in files if VARIANT.fullmatch(name)]:
        way_out = f"to use the variant {variants[0]}, copy it to {SINGLE}"
    content = ", ".join(files[:8]) or "nothing"
    return BadFile(folder, f"no {wanted} in this folder (found: {content})", way_out)


def folder_path(folder: object) -> Path:
    """Return the path of a model's folder. Raises: BadSetting for other types; MissingPath."""
    if not isinstance(folder, str | PathLike):
        raise BadSetting("model", type(folder).__name__, "must be a module or the path of a folder")
    if not Path(folder).is_dir():
        way_out = "check the path; hub names must be fetched first"
        raise MissingPath(folder, "a checkpoint folder", way_out)
    return Path(folder)


def is_adapter(model: object) -> bool:
    """Return whether a model is given as a folder of an adapter, without weights of a model; some
    tools put the base's config.json there.
    """
    if not isinstance(model, str | Path):
        return False
    return (Path(model) / ADAPTER).is_file() and not any(Path(model).glob("model*.safetensors"))


def refuse_adapter(folder: str | Path) -> None:
    """Raise BadFile for a folder with an adapter only."""
    if is_adapter(folder):
        raise BadFile(
            folder,
            "a LoRA adapter, not a model",
            "merge, calibrate and compare accept it as an expert",
            "to make a model of it: featcal merge average --base BASE --out MODEL "
            f"--expert NAME={folder}",
        )


class LazyCheckpoint:
    """The tensors of a Hugging Face folder (one file, or shards with an index), read on demand.

    part: "vision_model" selects that tower of a whole CLIPModel, without the prefix, which towers
    saved before transformers 5 have too. Raises: MissingPath, TruncatedFile, BadFile.
    """

    def __init__(self, folder: str | Path, part: str | None = None):
        self.folder = folder_path(folder)
        entries, prefix = self._stored_entries(), f"{part}."
        inside = [name for name in entries if part and name.startswith(prefix)] or entries
        self._entries = {n.removeprefix(prefix): entries[n] for n in sorted(inside)}
        self._opened: tuple[Path | None, Any] = (None, None)  # the file that was read last

    @property
    def names(self) -> list[str]:
        """Return all tensor names, sorted."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._entry(name).shape

    def kind(self, name: str) -> str:
        """Return torch's name of a tensor's dtype, such as float32. Raises: BadFile for others."""
        entry = self._entry(name)
        if entry.kind not in KINDS:
            problem = f"{entry.name} is stored as {entry.kind}"
            raise BadFile(entry.file, problem, f"store it as one of {', '.join(KINDS)}")
        return KINDS[entry.kind]

    def dtype(self, name: str) -> "torch.dtype":
        """Return the dtype of a tensor."""
        import torch

        return getattr(torch, self.kind(name))  # type: ignore[no-any-return]

    def bytes(self, name: str) -> int:
        """Return the size of a tensor in bytes."""
        return prod(self.shape(name)) * self.dtype(name).itemsize

    def stored_name(self, name: str) -> str:
        """Return the name of a tensor in its file; names of no tensor are returned as they are."""
        return self._entries[name].name if name in self._entries else name

    def file_of(self, name: str) -> Path:
        """Return the file of a tensor. Raises: MissingTensor with the three nearest names."""
        return self._entry(name).file

    def tensor(self, name: str) -> "Tensor":
        """Return one tensor on the CPU. Raises: MissingTensor, TruncatedFile, BadFile."""
        self.kind(name)
        entry, (path, opened) = self._entry(name), self._opened
        try:
            if path != entry.file:
                opened = safe_open(entry.file, framework="pt", backend="pread")
                self._opened = (entry.file, opened)
            return opened.get_tensor(entry.name)  # type: ignore[no-any-return]
        except SafetensorError as error:
            raise TruncatedFile(entry.file, error) from None

    def finite_tensor(self, name: str) -> "Tensor":
        """Return one tensor. Raises: NotFinite naming file and tensor."""
        check_tensor(self.file_of(name), name, tensor := self.tensor(name), weight=False)
        return tensor

    def check_finite(self) -> None:
        """Read every tensor once. Raises: NotFinite naming up to five tensors."""
        bad = [name for name in self.names if not all_finite(self.tensor(name))]
        if bad:
            more = f" and {len(bad) - 5:,} more" if len(bad) > 5 else ""
            raise NotFinite(self.file_of(bad[0]), f"{', '.join(bad[:5])}{more}")

    def require_floating(self) -> None:
        """Raise BadFile if a weight is stored as integers; other tensors, e.g. counters, may be."""
        for name in self.names:
            if name.endswith("weight") and "float" not in self.kind(name):
                problem = f"{name} is stored as {self.kind(name)}, not floating-point"
                way_out = (
                    "give the checkpoint that the quantised one was made from, or write its values "
                    "as float32, float16 or bfloat16"
                )
                raise BadFile(self.file_of(name), problem, way_out)

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise MissingTensor(self.folder, name, self.names)
        return self._entries[name]

    def _stored_entries(self) -> dict[str, _Entry]:
        """Return the tensors by stored name, of the files that transformers would read."""
        config = self.folder / "config.json"
        named = read_json(config) if config.is_file() else {}
        chosen = named.get("transformers_weights") if isinstance(named, dict) else None
        present = (name for name in (SINGLE, INDEX) if (self.folder / name).is_file())
        file = chosen or next(present, None)  # an index beside a single file is an older model's
        if file is None:
            raise no_safetensors(self.folder)
        path, entries = _inside(self.folder, file, config), dict[str, _Entry]()
        shards: dict[str, list[str]] = {}
        if path.name.endswith(".index.json"):
            try:
                for name, shard in sorted(dict(read_json(path)["weight_map"]).items()):
                    shards.setdefault(shard, []).append(name)
            except (ValueError, KeyError, TypeError) as error:
                problem = f"not a safetensors index ({error!r})"
                raise BadFile(path, problem, "copy or download it again") from None
        for shard in shards or [path.name]:
            file = _inside(self.folder, shard, path)
            try:
                with safe_open(file, framework="np") as opened:
                    for name in opened.keys():  # noqa: SIM118
                        part = opened.get_slice(name)
                        entries[name] = _Entry(file, name, part.get_dtype(), (*part.get_shape(),))
            except SafetensorError as error:
                raise TruncatedFile(file, error) from None
        for shard, names in shards.items():
            if lost := next((name for name in names if name not in entries), None):
                raise MissingTensor(self.folder / shard, lost, entries)
        # older files store this counter 0, 1, 2, … although every model builds it itself
        return {n: e for n, e in entries.items() if not n.endswith("embeddings.position_ids")}


def _inside(folder: Path, name: object, source: Path) -> Path:
    """Return a file of the folder that `source` names. Raises: BadFile for a path; MissingPath."""
    plain = isinstance(name, str) and name not in ("", "..")
    if not (plain and name == PurePosixPath(name).name == PureWindowsPath(name).name):
        problem = f"names {name!r}, which is no name of a file in this folder"
        raise BadFile(source, problem, "get the checkpoint from a source you trust")
    if not (folder / name).is_file():
        way_out = "copy or download it"
        raise MissingPath(folder / name, f"a file of weights named in {source.name}", way_out)
    return folder / name


def all_finite(tensor: "Tensor") -> bool:
    """Return whether a tensor holds neither NaN nor infinity."""
    if not tensor.is_floating_point() or bool(tensor.sum().isfinite()):
        return True  # a sum needs no mask in memory
    return bool(tensor.isfinite().all())


def check_tensor(source: object, name: str, tensor: "Tensor", weight: bool = True) -> None:
    """Raise BadData or NotFinite unless a tensor can be merged and calibrated.

    source: its file or model in errors. weight: False for buffers, which may be integers.
    """
    if tensor.is_meta:
        problem, way_out = f"{name} is on meta, without values", "load the model with its weights"
        raise BadData(source, problem, way_out)
    if weight and not tensor.is_floating_point():
        problem = f"{name} is {str(tensor.dtype).removeprefix('torch.')}, not floating-point"
        raise BadData(source, problem, "give the model it was quantised from")
    if not all_finite(tensor.detach()):
        raise NotFinite(source, name)
