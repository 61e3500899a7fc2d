"""What a hub for tests has: data sets in every layout, unusable ones, and a model."""

from pathlib import Path

import checkpoints
import datasets
import language

from featcal.data.places import quiet_datasets

LABEL = datasets.ClassLabel(names=["cat", "dog"])
CLASSES = datasets.Features({"image": datasets.Image(), "label": LABEL})
CONFIGURATIONS = """---
configs:
- {config_name: small, default: true, data_files: [{split: train, path: "small/train-*"}]}
- {config_name: large, data_files: [{split: train, path: "large/train-*"}]}
---
"""


def parquet(file: Path, seed: int, count: int = 8, **columns) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pictures = [checkpoints.picture(seed=100 * seed + i) for i in range(count)]
    given = columns or {"image": pictures, "label": [i % 2 for i in range(count)]}
    with quiet_datasets():
        datasets.Dataset.from_dict(given, features=None if columns else CLASSES).to_parquet(file)


def digits(folder: Path) -> dict[str, Path]:
    """Two configurations on main; an older version of one, split over two files."""
    parquet(folder / "main/small/train-0.parquet", 1)
    parquet(folder / "main/large/train-0.parquet", 2)
    (folder / "main/README.md").write_text(CONFIGURATIONS)
    for part in (0, 1):
        parquet(folder / f"v1/data/train-0000{part}-of-00002.parquet", 3 + part, 4)
    parquet(folder / "v1/data/test-00000-of-00001.parquet", 5, 4)
    return {"main": folder / "main", "v1": folder / "v1"}


def unusable(folder: Path) -> dict[str, Path]:
    """Data sets that end in a message, by name."""
    parquet(folder / "labels/train.parquet", 0, label=[0, 1])
    for name in ("cut", "gated", "short"):
        parquet(folder / name / "train.parquet", 0)
    short = folder / "short/train.parquet"
    short.write_bytes(short.read_bytes()[:-50])
    (folder / "bare").mkdir()
    (folder / "bare/README.md").write_text("nothing here\n")
    return {f"datasets/bad/{path.name}": path for path in folder.iterdir()}


def everything(folder: Path) -> dict[str, Path | dict[str, Path]]:
    """All of it; and folder/here, where a folder is named like one of the data sets."""
    (folder / "texts").mkdir()
    language.jsonl(folder / "texts/train.jsonl", [{"text": text} for text in language.WORDS])
    checkpoints.pictures(folder / "photos", 0, {"train/cat": 3, "train/dog": 3})
    repositories = {
        "datasets/owner/digits": digits(folder / "digits"),
        "datasets/owner/ShortTexts": folder / "texts",
        "datasets/owner/photos": folder / "photos",
        "datasets/owner/shadowed": folder / "photos",
        **unusable(folder / "bad"),
        "tanganke/clip_dtd": checkpoints.vision_folder(folder / "expert", 1),
    }
    parquet(folder / "here/owner/shadowed/train.parquet", 9)
    return repositories
