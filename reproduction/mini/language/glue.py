"""Draw the splits of eight tasks in GLUE's columns: rows, prompted samples, parquet files.

The check sum of its texts says which split a row may belong to, so that no text is in two splits.
Every row has a generator of its own, so that a larger split begins with the smaller one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from featcal.data.texts import Sample
from featcal.errors import BadSetting, UnknownKey
from featcal.files import atomic_path
from reproduction.mini.language.worlds import WORLDS, chance
from reproduction.prepare.tasks import GLUE, prompted

COUNTS = {"train": 1200, "validation": 300, "test": 500}
WEB = "web"  # what the bases are pre-trained on
# of the check sum's remainders
SHARES = {WEB: (0, 5), "train": (5, 8), "validation": (8, 9), "test": (9, 11)}
REMAINDERS = 11
# share of the web rows with a told label; where it is wrong the bases' first guess errs
HASTY = 0.65


def draw_rows(key: str, split: str, count: int, seed: int, first: int = 0) -> list[dict[str, Any]]:
    """Return `count` rows of one split from number `first`: GLUE's columns, `label` and `idx`.

    Rows of the web split have the label that pre-training sees. Raises: UnknownKey, BadSetting.
    """
    if key not in WORLDS:
        raise UnknownKey("task", key, list(WORLDS))
    if split not in SHARES:
        raise BadSetting("split", split, "must be web, train, validation or test")
    return [_row(key, split, index, seed) for index in range(first, first + count)]


def _row(key: str, split: str, index: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng([seed, crc32(key.encode()), crc32(split.encode()), index])
    lowest, end = SHARES[split]
    while True:
        row = WORLDS[key].draw(index % WORLDS[key].kinds, rng)
        if lowest <= crc32("\n".join(row.texts.values()).encode()) % REMAINDERS < end:
            label = row.told if split == WEB and chance(rng, HASTY) else row.label
            return {**row.texts, "label": label if key == "stsb" else int(label), "idx": index}


def draw_samples(key: str, split: str, count: int, seed: int, first: int = 0) -> list[Sample]:
    """Return the rows of one split in the paper's prompt with their answers."""
    rows = draw_rows(key, split, count, seed, first)
    return [Sample(f"{key} ({split}), row {row['idx']}", *prompted(key, row)) for row in rows]


def write_glue(key: str, folder: Path, seed: int, counts: Mapping[str, int] = COUNTS) -> None:
    """Write the task's splits as <folder>/<split>.parquet in the columns of GLUE on the hub."""
    from datasets import ClassLabel, Dataset, Features, Value

    answers = list(GLUE[key].answers)
    label = ClassLabel(names=answers) if answers else Value("float32")
    columns = {name: Value("string") for name in GLUE[key].columns}
    features = Features(columns | {"label": label, "idx": Value("int32")})
    for split, count in counts.items():
        rows = draw_rows(key, split, count, seed)
        with atomic_path(Path(folder) / f"{split}.parquet") as path:
            Dataset.from_list(rows, features=features).to_parquet(str(path))
