"""Read checkpoint folders of safetensors: names, shapes and dtypes from headers, tensors on demand.

Files are read, not mapped: every touched page of a map counts as memory of this process. torch is
imported for tensors only, so that headers are checked before it is loaded."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING

import numpy as np
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

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
KINDS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
# per floating-point type: an integer type of its width, and its exponent bits, which are all set
# only in NaN and infinity
_EXPONENTS = {
    "float64": ("<u8", 0x7FF << 52),
    "float32": ("<u4", 0xFF << 23),
    "float16": ("<u2", 0x1F << 10),
    "bfloat16": ("<u2", 0xFF << 7),
}
_STRIPE = 1 << 22  # bytes checked at once
_LEGACY_PREFIX = "vision_model."  # of a CLIP vision tower saved before transformers 5


@dataclass(frozen=True)
class _Entry:
    """One tensor in a safetensors file."""

    file: Path
    name: str  # in the file
    dtype: str
    shape: tuple[int, ...]
    start: int  # of its bytes in the file
    bytes: int

    def read(self, into: list[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield each array once it is filled with the next bytes. Raises: TruncatedFile."""
        with self.file.open("rb") as file:
            file.seek(self.start)
            for part in into:
                if file.readinto(part.data) != len(part):  # type: ignore[attr-defined]
                    raise TruncatedFile(self.file, f"it ends inside {self.name}")
                yield part


def _entries_of(path: Path) -> dict[str, _Entry]:
    """Read the header of a safetensors file. Raises: TruncatedFile for any other file."""
    try:
        with safe_open(path, framework="np"):  # checks the header and the size of the file
            pass
    except SafetensorError as error:
        raise TruncatedFile(path, error) from None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    entries = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        start, shape = 8 + length + begin, tuple(entry["shape"])
        entries[name] = _Entry(path, name, entry["dtype"], shape, start, end - begin)
    return entries


def no_safetensors(folder: Path, wanted: str = SINGLE, *files: str) -> BadFile:
    """Return the error of a folder without safetensors, with a way out if it holds a pickle."""
    files = files or tuple(sorted(path.name for path in folder.iterdir()))
    pickles = [name for name in files if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    way_out = f"give the folder that holds {wanted}, or its shards with their index"
    if pickles:
        way_out = (
            f"{pickles[0]} is a pickle, which can run code when opened and is not read here; where "
            "you trust it, load it and write it with save_pretrained(folder), or its state dict "
            "with safetensors.torch.save_file"
        )
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


class LazyCheckpoint:
    """The tensors of a Hugging Face folder (one file, or shards with an index), read on demand.

    Args:
        folder: the folder.
        part: "vision_model" gives that tower of a whole CLIPModel, without the prefix; a folder of
            the tower alone gives all its tensors.

    Raises:
        MissingPath, TruncatedFile, BadFile.
    """

    def __init__(self, folder: str | Path, part: str | None = None):
        self.folder = folder_path(folder)
        entries = self._stored_entries()
        prefix = f"{part}."
        inside = [name for name in entries if part is not None and name.startswith(prefix)]
        if not inside:
            prefix = _LEGACY_PREFIX if all(n.startswith(_LEGACY_PREFIX) for n in entries) else ""
        self._entries = {n.removeprefix(prefix): entries[n] for n in sorted(inside or entries)}

    @property
    def names(self) -> list[str]:
        """Return all tensor names, sorted."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._entry(name).shape

    def kind(self, name: str) -> str:
        """Return torch's name of a tensor's dtype, such as float32, without torch.

        Raises: BadFile for dtypes that torch lacks.
        """
        entry = self._entry(name)
        if entry.dtype not in KINDS:
            problem = f"{entry.name} is stored as {entry.dtype}"
            raise BadFile(entry.file, problem, f"store it as one of {', '.join(KINDS)}")
        return KINDS[entry.dtype]

    def dtype(self, name: str) -> "torch.dtype":
        """Return the dtype of a tensor."""
        import torch

        dtype: torch.dtype = getattr(torch, self.kind(name))
        return dtype

    def bytes(self, name: str) -> int:
        """Return the size of a tensor in bytes."""
        return self._entry(name).bytes

    def stored_name(self, name: str) -> str:
        """Return the name of a tensor in its file."""
        return self._entry(name).name

    def file_of(self, name: str) -> Path:
        """Return the file of a tensor. Raises: MissingTensor with the three nearest names."""
        return self._entry(name).file

    def tensor(self, name: str) -> "Tensor":
        """Return one tensor in memory of its own, on the CPU.

        Raises: MissingTensor, TruncatedFile, BadFile.
        """
        import torch

        dtype, flat = self.dtype(name), torch.empty(self.bytes(name), dtype=torch.uint8)
        next(self._entry(name).read([flat.numpy()]))
        return flat.view(dtype).reshape(self.shape(name))

    def finite_tensor(self, name: str) -> "Tensor":
        """Return one tensor. Raises: NotFinite naming file and tensor."""
        tensor = self.tensor(name)
        if not all_finite(tensor):
            raise NotFinite(self.file_of(name), name)
        return tensor

    def check_finite(self) -> None:
        """Read every tensor once, without torch. Raises: NotFinite naming up to five tensors."""
        bad = [name for name in self.names if not self._is_finite(name)]
        if bad:
            more = f" and {len(bad) - 5:,} more" if len(bad) > 5 else ""
            files = {self.file_of(name) for name in bad}
            place = self.folder if len(files) > 1 else files.pop()
            raise NotFinite(place, f"{', '.join(bad[:5])}{more}")

    def _is_finite(self, name: str) -> bool:
        kind, size = self.kind(name), self.bytes(name)
        if kind not in _EXPONENTS:
            return True
        integer, exponent = _EXPONENTS[kind]
        stripe = np.empty(min(_STRIPE, size), dtype=np.uint8)
        stripes = [stripe[: min(_STRIPE, size - start)] for start in range(0, size, _STRIPE)]
        for part in self._entry(name).read(stripes):
            bits = part.view(integer)
            if ((bits & bits.dtype.type(exponent)) == exponent).any():
                return False
        return True

    def require_floating(self) -> None:
        """Raise BadFile if a weight is stored as integers; other tensors, e.g. counters, may be."""
        for name in self.names:
            if name.endswith("weight") and "float" not in self.kind(name):
                problem = (
                    f"{name} is stored as {self.kind(name)}, but weights must be floating-point"
                )
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
        """Return the tensors of all files by stored name, after a check against the index."""
        index, single = self.folder / INDEX, self.folder / SINGLE
        if index.is_file():
            shards, entries = _weight_map(index), {}
            for shard in sorted(set(shards.values())):
                path = self.folder / shard
                if not path.is_file():
                    way_out = "copy or download the missing shard"
                    raise MissingPath(path, f"a shard named in {INDEX}", way_out)
                stored = _entries_of(path)
                for name in sorted(n for n in shards if shards[n] == shard):
                    if name not in stored:
                        raise MissingTensor(path, name, stored)
                    entries[name] = stored[name]
        elif single.is_file():
            entries = _entries_of(single)
        else:
            raise no_safetensors(self.folder)
        # older files store this counter 0, 1, 2, … although every model builds it itself
        return {n: e for n, e in entries.items() if not n.endswith("embeddings.position_ids")}


def all_finite(tensor: "Tensor") -> bool:
    """Return whether a tensor holds neither NaN nor infinity.

    Either makes the sum NaN or infinite, and a sum needs no mask in memory; only a sum that
    overflows needs a look at each value.
    """
    if not tensor.is_floating_point() or bool(tensor.sum().isfinite()):
        return True
    return bool(tensor.isfinite().all())


def check_tensor(source: str, name: str, tensor: "Tensor", weight: bool = True) -> None:
    """Raise BadData or NotFinite unless a tensor in memory can be merged and calibrated.

    source: its file or model in errors. weight: False for buffers, which may be integers.
    """
    if tensor.is_meta:
        way_out = "load the model with its weights"
        raise BadData(source, f"{name} is on meta, without values", way_out)
    if weight and not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        way_out = "give the model it was quantised from"
        raise BadData(source, f"{name} is {kind}, not floating-point", way_out)
    if not all_finite(tensor.detach()):
        raise NotFinite(source, name)


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file name of each stored name. Raises: BadFile for files outside the folder."""
    try:
        shards = dict(json.loads(index.read_text("utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        way_out = "copy or download it again"
        raise BadFile(index, f"not a safetensors index ({error!r})", way_out) from None
    for name, shard in shards.items():
        plain = isinstance(shard, str) and shard not in ("", "..")
        if not (plain and shard == PurePosixPath(shard).name == PureWindowsPath(shard).name):
            problem = f"the shard of {name}, {shard!r}, is no name of a file in this folder"
            way_out = (
                "shards must lie next to their index; get the checkpoint from a source you trust"
            )
            raise BadFile(index, problem, way_out)
    return shards
