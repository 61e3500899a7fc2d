"""Reading a checkpoint folder tensor by tensor, under one set of names.

Names are those of transformers 5: a published CLIPVisionModel carries the prefix `vision_model.`, which is stripped; of a whole
CLIPModel one tower can be asked for. Knows nothing of model classes.
"""

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from featcal.errors import BadFile, MissingPath, MissingTensor, NoSafetensors, NotFinite, NotFloating, TruncatedFile

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LEGACY_PREFIX = "vision_model."
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class LazyCheckpoint:
    """Tensors of a Hugging Face folder (one safetensors file or shards with an index), read when asked for.

    part: "vision_model" of a whole CLIPModel gives that tower's tensors without the prefix; a folder that holds only the tower
          gives all it has.
    Raises: MissingPath, NoSafetensors, TruncatedFile, BadFile when opened.
    """

    def __init__(self, folder: str | Path, part: str | None = None):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise MissingPath(folder, "a checkpoint folder", "check the path; hub names must be fetched first")
        self._open: dict[Path, Any] = {}
        files = self._files()
        inside = {} if part is None else {n: f for n, f in files.items() if n.startswith(f"{part}.")}
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
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        kind = self._slice(name).get_dtype()
        if kind not in _DTYPES:
            raise BadFile(self.file_of(name), f"{name} is stored as {kind}", f"store it as one of {', '.join(_DTYPES)}")
        return _DTYPES[kind]

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor. Raises: MissingTensor with the three nearest names."""
        if name not in self._file:
            raise MissingTensor(self.folder, name, get_close_matches(name, self.names, n=3, cutoff=0.0))
        return self._file[name]

    def tensor(self, name: str) -> Tensor:
        """One tensor, on the CPU. Raises: MissingTensor, TruncatedFile."""
        path = self.file_of(name)
        try:
            tensor: Tensor = self._handle(path).get_tensor(self._stored[name])
        except SafetensorError as error:
            raise TruncatedFile(path, error) from None
        return tensor

    def finite_tensor(self, name: str) -> Tensor:
        """One tensor. Raises: NotFinite naming file and tensor."""
        tensor = self.tensor(name)
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise NotFinite(self.file_of(name), name)
        return tensor

    def require_floating(self) -> None:
        """Raise NotFloating where a weight is stored as whole numbers; other tensors, such as counters, may be."""
        for name in self.names:
            if name.endswith("weight") and not self.dtype(name).is_floating_point:
                raise NotFloating(self.file_of(name), name, self.dtype(name))

    def _files(self) -> dict[str, Path]:
        """Stored name -> file."""
        index, single = self.folder / INDEX, self.folder / SINGLE
        if index.is_file():
            files = {n: self.folder / _beside(index, n, shard) for n, shard in _weight_map(index).items()}
            for path in sorted(set(files.values())):
                if not path.is_file():
                    raise MissingPath(path, f"a shard named in {INDEX}", "copy or download the missing shard")
                lost = [n for n, f in files.items() if f == path and n not in self._handle(path).keys()]
                if lost:
                    raise MissingTensor(path, lost[0], get_close_matches(lost[0], self._handle(path).keys(), n=3, cutoff=0.0))
        elif single.is_file():
            files = dict.fromkeys(self._handle(single).keys(), single)
        else:
            raise NoSafetensors(self.folder, sorted(p.name for p in self.folder.iterdir()))
        # older files store this counter 0, 1, 2, … although every model builds it itself
        return {n: f for n, f in files.items() if not n.endswith("embeddings.position_ids")}

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt", device="cpu")
            except SafetensorError as error:
                raise TruncatedFile(path, error) from None
        return self._open[path]

    def _slice(self, name: str) -> Any:
        return self._handle(self.file_of(name)).get_slice(self._stored[name])


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return dict(json.loads(index.read_text("utf-8"))["weight_map"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise BadFile(index, f"not a safetensors index ({error!r})", "copy or download it again") from None


def _beside(index: Path, name: str, shard: object) -> str:
    """The name of a shard, which lies in the index's own folder: a path could lead anywhere. Raises: BadFile."""
    if not isinstance(shard, str) or Path(shard).name != shard:
        raise BadFile(index, f"{name} is said to lie in {shard!r}", "shards lie beside the index and are named without a folder")
    return shard
