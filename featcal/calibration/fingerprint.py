"""What a calibration depends on, as one short text: two runs with the same one give the same bytes
on the same machine.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from featcal.calibration.models import Models
from featcal.core.weighting import TokenRule
from featcal.settings import Calibration

CODE = (
    "core",
    "blocks",
    "calibration",
    "models",
    "storage",
)  # of this package: where the numbers are made
SAMPLES, SAMPLE = 64, 4096  # pieces of a weight file that are read, bytes of each


class Digest:
    """A running hash of tensors and texts."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, *parts: object) -> None:
        """Tensors by shape, type and bytes, everything else by its text."""
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
    rule: TokenRule | None,
    drift: bool,
) -> str:
    """Of models, batches (digest by task), settings, plan, what is recorded, precision, this code
    and the versions it runs on.
    """
    digest = Digest()
    digest.add(
        settings.model_dump(), sorted(batches.items()), models.device.type, models.dtype, drift
    )
    digest.add(torch.__version__, transformers.__version__)
    for stack in models.plan.stacks:
        weigh = rule or models.plan.rule(stack)
        code = getattr(weigh, "__code__", None)
        digest.add(
            stack.name, stack.blocks, stack.mask, getattr(weigh, "__qualname__", type(weigh))
        )
        digest.add(*(code.co_code, code.co_consts, code.co_names) if code else ())
    for label, model in sorted(models.given.items()):
        digest.add(label)
        add_model(digest, model)
    root = Path(__file__).parents[1]
    for file in sorted(file for part in CODE for file in (root / part).glob("*.py")):
        digest.add(file.name, file.read_bytes())
    return str(digest)


def add_model(digest: Digest, model: nn.Module | Path) -> None:
    """Add a module by its weights, or a folder by names, sizes, dates and samples of its files,
    which may be too large to read.
    """
    if isinstance(model, nn.Module):
        for name, p in model.named_parameters():
            digest.add(name, p)
        return
    for file in sorted([model / "config.json", *model.glob("*.safetensors")]):
        state = file.stat()
        digest.add(file.name, state.st_size, state.st_mtime_ns)
        with file.open("rb") as stream:
            for start in range(0, state.st_size, max(SAMPLE, state.st_size // SAMPLES)):
                stream.seek(start)
                digest.add(stream.read(SAMPLE))
