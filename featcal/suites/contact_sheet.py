"""One picture of all tasks: a row per task, a column per class, for the tasks page."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from featcal.storage.atomic import atomic_path

COLUMNS, ZOOM, COLOURS = 12, 2, 128  # a palette keeps the file small enough for git


def write_contact_sheet(rows: list[tuple[np.ndarray, np.ndarray]], path: Path) -> None:
    """Rows of (pictures (n, h, w, 3) uint8, labels (n,)): the first picture of each class, classes repeated to fill the row."""
    picked = [np.concatenate(list(pictures[_places(labels)]), axis=1) for pictures, labels in rows]
    sheet = Image.fromarray(np.concatenate(picked, axis=0))
    large = sheet.resize((sheet.width * ZOOM, sheet.height * ZOOM), Image.Resampling.NEAREST)
    _write(large.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE), path)


def write_notice(text: str, path: Path) -> None:
    """A picture that says why there is no contact sheet."""
    notice = Image.new("RGB", (640, 60), "white")
    ImageDraw.Draw(notice).text((20, 22), text, fill="black")
    _write(notice, path)


def _places(labels: np.ndarray) -> list[int]:
    classes = sorted(set(labels.tolist()))
    seen = {label: np.flatnonzero(labels == label) for label in classes}
    wanted = [(classes[i % len(classes)], i // len(classes)) for i in range(COLUMNS)]
    return [int(seen[label][turn % len(seen[label])]) for label, turn in wanted]


def _write(picture: Image.Image, path: Path) -> None:
    with atomic_path(path) as hidden:
        picture.save(hidden, optimize=True)
