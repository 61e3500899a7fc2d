"""One picture of all tasks for the tasks page: a row per task, each class as it is drawn and, to
the right, after the shift.
"""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from featcal.files import atomic_path

COLUMNS, ZOOM, COLOURS = 6, 2, 256  # a palette keeps the file small enough for git

GAP = 6  # pixels between the halves


def write_contact_sheet(rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]], path: Path) -> None:
    """Rows of (pictures (n, h, w, 3) uint8, the same after the shift, labels (n,)): the first
    picture of each of six classes.
    """
    sheet = Image.fromarray(np.concatenate([_row(*row) for row in rows], axis=0))
    large = sheet.resize((sheet.width * ZOOM, sheet.height * ZOOM), Image.Resampling.NEAREST)
    _write(large.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE), path)


def write_notice(text: str, path: Path) -> None:
    """A picture that says why there is no contact sheet."""
    notice = Image.new("RGB", (640, 60), "white")
    ImageDraw.Draw(notice).text((20, 22), text, fill="black")
    _write(notice, path)


def _row(drawn: np.ndarray, shifted: np.ndarray, labels: np.ndarray) -> np.ndarray:
    places = _places(labels)
    gap = np.full((drawn.shape[1], GAP, 3), 255, np.uint8)
    return np.concatenate([*drawn[places], gap, *shifted[places]], axis=1)


def _places(labels: np.ndarray) -> list[int]:
    classes = sorted(set(labels.tolist()))
    seen = {label: np.flatnonzero(labels == label) for label in classes}
    wanted = [(classes[i % len(classes)], i // len(classes)) for i in range(COLUMNS)]
    return [int(seen[label][turn % len(seen[label])]) for label, turn in wanted]


def _write(picture: Image.Image, path: Path) -> None:
    with atomic_path(path) as hidden:
        picture.save(hidden, optimize=True)
