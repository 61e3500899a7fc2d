"""A LoRA expert as a model folder of its own: the base's tensors with the adapter added, one tensor
in memory at a time.
"""

import os
from pathlib import Path

from transformers import AutoConfig

from featcal.merging.adapters import CONFIG, WEIGHTS, AdapterSource
from featcal.merging.merge import Target, size_of, write_merged
from featcal.merging.sources import source
from featcal.models.load import model_class


def dense_folder(base: Path, adapter: Path, out: Path) -> Path:
    """Write base plus adapter to `out`; its files bear the date of the newest they are made of,
    which tells copies apart.

    Raises: what AdapterSource and opening the base raise, before a folder is made; NotFinite,
    DiskFull.
    """
    origin = source(base, "base")
    expert = AdapterSource(adapter, origin)
    config = AutoConfig.from_pretrained(base, local_files_only=True)
    target = Target(config, model_class(base).__name__, base, size_of(origin))
    write_merged(((name, expert.finite_tensor(name)) for name in expert.names), out, target, {})
    read = [adapter / CONFIG, adapter / WEIGHTS, base / "config.json", *base.glob("*.safetensors")]
    newest = max(file.stat().st_mtime_ns for file in read)
    for file in out.iterdir():
        os.utime(file, ns=(newest, newest))
    return out


def check_adapter(base: Path, adapter: Path) -> None:
    """Whether an adapter fits its base, told from the files' heads. Raises: as dense_folder."""
    AdapterSource(adapter, source(base, "base"))
