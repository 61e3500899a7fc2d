"""One safetensors file: what its header says, and its tensors by plain reads.

Read, not mapped: of a map every page that was ever touched counts as memory of this process, so
going through a file tensor by tensor would end with all of it. torch is loaded for tensors alone:
what a file holds, and whether its values are numbers, is told before torch would be there. Knows
nothing of models and of other files."""

import json
from math import prod
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

KINDS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
# of a floating point number: whole numbers of its width, and the bits of its exponent, all set in
# NaN and infinity alone
_EXPONENTS = {
    "F64": ("<u8", 0x7FF << 52),
    "F32": ("<u4", 0xFF << 23),
    "F16": ("<u2", 0x1F << 10),
    "BF16": ("<u2", 0xFF << 7),
}
_STRIPE = 1 << 22  # bytes looked at together


class TensorFile:
    """Names, shapes, dtypes and tensors of one file; nothing stays open, so threads may read at
    once.

    Raises: TruncatedFile when made, of a file that is no safetensors or shorter than its header
    says.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with safe_open(
                path, framework="np"
            ):  # checks the header, and the file's size against it
                pass
        except SafetensorError as error:
            raise TruncatedFile(path, error) from None
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self._entries = json.loads(file.read(length))
        self._entries.pop("__metadata__", None)
        self._start = 8 + length

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name]["shape"])

    def kind(self, name: str) -> str:
        """What torch calls the numbers of a tensor, such as float32. Raises: BadFile for numbers
        that torch lacks.
        """
        kind = self._entries[name]["dtype"]
        if kind not in KINDS:
            raise BadFile(
                self.path, f"{name} is stored as {kind}", f"store it as one of {', '.join(KINDS)}"
            )
        return KINDS[kind]

    def dtype(self, name: str) -> "torch.dtype":
        import torch

        kind: torch.dtype = getattr(torch, self.kind(name))
        return kind

    def is_finite(self, name: str) -> bool:
        """Whether a tensor holds neither NaN nor infinity, seen in the file's bytes. Raises: as
        `tensor`.
        """
        self.kind(name)
        if self._entries[name]["dtype"] not in _EXPONENTS:
            return True
        number, exponent = _EXPONENTS[self._entries[name]["dtype"]]
        left = self._bytes(name)
        stripe = np.empty(min(_STRIPE, left), dtype=np.uint8)
        with self.path.open("rb") as file:
            file.seek(self._start + self._entries[name]["data_offsets"][0])
            while left:
                part = stripe[: min(_STRIPE, left)]
                if file.readinto(part.data) != len(part):
                    raise TruncatedFile(self.path, f"it ends inside {name}")
                bits = part.view(number)
                if ((bits & bits.dtype.type(exponent)) == exponent).any():
                    return False
                left -= len(part)
        return True

    def tensor(self, name: str) -> "Tensor":
        """One tensor in memory of its own, on the CPU. Raises: TruncatedFile; BadFile for a kind of
        number torch lacks.
        """
        import torch

        dtype, length = self.dtype(name), self._bytes(name)
        flat = torch.empty(length, dtype=torch.uint8)
        with self.path.open("rb") as file:
            file.seek(self._start + self._entries[name]["data_offsets"][0])
            read = file.readinto(flat.numpy().data)
        if read != length:
            raise TruncatedFile(self.path, f"it ends inside {name}")
        return flat.view(dtype).reshape(self.shape(name))

    def _bytes(self, name: str) -> int:
        begin, end = self._entries[name]["data_offsets"]
        return int(end - begin)


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LEGACY_PREFIX = "vision_model."


def no_safetensors(folder: Path, wanted: str = SINGLE, *found: str) -> BadFile:
    """The error of a folder without weights that can be read; where it holds a pickle, how to get
    rid of it.
    """
    there = found or sorted(path.name for path in folder.iterdir())
    pickled = next(
        (name for name in there if name.endswith((".bin", ".pt", ".pth", ".ckpt"))), None
    )
    way_out = (
        f"{pickled} is a pickle, which can run code when opened and is not read here; load it where you trust it and "
        "write it with save_pretrained(folder), or its state dict with safetensors.torch.save_file"
        if pickled
        else f"give the folder that holds {wanted}, or shards with their index where transformers wrote it"
    )
    return BadFile(
        folder, f"no {wanted} in this folder (found: {', '.join(there[:8]) or 'nothing'})", way_out
    )


def folder_path(folder: object) -> Path:
    """The path of a model's folder. Raises: BadSetting for what is neither text nor a path;
    MissingPath.
    """
    if not isinstance(folder, str | PathLike):
        raise BadSetting("model", type(folder).__name__, "must be a module or the path of a folder")
    if not Path(folder).is_dir():
        raise MissingPath(
            folder, "a checkpoint folder", "check the path; hub names must be fetched first"
        )
    return Path(folder)


class LazyCheckpoint:
    """Tensors of a Hugging Face folder (one safetensors file or shards with an index), read when
    asked for.

    part: "vision_model" of a whole CLIPModel gives that tower's tensors without the prefix; a
    folder that holds only the tower
          gives all it has.
    Raises: MissingPath, TruncatedFile, BadFile when opened.
    """

    def __init__(self, folder: str | Path, part: str | None = None):
        self.folder = folder_path(folder)
        self._open: dict[Path, TensorFile] = {}
        files = self._files()
        inside = (
            {} if part is None else {n: f for n, f in files.items() if n.startswith(f"{part}.")}
        )
        prefix = f"{part}." if inside else ""
        if not inside and all(n.startswith(_LEGACY_PREFIX) for n in files):
            prefix = _LEGACY_PREFIX
        self._stored = {n.removeprefix(prefix): n for n in sorted(inside or files)}
        self._file = {n: files[stored] for n, stored in self._stored.items()}

    @property
    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._open_file(self.file_of(name)).shape(self._stored[name])

    def kind(self, name: str) -> str:
        """What torch calls a tensor's numbers, such as float32, told without torch."""
        return self._open_file(self.file_of(name)).kind(self._stored[name])

    def dtype(self, name: str) -> "torch.dtype":
        return self._open_file(self.file_of(name)).dtype(self._stored[name])

    def bytes(self, name: str) -> int:
        return prod(self.shape(name)) * self.dtype(name).itemsize

    def stored_name(self, name: str) -> str:
        """What the file itself calls a tensor."""
        self.file_of(name)
        return self._stored[name]

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor. Raises: MissingTensor with the three nearest names."""
        if name not in self._file:
            raise MissingTensor(self.folder, name, self.names)
        return self._file[name]

    def tensor(self, name: str) -> "Tensor":
        """One tensor in memory of its own, on the CPU. Raises: MissingTensor, TruncatedFile,
        BadFile.
        """
        return self._open_file(self.file_of(name)).tensor(self._stored[name])

    def check_finite(self) -> None:
        """Reads every tensor's bytes once, without torch. Raises: NotFinite naming the tensors, of
        many the first five.
        """
        bad = [
            name
            for name in self.names
            if not self._open_file(self.file_of(name)).is_finite(self._stored[name])
        ]
        if bad:
            more = f" and {len(bad) - 5:,} more" if len(bad) > 5 else ""
            files = {self.file_of(name) for name in bad}
            raise NotFinite(
                self.folder if len(files) > 1 else files.pop(), f"{', '.join(bad[:5])}{more}"
            )

    def finite_tensor(self, name: str) -> "Tensor":
        """One tensor. Raises: NotFinite naming file and tensor."""
        tensor = self.tensor(name)
        if not all_finite(tensor):
            raise NotFinite(self.file_of(name), name)
        return tensor

    def require_floating(self) -> None:
        """Raise BadFile where a weight is stored as whole numbers; other tensors, such as counters,
        may be.
        """
        for name in self.names:
            if name.endswith("weight") and "float" not in self.kind(name):
                problem = f"{name} is stored as {self.kind(name)}, but weights must be floating-point numbers"
                way_out = "give the checkpoint a quantised one was made from, or write its values as float32, float16 or bfloat16"
                raise BadFile(self.file_of(name), problem, way_out)

    def _files(self) -> dict[str, Path]:
        """Stored name -> file."""
        index, single = self.folder / INDEX, self.folder / SINGLE
        if index.is_file():
            files = {n: self.folder / shard for n, shard in _weight_map(index).items()}
            for path in sorted(set(files.values())):
                if not path.is_file():
                    raise MissingPath(
                        path, f"a shard named in {INDEX}", "copy or download the missing shard"
                    )
                there = self._open_file(path).names
                lost = sorted(
                    n for n in {n for n, f in files.items() if f == path}.difference(there)
                )
                if lost:
                    raise MissingTensor(path, lost[0], there)
        elif single.is_file():
            files = dict.fromkeys(self._open_file(single).names, single)
        else:
            raise no_safetensors(self.folder)
        # older files store this counter 0, 1, 2, … although every model builds it itself
        return {n: f for n, f in files.items() if not n.endswith("embeddings.position_ids")}

    def _open_file(self, path: Path) -> TensorFile:
        if path not in self._open:
            self._open[path] = TensorFile(path)
        return self._open[path]


def all_finite(tensor: "Tensor") -> bool:
    """Whether a tensor holds neither NaN nor infinity.

    Either makes the sum NaN or infinite too, and a sum is one pass without a mask in memory; only
    where the sum alone is too large for its precision each value is looked at.
    """
    if not tensor.is_floating_point() or bool(tensor.sum().isfinite()):
        return True
    return bool(tensor.isfinite().all())


def require_numbers(place: str, name: str, tensor: "Tensor", weight: bool = True) -> None:
    """Of a tensor in memory: numbers that can be merged and calibrated. Buffers, which are no
    weights, may be whole numbers.

    Raises: BadData for one on meta or of whole numbers; NotFinite.
    """
    if tensor.is_meta:
        raise BadData(
            place, f"{name} has no numbers, it is on meta", "load the model with its weights"
        )
    if weight and not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise BadData(
            place,
            f"{name} holds {kind}, not floating-point numbers",
            "give the model it was quantised from",
        )
    if not all_finite(tensor.detach()):
        raise NotFinite(place, name)


def _weight_map(index: Path) -> dict[str, str]:
    """Stored name -> file name, of files that lie in the folder itself (as a link into a cache,
    too). Raises: BadFile.
    """
    try:
        shards = dict(json.loads(index.read_text("utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadFile(
            index, f"not a safetensors index ({error!r})", "copy or download it again"
        ) from None
    for name, shard in shards.items():
        beside = (
            isinstance(shard, str)
            and shard == PurePosixPath(shard).name == PureWindowsPath(shard).name
        )
        if not beside or shard in ("", ".."):
            problem = (
                f"{name} is said to lie in {shard!r}, which is no name of a file in this folder"
            )
            raise BadFile(
                index,
                problem,
                "shards lie beside their index; take the checkpoint from a source you trust",
            )
    return shards
