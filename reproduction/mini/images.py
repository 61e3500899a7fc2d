"""Splits of a task: balanced labels, pictures drawn for them, the shift, and parquet files of the
result.
"""

import io
from collections.abc import Mapping
from pathlib import Path
from zlib import crc32

import numpy as np
from PIL import Image

from featcal.errors import BadSetting
from featcal.files import atomic_path
from reproduction.mini.canvas import SIDE
from reproduction.mini.shift import shifted
from reproduction.mini.tasks import TASKS

COUNTS = {
    "train": 1200,
    "validation": 300,
    "test": 500,
}  # the splits a task has; web pictures belong to pre-training
WEB = 800


def draw_split(
    task: str, split: str, n: int, seed: int, strength: float
) -> tuple[np.ndarray, np.ndarray]:
    """`n` pictures of a split with balanced labels in random order: (n, 32, 32, 3) uint8 and (n,)
    int64.

    The generator is keyed by seed, task and split, so no split depends on another. The web split,
    on which the bases are pre-trained, is never shifted.
    """
    if split not in ("web", *COUNTS):
        raise BadSetting("split", split, "must be web, train, validation or test")
    chosen = TASKS[task]
    rng = np.random.default_rng([seed, crc32(task.encode()), crc32(split.encode())])
    labels = rng.permutation(np.arange(n) % len(chosen.classes)).astype(np.int64)
    images = np.empty((n, SIDE, SIDE, 3), np.uint8)
    for place, label in enumerate(labels):
        images[place] = chosen.draw(int(label), rng, split)
    return (images if split == "web" else shifted(images, task, strength)), labels


def write_parquet(
    task: str, folder: Path, seed: int, strength: float, counts: Mapping[str, int] = COUNTS
) -> None:
    """The task's train, validation and test split as <folder>/<split>.parquet: image (PNG bytes)
    and label with names.
    """
    from datasets import ClassLabel, Dataset, Features
    from datasets import Image as ImageColumn

    features = Features(
        {"image": ImageColumn(), "label": ClassLabel(names=list(TASKS[task].classes))}
    )
    for split, count in counts.items():
        images, labels = draw_split(task, split, count, seed, strength)
        rows = {
            "image": [{"bytes": _png(image), "path": None} for image in images],
            "label": labels.tolist(),
        }
        with atomic_path(Path(folder) / f"{split}.parquet") as path:
            Dataset.from_dict(rows, features=features).to_parquet(str(path))


def _png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return buffer.getvalue()
