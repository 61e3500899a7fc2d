"""One safetensors file: what its header says, and its tensors by plain reads.

Read, not mapped: of a map every page that was ever touched counts as memory of this process, so going through a file
tensor by tensor would end with all of it. Knows nothing of models and of other files.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from featcal.errors import BadFile, TruncatedFile

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class TensorFile:
    """Names, shapes, dtypes and tensors of one file; nothing stays open, so threads may read at once.

    Raises: TruncatedFile when made, of a file that is no safetensors or shorter than its header says.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with safe_open(path, framework="pt", device="cpu"):  # checks the header, and the file's size against it
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

    def dtype(self, name: str) -> torch.dtype:
        kind = self._entries[name]["dtype"]
        if kind not in _DTYPES:
            raise BadFile(self.path, f"{name} is stored as {kind}", f"store it as one of {', '.join(_DTYPES)}")
        return _DTYPES[kind]

    def tensor(self, name: str) -> Tensor:
        """One tensor in memory of its own, on the CPU. Raises: TruncatedFile; BadFile for a kind of number torch lacks."""
        dtype, (begin, end) = self.dtype(name), self._entries[name]["data_offsets"]
        flat = torch.empty(end - begin, dtype=torch.uint8)
        with self.path.open("rb") as file:
            file.seek(self._start + begin)
            read = file.readinto(flat.numpy().data)
        if read != end - begin:
            raise TruncatedFile(self.path, f"it ends inside {name}")
        return flat.view(dtype).reshape(self.shape(name))
