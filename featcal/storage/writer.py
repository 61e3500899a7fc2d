"""Writing a checkpoint folder from tensors that come one at a time, in any order.

Each tensor is spooled to its own file and joined at the end, so memory holds one tensor and the
bytes do not depend on the order. Knows nothing of model classes.
"""

import json
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from featcal.errors import BadFile
from featcal.storage.atomic import atomic_folder
from featcal.storage.checkpoint import INDEX, SINGLE
from featcal.storage.tensor_file import KINDS

LIMIT = 5 * 10**9  # bytes per file, as transformers shards
_KINDS = {getattr(torch, name): kind for kind, name in KINDS.items()}


@dataclass(frozen=True)
class _Spooled:
    name: str
    kind: str
    shape: tuple[int, ...]
    bytes: int
    align: int
    file: Path


def require_replaceable(folder: Path) -> None:
    """Raise BadFile where anything lies but another folder of tensors, or an empty one: what is
    written takes its place.
    """
    ours = folder.is_dir() and (
        not any(folder.iterdir())
        or any(any(folder.glob(name)) for name in ("*.safetensors", "config.json"))
    )
    if folder.exists() and not ours:
        raise BadFile(
            folder,
            "exists and is no folder of a model, which alone would be replaced",
            "name a new folder",
        )


class ShardWriter(AbstractContextManager["ShardWriter"]):
    """`with ShardWriter(folder) as writer: writer.write(name, tensor)`; the folder appears when the
    block ends, or not at all.

    limit: bytes per safetensors file; more than that makes numbered shards and an index.
    writer.folder: the unfinished folder, where config.json and the like are put.
    """

    def __init__(self, folder: str | Path, limit: int = LIMIT, needed: int | None = None):
        require_replaceable(Path(folder))
        self._limit = limit
        self._whole = atomic_folder(folder, needed)
        self._spooled: dict[str, _Spooled] = {}

    def __enter__(self) -> "ShardWriter":
        self.folder = self._whole.__enter__()
        self._spool = self.folder / ".spool"
        self._spool.mkdir()
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Keep one tensor; each name once."""
        assert name not in self._spooled, f"{name} written twice"
        flat = tensor.detach().cpu().contiguous()
        file = self._spool / str(len(self._spooled))
        raw = flat.reshape(-1).view(torch.uint8).numpy()
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
            self._whole.__exit__(type(failed), failed, failed.__traceback__)
            raise
        return self._whole.__exit__(kind, error, trace)

    def _join(self) -> None:
        shards = self._shards()
        weight_map: dict[str, str] = {}
        for i, shard in enumerate(shards, start=1):
            name = SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            _write_safetensors(self.folder / name, shard)
            weight_map |= {t.name: name for t in shard}
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(t.bytes for t in self._spooled.values())},
                "weight_map": weight_map,
            }
            (self.folder / INDEX).write_text(
                json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8"
            )
        shutil.rmtree(self._spool)

    def _shards(self) -> list[list[_Spooled]]:
        """Tensors by name, a new shard whenever the next one would pass the limit."""
        shards: list[list[_Spooled]] = [[]]
        for _, tensor in sorted(self._spooled.items()):
            if shards[-1] and sum(t.bytes for t in shards[-1]) + tensor.bytes > self._limit:
                shards.append([])
            shards[-1].append(tensor)
        return shards


def _write_safetensors(path: Path, tensors: list[_Spooled]) -> None:
    """One file in the safetensors format: length of the header, JSON header padded to 8 bytes, then
    the bytes of every tensor.
    """
    ordered = sorted(
        tensors, key=lambda t: (-t.align, t.name)
    )  # widest first keeps every tensor aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": tensor.kind,
            "shape": tensor.shape,
            "data_offsets": [end, end := end + tensor.bytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            with tensor.file.open("rb") as part:
                shutil.copyfileobj(part, out, 1 << 20)
            tensor.file.unlink()  # so that the disk never holds the model twice
