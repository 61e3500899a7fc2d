"""One safetensors file: what its header says, and its tensors by plain reads.

Read, not mapped: of a map every page that was ever touched counts as memory of this process, so
going through a file tensor by tensor would end with all of it. torch is loaded for tensors alone:
what a file holds, and whether its values are numbers, is told before torch would be there. Knows
nothing of models and of other files.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError, safe_open

from featcal.errors import BadFile, TruncatedFile

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
