"""Draw the rows of reproduction/real_images from larger sets: python scripts/sample_real_images.py FOLDER

FOLDER has one folder per set with train.parquet, test.parquet (columns image and label, the names of
the labels in the column or in labels.json), README.md and perhaps a licence. Training, validation and
stream rows are drawn from train.parquet, scored rows from test.parquet, by a seed; pictures are cropped
to their middle square and made SIDE pixels wide.
"""

import io
import json
import shutil
import sys
from pathlib import Path
from zlib import crc32

import datasets
import numpy as np
from PIL import Image

ROWS = {"train": 400, "validation": 80, "stream": 256, "test": 200}
SIDE, QUALITY = 70, 80
OUT = Path(__file__).parents[1] / "reproduction" / "real_images"


def main(folder: Path) -> None:
    """Write <set>/<split>.parquet for every set of the folder, with its own README and licence."""
    for source in sorted(path for path in folder.iterdir() if path.is_dir()):
        out = OUT / source.name
        out.mkdir(parents=True, exist_ok=True)
        for text in (*source.glob("*.md"), *source.glob("LICENSE*")):
            shutil.copyfile(text, out / text.name)
        start = {"train": 0, "test": 0}
        for split, count in ROWS.items():
            origin = "test" if split == "test" else "train"
            table = datasets.Dataset.from_parquet(str(source / f"{origin}.parquet"))
            names = names_of(source, table)
            order = np.random.default_rng([0, crc32(source.name.encode())]).permutation(len(table))
            rows = sorted(order[start[origin] : start[origin] + count].tolist())
            start[origin] += count
            write([table[row] for row in rows], names, out / f"{split}.parquet")


def names_of(source: Path, table: datasets.Dataset) -> list[str]:
    """Return the names of a set's labels."""
    feature = table.features["label"]
    if isinstance(feature, datasets.ClassLabel):
        return list(feature.names)
    return json.loads((source / "labels.json").read_text("utf-8"))


def write(rows: list[dict], names: list[str], path: Path) -> None:
    """Write pictures with labels as one split."""
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    )
    encoded = {"image": [{"bytes": square(row["image"])} for row in rows]}
    encoded["label"] = [row["label"] for row in rows]
    datasets.Dataset.from_dict(encoded, features).to_parquet(str(path))


def square(picture: Image.Image) -> bytes:
    """Return the middle square as WebP, SIDE pixels wide."""
    side, (width, height) = min(picture.size), picture.size
    left, top = (width - side) // 2, (height - side) // 2
    cut = picture.convert("RGB").crop((left, top, left + side, top + side))
    out = io.BytesIO()
    cut.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(out, "WEBP", quality=QUALITY)
    return out.getvalue()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
