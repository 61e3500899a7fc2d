"""Pictures of samples, clean and damaged."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from featcal.data.batches import draw_indices
from reproduction.engine.context import Setup
from reproduction.engine.samples import damaged, load_split
from reproduction.results import Row

LARGEST = 96  # pixels of an example: enough to see the damage, small enough for git


def examples(
    setup: Setup, damages: Sequence[str], count: int, seed: int
) -> tuple[list[Any], list[Row]]:
    """Return pictures of every second task's first sample, clean and damaged, and a row for each.

    count, seed: of the draw whose first sample it is.
    """
    pictures, legend = [], list[Row]()
    for row, task in enumerate(setup.tasks[1::2]):
        samples = load_split(setup, task, "train")
        first = draw_indices(task, len(samples.labels), count, seed)[:1]
        versions = {"clean": samples}
        versions |= {name: damaged(task, samples, name, seed) for name in damages}
        pictures.append([version.pixels[first][0] for version in versions.values()])
        keys = {"task": task, "index": int(first[0]), "row": row}
        legend += [{**keys, "corruption": n, "column": c} for c, n in enumerate(versions)]
    return pictures, legend


def write_sheet(pictures: Sequence[Any], path: Path) -> None:
    """Write pictures (3, H, W) as one PNG without gaps; one white pixel for none."""
    if not pictures:
        Image.new("RGB", (1, 1), "white").save(path)
        return
    sheet = np.ascontiguousarray(np.block(pictures).transpose(1, 2, 0))
    image, side = Image.fromarray(sheet), pictures[0][0].shape[1]
    if side > LARGEST:
        size = (image.width * LARGEST // side, image.height * LARGEST // side)
        image = image.resize(size, Image.Resampling.BOX)
    image.save(path, optimize=True)
