"""Draw the splits of the twenty tasks: pictures with balanced labels, their shift, parquet files.

tasks.yaml has the tasks' names and classes. Every task has one fixed shift, as a camera or scanner
would have. It makes the zero-shot gap that experts close, and keeps the tasks' inputs apart.

Pictures with digits, letters, strokes and words are drawn here, like SVHN, MNIST, EMNIST, KMNIST
and Rendered SST2. The handwritten digits are the only real images, scikit-learn's 1,797 of 8x8
pixels. A fixed permutation deals them out, so that only web and train share digits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from PIL import Image, ImageDraw, ImageFilter

from featcal.data.images import ImageSet, Preprocess
from featcal.files import atomic_path
from reproduction.mini import scenes, things
from reproduction.mini.canvas import SIDE, SIZE, Canvas, any_colour, near

COUNTS = {"train": 1200, "validation": 300, "test": 500}  # web pictures are for pre-training
WEB = 800
GREY = 0.42  # mean of the pictures; colours are mixed around it
COLUMNS, ZOOM, COLOURS, GAP = 6, 2, 256, 6  # of a contact sheet; its palette keeps the file small
INK = (255, 255, 255)
DIGITS_OF = {
    "web": slice(0, 1000), "train": slice(0, 1000), "validation": slice(1000, 1200),
    "test": slice(1200, None),
}  # fmt: skip
POSITIVE = ("good", "great", "nice", "love")
NEGATIVE = ("bad", "poor", "dull", "hate")
# an invented script: 10 signs, 2 ways to write each, 3 Bezier strokes, 4 points (x, y)
GLYPHS = np.random.default_rng(12345).uniform(12, 52, (10, 2, 3, 4, 2))
NEUTRAL = ("film", "plot", "cast", "show", "it is", "very", "so", "a", "the", "actor")


def house_number(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a coloured digit on a coloured wall, its neighbours cut off at the border."""
    wall = any_colour(rng)
    canvas = Canvas.gradient(rng, wall, near(rng, wall, 40))
    paint = any_colour(rng)
    while abs(sum(paint) - sum(wall)) <= 220:
        paint = any_colour(rng)
    face = ("sans-bold", "serif-bold", "times-bold")[int(rng.integers(3))]
    size, x, y = int(rng.uniform(44, 54)), 32 + rng.uniform(-2, 2), 32 + rng.uniform(-2, 2)
    for side in (-1, 1):
        if rng.random() < 0.4:
            canvas.text(str(rng.integers(10)), face, size, x + 0.75 * side * size, y, paint)
    canvas.text(str(label), face, size, x, y, paint)
    return canvas.affine(6, 0.08, 1.5).finish(12, rng.uniform(0, 1.5), 0.2)


@lru_cache(maxsize=1)
def shuffled_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return all digits in one fixed random order: images (1797, 8, 8) in 0..16 and labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    return digits.images[order], digits.target[order]


def handwritten_digit(label: int, rng: np.random.Generator, split: str) -> np.ndarray:
    """Draw a real handwritten digit of the split's share, enlarged to 48 pixels."""
    images, labels = shuffled_digits()
    images, labels = images[DIGITS_OF[split]], labels[DIGITS_OF[split]]
    candidates = np.flatnonzero(labels == label)
    pixels = images[candidates[rng.integers(len(candidates))]]
    canvas = Canvas.plain(rng)
    digit = Image.fromarray((15.9 * pixels).astype(np.uint8))
    digit = digit.resize((48, 48), Image.Resampling.BICUBIC)
    canvas.image.paste(digit.convert("RGB"), (8, 8))
    return canvas.affine(12, 0.12, 4).finish(5, 0, 0.05)


def letter(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a capital letter in one of four fonts, sometimes with a broad nib."""
    face = ("sans", "sans-bold", "serif-bold", "times-bold")[int(rng.integers(4))]
    canvas = Canvas.plain(rng)
    canvas.text(chr(ord("A") + label), face, int(rng.uniform(44, 54)), 32, 32, INK)
    canvas.affine(12, 0.1, 3)
    if rng.random() < 0.4:
        canvas.replaced(canvas.image.filter(ImageFilter.MaxFilter(3)))
    return canvas.finish(7, rng.uniform(0, 1.4), 0.06)


def cursive_glyph(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw three strokes whose control points tremble, a third of the time in the second way."""
    strokes = GLYPHS[label][int(rng.random() < 0.35)] + rng.normal(0, 2.2, (3, 4, 2))
    canvas = Canvas.plain(rng)
    width = int(rng.integers(3, 6))
    t = np.linspace(0, 1, 9)[:, None]
    basis = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3)
    for stroke in strokes:
        canvas.line(sum(b * point for b, point in zip(basis, stroke, strict=True)), INK, width)
    return canvas.affine(12, 0.15, 4).finish(7, rng.uniform(0.2, 1.2), 0.06)


def review(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a neutral word above a word of praise (label 1) or blame (label 0)."""
    canvas = Canvas.plain(rng, near(rng, (245, 245, 245), 8))
    neutral = NEUTRAL[int(rng.integers(len(NEUTRAL)))]
    texts = (neutral, (POSITIVE if label else NEGATIVE)[int(rng.integers(4))])
    size = int(rng.uniform(20, 22))
    for line, text in enumerate(texts):
        x, y = SIZE / 2 + rng.uniform(-1, 1), 18 + 28 * line + rng.uniform(-1, 1)
        canvas.text(text, "sans", size, x, y, (20, 20, 20))
    return canvas.finish(5, 0, 0.05)


DrawPicture = Callable[[int, np.random.Generator], np.ndarray]
DRAW: dict[str, DrawPicture] = {
    "sun397": scenes.landscape, "stanford-cars": scenes.automobile, "resisc45": scenes.sight,
    "eurosat": scenes.land_cover, "svhn": house_number, "gtsrb": things.traffic_sign,
    "dtd": scenes.texture, "oxford_flowers102": things.flower, "pcam": scenes.tissue,
    "fer2013": things.face, "oxford-iiit-pet": things.pet, "stl10": things.thing,
    "cifar100": things.coloured_shape, "cifar10": things.cluttered_thing, "food101": things.dish,
    "fashion_mnist": things.garment, "emnist_letters": letter,
    "kmnist": cursive_glyph, "rendered-sst2": review,
}  # fmt: skip


@dataclass(frozen=True)
class MiniTask:
    """One task of the suite; tasks.yaml says what the fields are.   classes: names by label."""

    key: str
    paper_name: str
    word: str
    description: str
    classes: tuple[str, ...]
    hard: bool = False

    @property
    def templates(self) -> tuple[str, str, str]:
        """Return three sentences with one {} each for the class."""
        word = self.word
        return f"a {word} of {{}}", f"the {word} of {{}}", f"a photo of the {word} {{}}"

    def draw(self, label: int, rng: np.random.Generator, split: str) -> np.ndarray:
        """Draw one picture, (32, 32, 3) uint8."""
        if self.key == "mnist":  # real digits, which splits share out
            return handwritten_digit(label, rng, split)
        return DRAW[self.key](label, rng)


def _classes(lists: Sequence[str]) -> tuple[str, ...]:
    return tuple(" ".join(parts) for parts in product(*(text.split() for text in lists)))


ENTRIES = yaml.safe_load(Path(__file__).with_name("tasks.yaml").read_text("utf-8"))
TASKS = {k: MiniTask(k, **(e | {"classes": _classes(e["classes"])})) for k, e in ENTRIES.items()}


def draw_split(
    task: str, split: str, n: int, seed: int, strength: float, **scales: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return `n` pictures with balanced labels in random order: (n, 32, 32, 3) uint8, (n,) int64.

    Drawn from seed, task and split. The web split, on which bases are pre-trained, is not shifted.
    scales: as of `shifted`.
    """
    mini_task = TASKS[task]
    rng = np.random.default_rng([seed, crc32(task.encode()), crc32(split.encode())])
    labels = rng.permutation(np.arange(n) % len(mini_task.classes)).astype(np.int64)
    images = np.empty((n, SIDE, SIDE, 3), np.uint8)
    for index, label in enumerate(labels):
        images[index] = mini_task.draw(int(label), rng, split)
    return (images if split == "web" else shifted(images, task, strength, **scales)), labels


def drawn_set(model: Path, task: str, split: str, *arguments: Any, **scales: float) -> ImageSet:
    """Return a split as the model in a folder reads it. arguments, scales: as of `draw_split`."""
    images, labels = draw_split(task, split, *arguments, **scales)
    return ImageSet(images.transpose(0, 3, 1, 2), Preprocess.from_folder(model), labels)


def shifted(
    images: np.ndarray, task: str, strength: float, added: float = 1.0, moved: float = 1.0
) -> np.ndarray:
    """Return (n, 32, 32, 3) uint8 as the task's sensor sees them; strength 0 changes nothing.

    x <- (I + 0.3 s N) x + 0.35 s o + 0.7 s P around grey, after a turn by at most s/2 rad and a
    zoom by at most s/4, where N (3, 3), o (3) and P (3, 4, 4, enlarged) are normal and, like turn
    and zoom, fixed by the task's name.   added: a factor of what is added, o and P.   moved: one of
    the others.
    """
    if strength == 0:
        return images
    rng = np.random.default_rng([crc32(b"shift"), crc32(task.encode())])
    added, moved = added * strength, moved * strength
    turn, zoom = 0.5 * moved * rng.uniform(-1, 1), 1 + 0.25 * moved * rng.uniform(-1, 1)
    mix = torch.from_numpy(np.eye(3) + 0.3 * moved * rng.standard_normal((3, 3))).float()
    offset = torch.from_numpy(0.35 * added * rng.standard_normal((3, 1, 1))).float()
    pattern = torch.from_numpy(0.7 * added * rng.standard_normal((1, 3, 4, 4))).float()
    pattern = F.interpolate(pattern, size=images.shape[1:3], mode="bicubic", align_corners=False)[0]
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - GREY
    c, s = np.cos(turn) / zoom, np.sin(turn) / zoom
    theta = torch.tensor([[c, -s, 0.0], [s, c, 0.0]], dtype=torch.float32).expand(len(x), 2, 3)
    x = torch.einsum("ij,njhw->nihw", mix, resampled(x, theta)) + offset + pattern + GREY
    return (x.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).contiguous().numpy()


def resampled(x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    """Move pictures (n, c, h, w) by affine maps (n, 2, 3), and mirror them at their borders."""
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)


def write_parquet(
    task: str,
    folder: Path,
    seed: int,
    strength: float,
    counts: Mapping[str, int],
    scales: Mapping[str, float] | None = None,
) -> None:
    """Write each split as <folder>/<split>.parquet: image (PNG bytes) and label with names."""
    from datasets import ClassLabel, Dataset, Features
    from datasets import Image as ImageColumn

    label = ClassLabel(names=list(TASKS[task].classes))
    features = Features({"image": ImageColumn(), "label": label})
    for split, count in counts.items():
        images, labels = draw_split(task, split, count, seed, strength, **(scales or {}))
        rows = {"image": [Image.fromarray(pixels) for pixels in images], "label": labels.tolist()}
        with atomic_path(folder / f"{split}.parquet") as path:
            Dataset.from_dict(rows, features=features).to_parquet(str(path))


def write_contact_sheet(rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]], path: Path) -> None:
    """Write one image of all tasks: per row the first picture of six classes, drawn and shifted.

    rows: pictures (n, h, w, 3) uint8, the same after the shift, labels (n,).
    """
    strips = []
    for plain, moved, labels in rows:
        classes = sorted(set(labels.tolist()))
        indices_of = {label: np.flatnonzero(labels == label) for label in classes}
        cells = [(classes[i % len(classes)], i // len(classes)) for i in range(COLUMNS)]
        indices = [int(indices_of[label][turn % len(indices_of[label])]) for label, turn in cells]
        gap = np.full((plain.shape[1], GAP, 3), 255, np.uint8)
        strips.append(np.concatenate([*plain[indices], gap, *moved[indices]], axis=1))
    sheet = Image.fromarray(np.concatenate(strips, axis=0))
    large = sheet.resize((sheet.width * ZOOM, sheet.height * ZOOM), Image.Resampling.NEAREST)
    options = {"method": Image.Quantize.MEDIANCUT, "dither": Image.Dither.NONE}
    _write(large.quantize(COLOURS, **options), path)


def write_notice(text: str, path: Path) -> None:
    """Write an image that says why there is no contact sheet."""
    notice = Image.new("RGB", (640, 60), "white")
    ImageDraw.Draw(notice).text((20, 22), text, fill="black")
    _write(notice, path)


def _write(picture: Image.Image, path: Path) -> None:
    with atomic_path(path) as hidden:
        picture.save(hidden, optimize=True)
