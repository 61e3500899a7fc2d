"""Which samples invented scores got right, and which test images invented adapters were shown."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pandas as pd

from featcal.data.batches import draw_indices
from reproduction.report.evidence import Evidence
from reproduction.results import COUNTED, SCORES, SEEN, packed, write_rows, write_scores

COUNT = 1000  # test samples of a task: a tenth of a percent is a whole one
UPSTREAMS = ("average", "task_arithmetic", "adamerging", "wudi")


def write_answers(path: Path, rows: list[dict], columns: tuple[str, ...] = SCORES) -> None:
    """Scores, and beside them which samples are right: as many as an accuracy says, which has to be
    a whole number of samples.
    """
    write_scores(path, [row | {"correct": _correct(row)} for row in rows], columns)


def _correct(row: dict) -> str:
    if row["metric"] != "accuracy":
        return ""
    share = row["value"] * row["count"] / 100
    assert abs(share - round(share)) < 1e-6, (
        f"{row['value']} % of {row['count']} samples is no whole number: {row}"
    )
    model = "/".join(str(value) for key, value in row.items() if key not in (*COUNTED, "task"))
    return _easiest(row["task"], model, round(share), row["count"])


@cache
def _easiest(task: str, model: str, right: int, count: int) -> str:
    """So many samples, those of least difficulty: what all models share, and something of the
    model's own.
    """
    shared, own = (
        np.random.default_rng(crc32(name.encode())).random(count)
        for name in (task, f"{model} on {task}")
    )
    return packed(np.argsort(np.argsort(shared + 0.3 * own)) < right)


def forget_answers(folder: Path) -> Path:
    """The folder of results without which samples were right: scores may be changed then, and
    differences are unpaired.
    """
    for path in folder.rglob("*.correct.csv"):
        path.unlink()
    return folder


def changed(
    folder: Path,
    name: str,
    where: Callable[[pd.DataFrame], Any],
    value: float | Callable[[pd.Series], pd.Series],
) -> None:
    """Another value in some rows of a result file, of which nobody knows any more which samples
    were right.
    """
    key, _, kind = name.partition(".")
    path = Evidence("", *key.rsplit("-", 1), folder).path(kind or "scores")
    frame = pd.read_csv(path, keep_default_na=False)
    frame.loc[where(frame), "value"] = value(frame["value"]) if callable(value) else value
    frame.to_csv(path, index=False)
    forget_answers(folder)


def write_seen(
    path: Path,
    suite: str,
    role: str,
    pool: int,
    tasks: list[str],
    draws: list[tuple[int | None, int]],
    count: int = COUNT,
) -> None:
    """Draws of (samples, seed) from the test images of every task; None is all of them."""
    rows = []
    for samples, seed in draws:
        for task in tasks:
            shown = np.zeros(count, bool)
            shown[
                draw_indices(task, count, count if samples is None else min(samples, count), seed)
            ] = True
            words = dict(suite=suite, role=role, pool=pool, task=task, stream="test_unlabelled")
            rows.append(
                words | {"samples": samples, "seed": seed, "count": count, "seen": packed(shown)}
            )
    write_rows(path, rows, SEEN)


def adapted(role: str, pool: int) -> dict:
    """What settings.json says of the adapters' draws and of AdaMerging's."""
    draw = {"stream": "test_unlabelled", "samples": 256, "batch": 250, "seed": 42}
    keys = [
        f"{role}-{pool}-{upstream}-{method}"
        for upstream in UPSTREAMS
        for method in ("surgery", "prob_surgery")
    ]
    merged = {
        f"{role}-{pool}-adamerging": {"method": "adamerging", "draw": draw | {"samples": None}}
    }
    return dict(
        merge=merged,
        adapt={
            key: {"settings": {name: {"draw": draw} for name in ("suite", "paper")}} for key in keys
        },
    )
