"""Which samples invented scores got right, and which test images invented adapters were shown."""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
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
Row = dict[str, Any]


def grid(**cells: Any) -> Iterator[Row]:
    """Yield a row for every combination of the cells that are lists, the last one changing first."""
    lists = {name: values for name, values in cells.items() if isinstance(values, list)}
    for chosen in product(*lists.values()):
        yield cells | dict(zip(lists, chosen, strict=True))


def model(key: tuple[str, str, str]) -> Row:
    """Return the cells of a model: merger, method and setting."""
    return dict(zip(("upstream", "method", "setting"), key, strict=True))


def write_answers(path: Path, rows: list[Row], columns: tuple[str, ...] = SCORES) -> None:
    """Write scores, and next to them which samples are right: a whole number of samples."""
    write_scores(path, [row | {"correct": _correct(row)} for row in rows], columns)


def _correct(row: Row) -> str:
    if row["metric"] != "accuracy":
        return ""
    share = row["value"] * row["count"] / 100
    assert abs(share - round(share)) < 1e-6, f"no whole number of samples: {row}"
    named = "/".join(str(value) for key, value in row.items() if key not in (*COUNTED, "task"))
    return _easiest(row["task"], named, round(share), row["count"])


@cache
def _easiest(task: str, named: str, right: int, count: int) -> str:
    """Return so many samples, those of least difficulty, which all models share in part."""
    seeds = (crc32(name.encode()) for name in (task, f"{named} on {task}"))
    shared, specific = (np.random.default_rng(seed).random(count) for seed in seeds)
    return packed(np.argsort(np.argsort(shared + 0.3 * specific)) < right)


def forget_answers(folder: Path) -> Path:
    """Remove which samples were right: scores may be changed then, and differences are unpaired."""
    for path in folder.rglob("*.correct.csv"):
        path.unlink()
    return folder


def changed(
    folder: Path,
    name: str,
    where: Callable[[pd.DataFrame], Any],
    value: float | Callable[[pd.Series], pd.Series],
) -> None:
    """Change the value in some rows of a result file, and forget which samples were right."""
    key, _, kind = name.partition(".")
    path = Evidence("", *key.rsplit("-", 1), folder).path(kind or "scores")
    frame = pd.read_csv(path, keep_default_na=False)
    frame.loc[where(frame), "value"] = value(frame["value"]) if callable(value) else value
    frame.to_csv(path, index=False)
    forget_answers(folder)


def write_seen(
    path: Path, shared: Row, tasks: list[str], draws: list[tuple[int | None, int]]
) -> None:
    """Write draws of (samples, seed) from the test images of every task; None is all of them."""
    rows = []
    for (samples, seed), task in product(draws, tasks):
        shown = np.zeros(COUNT, bool)
        shown[draw_indices(task, COUNT, samples or COUNT, seed)] = True
        columns = {"task": task, "stream": "test_unlabelled", "samples": samples, "seed": seed}
        rows.append(shared | columns | {"count": COUNT, "seen": packed(shown)})
    write_rows(path, rows, SEEN)


def adapted(role: str, pool: int) -> Row:
    """Return what settings.json says of the adapters' draws."""
    draw = {"stream": "test_unlabelled", "samples": 256, "batch": 250, "seed": 42}
    settings = {"settings": {name: {"draw": draw} for name in ("suite", "paper")}}
    keys = [f"{role}-{pool}-{u}-{m}" for u in UPSTREAMS for m in ("surgery", "prob_surgery")]
    return {"adapt": dict.fromkeys(keys, settings)}
