"""The results folder of a suite: a missing file is an empty table, never an error."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from reproduction.report import paper
from reproduction.report.statistics import TRAINED, estimate, lead, with_correct
from reproduction.results import COLUMNS, FOLDERS, GREEDY, TEXT_COLUMNS, project_root

RUN_RECORD = ".run"  # ends a kind whose rows are in a run record: `cost.run` is what each run cost

# the tables that were read, with the times at which their files were written
_TABLES: dict[Path, tuple[list[int], pd.DataFrame]] = {}


def results_folder(suite: str) -> Path:
    """Return the folder of one suite's result files; it may not exist yet."""
    return project_root() / "results" / suite


class Evidence:
    """Result files of one suite, role and pool ("mini", "clip_b32", "8"); folder: for tests."""

    def __init__(self, suite: str, role: str, pool: str | int, folder: Path | None = None):
        self.suite, self.role, self.pool = suite, role, str(pool)
        self.folder = folder or results_folder(suite)

    def folder_of(self, kind: str) -> Path:
        """Return the folder of one kind of table: of scores, of drift, or of a study."""
        folder = FOLDERS.get(kind, kind.partition(".")[0])
        return self.folder / folder / f"{self.role}-{self.pool}"

    def path(self, kind: str) -> Path:
        return self.folder_of(kind) / f"{kind}.csv"

    def table(self, kind: str) -> pd.DataFrame:
        """Return the rows of one kind of file, not to be changed; empty where not run."""
        path, stamp = self.path(kind).absolute(), self._stamp(kind)
        if path not in _TABLES or _TABLES[path][0] != stamp:
            rows = self._with_other_files(kind, self._read(kind))
            rows = rows.copy()  # in one piece, which is read faster, as are names of this type
            rows.columns = rows.columns.astype(object)
            _TABLES[path] = stamp, rows
        return _TABLES[path][1]

    def _with_other_files(self, kind: str, rows: pd.DataFrame) -> pd.DataFrame:
        """Return a file's rows with what other files know of the same models.

        Of the real language model's scores: the experts' tasks, answered by likelihood.
        """
        if kind == "corrupted" and len(rows):
            return _with_clean(rows, self.table("scores"))
        if kind != "scores":
            return rows
        if (self.role, self.pool) == paper.LANGUAGE:
            rows = rows[rows["task"].isin(self.expert_tasks)]
        if self.path("ablate").is_file():  # a stage scores the controls
            rows = pd.concat([rows, self._read("ablate")], ignore_index=True)
        return _with_trainings(rows, self._read("expert_seeds"))

    def _stamp(self, kind: str) -> list[int]:
        """Return the modification times of a table's files, 0 for a missing file."""
        kinds = dict.fromkeys((kind, "scores", "ablate", "expert_seeds"))
        paths = [self.path(name) for name in (kinds if kind in ("scores", "corrupted") else [kind])]
        files = [*paths, *map(correct_of, paths), self.folder_of(kind) / "run.json"]
        return [file.stat().st_mtime_ns if file.is_file() else 0 for file in files]

    def _read(self, kind: str) -> pd.DataFrame:
        path = self.path(kind)
        if path.is_file():
            return read_scores(path)
        frame = pd.DataFrame(self.record(kind).get("cost") if kind.endswith(RUN_RECORD) else None)
        if frame.empty:
            return pd.DataFrame(columns=COLUMNS)
        return _numeric(frame.astype({key: str for key in TEXT_COLUMNS if key in frame}))

    @cached_property
    def all_scores(self) -> pd.DataFrame:
        """Return all scores, including greedy answers, tasks without an expert and plain text."""
        return _with_trainings(self._read("scores"), self._read("expert_seeds"))

    @property
    def expert_tasks(self) -> list[str]:
        """Return the tasks that have an expert, without the greedy answers to them."""
        experts = select(self.all_scores, {"method": "expert", "setting": ""})
        tasks = dict.fromkeys(experts["task"])
        return [task for task in tasks if not task.endswith(GREEDY)]

    def record(self, kind: str) -> dict[str, Any]:
        """Return the run record of one kind, with or without the ending of a measured one."""
        return read_json(self.folder_of(kind) / "run.json")

    def settings(self, study: str = "") -> dict[str, Any]:
        """Return the resolved settings of the scores or of a study; empty if not run."""
        name = f"{study}.settings.json" if study else "settings.json"
        return read_json(self.folder_of(study or "scores") / name)

    def machine(self, kind: str) -> str:
        """Return the machine of a measured kind; empty for files that depend on none."""
        host = self.record(kind).get("host", {}) if kind.endswith(RUN_RECORD) else {}
        return f"{host['cpu']}, {host['cores']} cores" if host else ""

    @property
    def inputs(self) -> str:
        """Return the models' kind of input: texts or images."""
        return "texts" if self.role == paper.REAL or self.pool in paper.TEXT_TASKS else "images"

    @property
    def was_run(self) -> bool:
        """Return True if any scores exist."""
        return not self.table("scores").empty

    @cached_property
    def tasks(self) -> list[str]:
        """Return the pool's tasks: those with scores, else the suite's, else the paper's."""
        scored = list(dict.fromkeys(self.table("scores")["task"]))
        first = int(self.pool) if self.pool.isdigit() else None
        real_sets = {paper.REAL: paper.TEXT_SETS, paper.VISION: paper.IMAGE_SETS}
        ordered = paper.TEXT_TASKS.get(self.pool) or real_sets.get(self.role)
        if ordered is not None:
            return [task for task in list(ordered)[:first] if task in scored or not scored]
        facts = read_json(self.folder / "suite.json")
        listed = [task["task"] for task in facts.get("tasks", [])] or list(paper.TASKS)
        if scored:
            return [t for t in listed if t in scored] + [t for t in scored if t not in listed]
        return facts.get("pools", {}).get(self.pool) or listed[:first]

    @property
    def shown_task(self) -> str:
        """Return the task shown sample by sample, as the paper shows Stanford Cars."""
        tasks = self.table("similarity")["task"]
        return "" if tasks.empty else str(tasks.iloc[0])

    def gains(self, left: dict[str, Any], right: dict[str, Any]) -> pd.DataFrame:
        """Return cosine and accuracy of `left` minus `right`, one seed each, with two SE."""
        rows = []
        for task in self.tasks:
            cosines, accuracies = [], []
            for side in (left, right):
                aligned = select(self.table("alignment"), side | {"task": task})
                seed = aligned["seed"].iloc[0] if len(aligned) else None
                cosines.append(estimate(aligned, "cosine"))
                scores = select(self.table("scores"), side | {"task": task, "seed": seed})
                accuracies.append(estimate(scores))
            if all(cosines) and all(accuracies):
                rows.append((task, *lead(*cosines), *lead(*accuracies)))
        columns = ["task", "cosine", "cosine_noise", "accuracy", "accuracy_noise"]
        return pd.DataFrame(rows, columns=columns)

    @property
    def model_name(self) -> str:
        """Return the name of the model in titles: the paper's, or the model in its role."""
        return paper.model_name(self.role, self.suite)

    @property
    def model_title(self) -> str:
        """Return the same for the beginning of a heading."""
        return self.model_name[0].upper() + self.model_name[1:]

    def title(self, task: str) -> str:
        """Return the title of a task's column or axis: the paper's name if it has one."""
        facts = read_json(self.folder / "suite.json").get("tasks", [])
        paper_names = {fact["task"]: fact.get("paper_name") for fact in facts}
        return paper.title_of(task) or paper_names.get(task) or task


def read_scores(path: Path) -> pd.DataFrame:
    """Read a scores file, with the correct test rows if `.correct.csv` is next to it."""
    scores, correct = _rows(path), correct_of(path)
    return with_correct(scores, _rows(correct), correct) if correct.is_file() else scores


def correct_of(path: Path) -> Path:
    """Return the file with the correct test rows of a scores file."""
    return path.with_suffix(".correct.csv")


def _rows(path: Path) -> pd.DataFrame:
    """Return the rows of a file with keys as Python strings, which are compared faster."""
    return _numeric(
        pd.read_csv(path, dtype=dict.fromkeys(TEXT_COLUMNS, object), keep_default_na=False)
    )


def _numeric(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with numbers in every column that is no key."""
    for column in [c for c in frame.columns if c not in TEXT_COLUMNS]:
        frame[column] = pd.to_numeric(frame[column])
    return frame


def _with_clean(damaged: pd.DataFrame, scores: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of damaged samples, preceded by clean ones if the study has none."""
    names = ["upstream", "method", "setting", "seed"]
    wanted = damaged[names].drop_duplicates()
    mergers = wanted[["upstream"]].drop_duplicates().assign(method="merged", setting="", seed="")
    wanted = wanted[:0] if (damaged["corruption"] == "clean").any() else wanted
    clean = scores.merge(pd.concat([mergers, wanted]), on=names).assign(corruption="clean")
    return pd.concat([clean.reindex(columns=damaged.columns), damaged], ignore_index=True)


def _with_trainings(scores: pd.DataFrame, retrained: pd.DataFrame) -> pd.DataFrame:
    """Return the scores with a column for each further training of the experts; NaN: not run."""
    keys = ["upstream", "method", "setting", "seed", "task", "metric"]
    for training, rows in retrained.groupby("expert_seed"):
        values = rows.set_index(keys)["value"].rename(f"{TRAINED}{training}")
        scores = scores.join(values, on=keys)
    return scores


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file as a dictionary; empty without the file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def select(frame: pd.DataFrame, wanted: dict[str, Any]) -> pd.DataFrame:
    """Return the rows whose columns equal the wanted values; none if a column is missing."""
    if not all(column in frame for column in wanted):
        return frame.iloc[:0]
    keys = {c: str(value) if c in TEXT_COLUMNS else value for c, value in wanted.items()}
    hits = [frame[column].to_numpy() == value for column, value in keys.items()]
    return frame[np.logical_and.reduce(hits)] if hits else frame
