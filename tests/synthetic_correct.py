"""Which samples invented scores got right, and which test images invented adapters were shown."""

from pathlib import Path
from zlib import crc32

import numpy as np

from featcal.data.sampling import draw_indices
from featcal.stages.columns import SEEN
from featcal.storage.results import COUNTED, SCORES, correct_columns, correct_path, packed, write_rows

UPSTREAMS = ("average", "task_arithmetic", "adamerging", "wudi")


def write_correct(path: Path, rows: list[dict], columns: tuple[str, ...] = SCORES) -> None:
    """The share of right samples beside every score, to a whole sample: better models are right wherever worse ones are."""
    kept = [
        {c: v for c, v in row.items() if c not in COUNTED} | {"correct": packed(right(row["task"], row["value"], row["count"]))}
        for row in rows
    ]
    write_rows(correct_path(path), kept, correct_columns(columns))


def right(task: str, value: float, count: int) -> np.ndarray:
    """So many percent of the samples, the first of an order that is the task's own."""
    return np.random.default_rng(crc32(task.encode())).permutation(count) < round(value * count / 100)


def write_seen(
    path: Path, suite: str, role: str, pool: int, tasks: list[str], draws: list[tuple[int | None, int]], count: int = 500
) -> None:
    """Draws of (samples, seed) from the test images of every task; None is all of them."""
    rows = []
    for samples, seed in draws:
        for task in tasks:
            shown = np.zeros(count, bool)
            shown[draw_indices(task, count, count if samples is None else min(samples, count), seed)] = True
            words = {"suite": suite, "role": role, "pool": pool, "task": task, "stream": "test_unlabelled"}
            rows.append(words | {"samples": samples, "seed": seed, "count": count, "seen": packed(shown)})
    write_rows(path, rows, SEEN)


def adapted(role: str, pool: int) -> dict:
    """What settings.json says of the adapters' draws and of AdaMerging's."""
    draw = {"stream": "test_unlabelled", "samples": 256, "batch": 250, "seed": 42}
    keys = [f"{role}-{pool}-{upstream}-{method}" for upstream in UPSTREAMS for method in ("surgery", "prob_surgery")]
    merged = {f"{role}-{pool}-adamerging": {"method": "adamerging", "draw": draw | {"samples": None}}}
    return {"merge": merged, "adapt": {key: {"settings": {name: {"draw": draw} for name in ("suite", "paper")}} for key in keys}}
