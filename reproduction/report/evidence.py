"""The results folder of a suite: a missing file is an empty table, never an error.

Knows file names and columns; knows nothing of claims, tables or pages.
"""

import json
from collections.abc import Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from reproduction import results as schema
from reproduction.report import statistics
from reproduction.report.paper import (
    LANGUAGE,
    REAL,
    TASKS,
    TEXT_TASKS,
    VISION,
    photos,
    texts,
    title_of,
)
from reproduction.report.statistics import Bits, with_correct
from reproduction.results import project_root

KEYS = [
    "upstream", "method", "setting", "encode", "task", "metric", "seed", "model", "label", "block", "part", "suite", "role",
    "pool", "corruption", "parameter", "statement", "quantity", "choice",
    "option", "origin", "variant", "stream", "correct", "seen", "expert_seed", "candidate", "strength",
]  # fmt: skip
COLUMNS: dict[str, Sequence[str]] = {
    "scores": schema.SCORES, "references": schema.SCORES, "drift": schema.DRIFT,
    "projection": schema.PROJECTION, "alignment": schema.ALIGNMENT, "similarity": schema.SIMILARITY,
    "vectors": schema.VECTORS, "curves": schema.CURVES, "scales": schema.SCALES,
    "corrupted": schema.CORRUPTED, "corrupted.examples": schema.EXAMPLES, "sweep": schema.SWEEP,
    "task_counts": schema.TASK_COUNTS, "choices": schema.CHOICES,
    "theory": schema.THEORY, "theory_points": schema.THEORY_POINTS, "samples": schema.SAMPLES,
    "cost": schema.AUDIT, "default": schema.DEFAULT,
    "default.candidates": schema.CANDIDATES, "field": schema.SCORES, "ablate": schema.SCORES,
    "extrapolation": schema.EXTRAPOLATION, "extrapolation.candidates": schema.EXTRAPOLATION_CANDIDATES,
    "offset": schema.OFFSET, "second_encoder": schema.SCORES, "expert_seeds": (*schema.SCORES, "expert_seed"),
    **dict.fromkeys(("seen", "samples.seen", "corrupted.seen"), schema.SEEN),
}  # fmt: skip
GREEDY = "-greedy"  # ends a task of the real language model whose answers were decoded greedily
# ends a kind whose rows were measured with a clock: `cost.run` is what the record of `cost` says
# each run cost
MEASURED = ".run"
COSTS = (
    "upstream", "method", "setting", "encode", "seed", "samples", "images", "seconds", "memory_mib", "energy_wh",
)  # fmt: skip
COLUMNS |= dict.fromkeys(("samples.run", "cost.run"), COSTS)
# kinds beside which it stands what was right
KEPT = (
    "scores", "ablate", "corrupted", "sweep", "choices", "samples", "cost", "field", "second_encoder",
    "default", "extrapolation", "offset",
)  # fmt: skip
COLUMNS |= {f"{kind}.correct": schema.correct_columns(COLUMNS[kind]) for kind in KEPT}
# tables that lie with others, by the folder; every other one begins with its folder's name
LIES_WITH = {
    **dict.fromkeys(("references", "seen", "curves"), "scores"), "scales": "ablate", "theory_points": "theory",
    **dict.fromkeys(("projection", "alignment", "similarity", "vectors"), "drift"),
}  # fmt: skip


def expert_tasks(scores: pd.DataFrame) -> set[str]:
    """Return the tasks of the real language model that have an expert, without greedy answers."""
    tasks = set(scores["task"][scores["method"] == "expert"])
    return {task for task in tasks if not task.endswith(GREEDY)}


def results_folder(suite: str) -> Path:
    """Return the folder of one suite's result files; it may not exist yet."""
    return project_root() / "results" / suite


class Table(pd.DataFrame):
    """Rows of one kind; which of them have a value is remembered, since pages ask often."""

    __hash__ = (
        object.__hash__
    )  # one is another, whatever it says: made once of a state of the files, and never changed

    @cached_property
    def hits(self) -> dict[tuple[str, Any], Bits]:
        """Return which rows have a value, by column and value, as far as it was asked for."""
        return {}


class Evidence:
    """Result files of one suite, role and pool.

    Args: suite, role, pool: the words of params.yaml ("mini", "clip_b32", "8").   folder: where the
    files are, for tests.
    """

    def __init__(self, suite: str, role: str, pool: str | int, folder: Path | None = None):
        self.suite, self.role, self.pool = suite, role, str(pool)
        self.folder = folder or results_folder(suite)

    def beside(self, kind: str) -> Path:
        """Return the folder of one kind of table: of scores, of drift, or of a study."""
        return (
            self.folder / LIES_WITH.get(kind, kind.partition(".")[0]) / f"{self.role}-{self.pool}"
        )

    def path(self, kind: str) -> Path:
        """Return the file of one kind of table."""
        return self.beside(kind) / f"{kind}.csv"

    def table(self, kind: str) -> Table:
        """Return the rows of one kind of file, not to be changed; empty where not run.

        Of the real language model's scores: the experts' tasks, answered by likelihood.
        """
        if kind not in self._tables:
            found = self._read(kind)
            if (self.role, self.pool, kind) == (*LANGUAGE, "scores"):
                found = _kept(found[found["task"].isin(expert_tasks(found))])
            if (
                kind == "scores" and self.path("ablate").is_file()
            ):  # controls, scored by a stage of their own
                found = _both(found, self._read("ablate"))
            self._tables[kind] = (
                _with_clean(found, self.table("scores"))
                if kind == "corrupted" and len(found)
                else found
            )
        return self._tables[kind]

    @cached_property
    def _tables(self) -> dict[str, Table]:
        return {}

    def _read(self, kind: str) -> Table:
        path = self.path(kind).absolute()
        if kind.endswith(MEASURED):
            rows = self.record(kind).get("cost", [])
            if isinstance(
                rows, dict
            ):  # a search: seconds of every trial, which one pays for together
                searched = self.table(kind.removesuffix(MEASURED))[
                    ["upstream", "method", "setting"]
                ].drop_duplicates()
                rows = [
                    row | {"seconds": sum(rows.values())} for row in searched.to_dict("records")
                ]
            if rows:
                return _kept(
                    _numeric(
                        pd.DataFrame(rows).astype({key: str for key in KEYS if key in rows[0]})
                    )
                )
        elif path.is_file():
            return read_scores(path)
        return _none(kind)

    @property
    def every_score(self) -> Table:
        """Return all rows of the scores: also greedy answers, tasks without an expert and plain text."""
        return self._read("scores")

    @property
    def run_record(self) -> dict[str, Any]:
        """Return machine, versions, commit and seconds of the run; empty if not run."""
        scores, drift = self.record("scores"), self.record("drift")
        return scores | {"seconds": scores["seconds"] | drift.get("seconds", {})} if scores else {}

    def record(self, kind: str) -> dict[str, Any]:
        """Return the run record of one kind, with or without the ending of a measured one."""
        return read_json(self.beside(kind) / "run.json")

    def settings(self, study: str = "") -> dict[str, Any]:
        """Return the resolved settings of the scores or of a study; empty if not run."""
        return read_json(
            self.beside(study or "scores")
            / (f"{study}.settings.json" if study else "settings.json")
        )

    def machine(self, kind: str) -> str:
        """Return the machine of a measured kind; empty for files that depend on none."""
        host = self.record(kind).get("host", {}) if kind.endswith(MEASURED) else {}
        return f"{host['cpu']}, {host['cores']} cores" if host else ""

    @property
    def inputs(self) -> str:
        """Return what its models are shown: texts or images."""
        return "texts" if self.role == REAL or self.pool in TEXT_TASKS else "images"

    @property
    def was_run(self) -> bool:
        """Return True if there is at least one score."""
        return not self.table("scores").empty

    @cached_property
    def tasks(self) -> list[str]:
        """Return the pool's tasks: those with scores, else the suite's, else the paper's."""
        if self.pool in TEXT_TASKS:
            run = set(self.table("scores")["task"])
            return [task for task in TEXT_TASKS[self.pool] if task in run or not run]
        if self.role in (REAL, VISION):
            run = set(self.table("scores")["task"])
            sets = list(texts() if self.role == REAL else photos())
            return [task for task in sets[: int(self.pool)] if task in run or not run]
        listed = [
            task["task"] for task in suite_record(self.suite, self.folder).get("tasks", [])
        ] or list(TASKS)
        scored = list(dict.fromkeys(self.table("scores")["task"]))
        if scored:
            return [t for t in listed if t in scored] + [t for t in scored if t not in listed]
        pools = suite_record(self.suite, self.folder).get("pools", {})
        return pools.get(self.pool) or (listed[: int(self.pool)] if self.pool.isdigit() else listed)

    @property
    def shown(self) -> str:
        """Return the task shown sample by sample, as the paper shows Stanford Cars."""
        tasks = self.table("similarity")["task"]
        return "" if tasks.empty else str(tasks.iloc[0])

    def gains(self, left: dict[str, Any], right: dict[str, Any]) -> pd.DataFrame:
        """Return gains of one model over another in cosine and accuracy (`statistics.gains`)."""
        found = {kind: self.table(kind) for kind in ("alignment", "scores")}
        return statistics.gains(found, self.tasks, left, right)

    def title(self, task: str) -> str:
        """Return how a column or axis names a task: the paper's name where it has one."""
        named = {
            t["task"]: t.get("paper_name")
            for t in suite_record(self.suite, self.folder).get("tasks", [])
        }
        return title_of(task) or named.get(task) or task


def read_scores(path: Path) -> Table:
    """Read a file of rows, and which test rows were right where `.correct.csv` is next to it."""
    both = path, path.with_suffix(".correct.csv")
    return _numbers(path, *(file.stat().st_mtime_ns if file.is_file() else 0 for file in both))


@lru_cache(maxsize=256)
def _numbers(path: Path, written: int, beside: int) -> Table:
    """Return the rows of a file, read once per state of the file, with `correct` where known.

    written, beside: when the file and the one with correctness were written, 0 where missing.
    """
    frame = _numeric(_rows(path))
    if not beside:
        return _kept(frame)
    correct = path.with_suffix(".correct.csv")
    return _kept(with_correct(frame, _numeric(_rows(correct)), correct))


@lru_cache(maxsize=64)
def _both(scores: Table, controls: Table) -> Table:
    return _kept(pd.concat([scores, controls], ignore_index=True))


@lru_cache(maxsize=64)
def _with_clean(damaged: Table, scores: Table) -> Table:
    """Return rows of damaged samples, preceded by the same models from clean ones where the study
    has none.
    """
    names = ["upstream", "method", "setting", "seed"]
    wanted = damaged[names].drop_duplicates()
    mergers = wanted[["upstream"]].drop_duplicates().assign(method="merged", setting="", seed="")
    wanted = wanted[:0] if (damaged["corruption"] == "clean").any() else wanted
    clean = scores.merge(pd.concat([mergers, wanted]), on=names).assign(corruption="clean")
    return _kept(pd.concat([clean.reindex(columns=damaged.columns), damaged], ignore_index=True))


@cache
def _none(kind: str) -> Table:
    return Table(columns=list(COLUMNS.get(kind, ())))


def _kept(frame: pd.DataFrame) -> Table:
    """Return a table in one piece, whose columns are found faster than pandas' own strings."""
    frame = frame.copy()
    frame.columns = frame.columns.astype(object)
    return Table(frame)


def _rows(path: Path) -> pd.DataFrame:
    """Return the rows of a file with keys as Python strings, which are compared faster."""
    return pd.read_csv(path, dtype=dict.fromkeys(KEYS, object), keep_default_na=False)


def _numeric(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with numbers in every column that is no key."""
    for column in [c for c in frame.columns if c not in KEYS]:
        frame[column] = pd.to_numeric(frame[column])
    return frame


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file as a dictionary; empty where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def suite_record(suite: str, folder: Path | None = None) -> dict[str, Any]:
    """Return what suite.json says about the tasks of a suite."""
    return read_json((folder or results_folder(suite)) / "suite.json")


def select(frame: pd.DataFrame, wanted: dict[str, Any]) -> pd.DataFrame:
    """Return the rows whose columns equal the wanted values; none if a column is missing."""
    if not all(column in frame for column in wanted):
        return frame.iloc[:0]
    hits = [
        _hits(frame, column, str(value) if column in KEYS else value)
        for column, value in wanted.items()
    ]
    return frame[np.logical_and.reduce(hits)] if hits else frame


def _hits(frame: pd.DataFrame, column: str, value: Any) -> Bits:
    """Return which rows have a value; remembered for a table."""
    known = frame.hits if isinstance(frame, Table) else {}
    if (column, value) not in known:
        known[column, value] = (frame[column] == value).to_numpy(bool)
    return known[column, value]
