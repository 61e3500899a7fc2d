"""Scoring test images: from decoded pictures in a file against decoding every time, and in batches
against one by one.

python -m benchmarks.evaluate                Both contestants must count the same answers as right,
or the run stops.
"""

import tempfile
from argparse import Namespace
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from transformers import CLIPImageProcessorPil

from benchmarks.measure import arguments, in_turns, machine, ratio, seeded, tower
from featcal.data.images import ImageSet, Preprocess
from featcal.data.places import quiet_datasets
from featcal.evaluation.zero_shot import evaluate_pool
from reproduction.prepare.decoded import Split, mapped_images

CLASSES = ["a", "b", "c", "d"]
SIDES = (320, 240)  # pixels of a stored photograph


def photographs(folder: Path, count: int) -> Path:
    """A data set of JPEG files, smooth as photographs are, with labels."""
    draw = np.random.default_rng(0)
    pictures = []
    for _ in range(count):
        coarse = Image.fromarray(draw.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        stored = BytesIO()
        coarse.resize(SIDES, Image.Resampling.BICUBIC).save(stored, "JPEG", quality=90)
        pictures.append({"bytes": stored.getvalue(), "path": None})
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)}
    )
    columns = {"image": pictures, "label": [i % len(CLASSES) for i in range(count)]}
    folder.mkdir(parents=True, exist_ok=True)
    with quiet_datasets():
        datasets.Dataset.from_dict(columns, features=features).to_parquet(folder / "test.parquet")
    return folder


def prepared(root: Path, args: Namespace) -> tuple[Split, Path]:
    """A split and the folder in which it is decoded once."""
    side = {"height": args.image, "width": args.image}
    preprocess = Preprocess(
        CLIPImageProcessorPil(size={"shortest_edge": args.image}, crop_size=side)
    )
    split = Split(photographs(root / "data", args.samples), "test", preprocess, whole=True)
    mapped_images(root / "decoded", split)
    return split, root / "decoded"


def checksum(images: ImageSet) -> float:
    """All pictures as a model is given them, added up."""
    return sum(float(batch["pixel_values"].sum()) for batch in images.batches(None, 32))


def score(vision: Any, images: ImageSet, batch: int) -> tuple[int, int]:
    """How many pictures are answered right, by a random head."""
    width = vision.config.hidden_size
    head, projection = (
        torch.randn(len(CLASSES), 64, generator=seeded(1)),
        torch.randn(64, width, generator=seeded(2)),
    )
    right = evaluate_pool({"": vision}, {"task": images}, {"task": head}, projection, batch)[""][
        "task"
    ]
    return int(right.sum()), len(right)


def compare(root: Path, args: Namespace) -> dict[str, list[tuple[float, float]]]:
    """Seconds (plain, ours) of each pair, by what is compared. Raises: AssertionError unless both
    count the same.
    """
    split, decoded = prepared(root, args)
    vision = tower(args.width, args.layers, args.image).to(args.device)
    contests = {
        "pictures alone, decoding every time / from the file": (
            lambda: checksum(split.load(in_memory=0)),
            lambda: checksum(mapped_images(decoded, split)),
        ),
        "scoring, decoding every time / from the file": (
            lambda: score(vision, split.load(in_memory=0), args.batch),
            lambda: score(vision, mapped_images(decoded, split), args.batch),
        ),
        "scoring from the file, one by one / in batches": (
            lambda: score(vision, mapped_images(decoded, split), 1),
            lambda: score(vision, mapped_images(decoded, split), args.batch),
        ),
    }
    pairs_by_name = {}
    for name, (plain, ours) in contests.items():
        theirs, own = plain(), ours()
        assert theirs == own, f"{name}: the results differ, {theirs} and {own}"
        pairs_by_name[name] = in_turns(plain, ours, args.repeats, args.device)
    return pairs_by_name


def main() -> None:
    args = arguments(
        __doc__, samples=64, width=768, layers=2, image=224, batch=32, repeats=3
    ).parse_args()
    torch.set_num_threads(args.threads)
    print(machine(args.device))
    print(
        f"{args.layers} blocks of {args.width} features, {args.samples} pictures of {args.image} pixels, batch {args.batch}"
    )
    with tempfile.TemporaryDirectory() as root:
        for name, pairs in compare(Path(root), args).items():
            print(f"{name}: {ratio(pairs)}; same answers")


if __name__ == "__main__":
    main()
