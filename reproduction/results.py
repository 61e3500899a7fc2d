"""Result files: the columns of every table, CSV with the same bytes on every run, and run records.

Pure Python: the report reads results without torch.
"""

import csv
import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from featcal.errors import BadFile, MissingPath
from featcal.files import atomic_folder, atomic_path, read_json, write_json
from featcal.settings import require

# LibYAML's loader, where PyYAML was built with it, is six times as fast.
Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_MODEL = tuple("suite role pool upstream method setting".split())
_SCORED = ("task", "metric", "seed", "value", "count")


def _scored(*columns: str) -> tuple[str, ...]:
    return (*_MODEL, *columns, *_SCORED)


Row = dict[str, Any]  # of a results file
SCORES = _scored()
CORRECT, COUNTED = "correct", ("value", "count")  # x.correct.csv holds the first for the others
GREEDY = "-greedy"  # ends the task of a chat's score by exact match
PLAIN = "plain_text"  # texts without an instruction, whose log-likelihood is scored
EXPERT_SEEDS = (*SCORES, "expert_seed")
SAMPLES = (*_MODEL, "task", "metric", "seed", "samples", *COUNTED)
AUDIT = (*_MODEL, "encode", "task", "metric", "seed", "samples", "step", *COUNTED)
CORRUPTED = _scored("corruption")
OFFSET = _scored("strength")
SWEEP = _scored("parameter", "at", "chosen")
CHOICES = _scored("choice", "option", "default")
DEFAULT = _scored("samples", "candidate")
# divergence: from the experts on held-out samples, the mean over tasks
CANDIDATES = ("suite", "role", "pool", "upstream", "method", "samples", "seed", "candidate")
CANDIDATES += ("divergence", "chosen")
_CANDIDATE = tuple("choice variant interpolation anchor_blend ridge divergence".split())
EXTRAPOLATION = _scored(*_CANDIDATE)
EXTRAPOLATION_CANDIDATES = ("suite", "role", "pool", "upstream", *_CANDIDATE, "chosen")
# value: among the task's own classes, union: among those of all tasks; drift: of final features
TASK_COUNTS = (*_MODEL, *"tasks draw task metric seed value union drift mean_drift count".split())
CURVES = (*_MODEL, "seed", "step", "loss")
SCALES = ("suite", "role", "pool", "upstream", "factor", "value", "chosen")
SEEN = ("suite", "role", "pool", "task", "stream", "samples", "seed", "count", "seen")
EXAMPLES = ("task", "index", "corruption", "row", "column")
THEORY = (*_MODEL, "statement", "quantity", "task", "block", "nodes", *COUNTED)
THEORY_POINTS = tuple("method setting statement task block index actual bound kept".split())
DRIFT = (*_MODEL, "seed", "task", "block", "relative_drift", "l2", "cosine", "count")
ALIGNMENT = (*_MODEL, "seed", "task", "cosine", "cosine_sd", "l2", "count")
SIMILARITY = ("task", "method", "setting", "index", "similarity")
PROJECTION = ("task", "model", "index", "label", "x", "y")
VECTORS = (*_MODEL, "seed", "task", "part", "cosine", "size", "count")
# Files of the stage `measure`.
MEASURED = {"drift": DRIFT, "alignment": ALIGNMENT, "similarity": SIMILARITY}
MEASURED |= {"projection": PROJECTION, "vectors": VECTORS}
# Of run records: what making each model cost.
COST = (*_MODEL, *"seed samples images encode seconds memory_mib energy_wh".split())
TEXT_COLUMNS = tuple(  # the others hold numbers
    """suite role pool upstream method setting encode task metric seed model label block part corruption parameter statement
    quantity choice option variant stream correct seen expert_seed candidate strength""".split()
)  # fmt: skip
_TABLES = (EXPERT_SEEDS, SAMPLES, AUDIT, CORRUPTED, OFFSET, SWEEP, CHOICES, DEFAULT, CANDIDATES)
_TABLES += (EXTRAPOLATION, TASK_COUNTS, CURVES, SCALES, SEEN, EXAMPLES, THEORY, THEORY_POINTS)
COLUMNS = tuple(dict.fromkeys(chain(*_TABLES, *MEASURED.values(), COST, [CORRECT])))
# folders of the tables whose names do not begin with their folder's name
FOLDERS = {"seen": "scores", "theory_points": "theory", **dict.fromkeys(MEASURED, "drift")}

_DECIMALS = {"value": 4, "similarity": 4, "x": 4, "y": 4}  # other fractions get six
# Results, pages and dvc.lock change by being made.
_SOURCES = "featcal reproduction notebooks suites params.yaml dvc.yaml pipeline/*.yaml".split()
_VERSIONED = ("featcal", "torch", "transformers", "datasets", "safetensors", "numpy")


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Write a CSV of exactly these columns, floats rounded, None empty. Raises: BadFile."""
    lines = [list(columns)]
    for row in rows:
        if odd := sorted(set(row) ^ set(columns)):
            problem = f"a row lacks or adds the columns {', '.join(odd)}"
            raise BadFile(path, problem, f"the columns are {', '.join(columns)}")
        lines.append([_text(path, column, row[column]) for column in columns])
    with atomic_path(path) as hidden, hidden.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


def packed(flags: Iterable[Any] | None) -> str:
    """Return flags as hexadecimal text, eight to a byte, padded with zeros; empty for None."""
    if flags is None:
        return ""
    import numpy as np

    return np.packbits(np.asarray(list(flags), dtype=bool)).tobytes().hex()


def correct_columns(columns: Sequence[str] = SCORES) -> tuple[str, ...]:
    return (*(column for column in columns if column not in COUNTED), CORRECT)


def write_scores(
    path: str | Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str] = SCORES
) -> None:
    """Write a CSV of scores, and one of the rows' `correct` (as `packed`). Raises: BadFile."""
    rows = list(rows)

    def without(*names: str) -> list[dict[str, Any]]:
        return [{c: value for c, value in row.items() if c not in names} for row in rows]

    write_rows(path, without(CORRECT), columns)
    correct_path = Path(path).with_suffix(f".{CORRECT}.csv")
    write_rows(correct_path, without(*COUNTED), correct_columns(columns))


def run_record(seconds: Mapping[str, float], gpu: str = "", **extra: Any) -> dict[str, Any]:
    """Return a run's record: seconds per step, host, versions, commit, and `extra`."""
    system = (platform.system(), platform.machine(), *platform.libc_ver())  # not the kernel's build
    host = {"cpu": _cpu_name(), "cores": os.cpu_count(), "system": " ".join(filter(None, system))}
    versions = {name: version(name) for name in _VERSIONED}
    return {
        "seconds": {step: round(value, 2) for step, value in seconds.items()},
        "host": host | ({"gpu": gpu} if gpu else {}),
        "versions": {"python": platform.python_version(), **versions},
        "commit": _git("rev-parse", "HEAD") or "",
        "dirty": bool(_git("status", "--porcelain", "--", *_SOURCES)),
        **extra,
    }


def _text(path: object, column: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        problem = f"column {column} would hold {value}"
        raise BadFile(path, problem, "look at the numbers that lead here")
    decimals = _DECIMALS.get(column, 6)
    # + 0.0 turns -0.0, whose sign is chance, into 0.0
    return f"{round(value, decimals) + 0.0:.{decimals}f}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    match = re.search(r"^model name\s*: *(.*\S)", text, re.M)
    return match[1] if match else platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    """Return the output of git in the current folder; None without git or a repository."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def project_root(start: Path | None = None) -> Path:
    """Return the nearest folder with a params.yaml, at or above `start`. Raises: MissingPath."""
    current = (start or Path.cwd()).resolve()
    for folder in (current, *current.parents):
        if (folder / "params.yaml").is_file():
            return folder
    way_out = "start from a folder of the cloned repository"
    raise MissingPath(current / "params.yaml", "the experiments", way_out)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return a YAML mapping. Raises: MissingPath, BadFile or BadSetting naming the file."""
    if not path.is_file():
        way_out = "run the command in the project's folder, the one that holds params.yaml"
        raise MissingPath(path, "a settings file", way_out)
    try:
        content = yaml.load(path.read_text("utf-8"), Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = f"not valid YAML ({' '.join(str(error).split())})"
        way_out = "fix that line; blanks, not tabs, show what belongs to what"
        raise BadFile(path, problem, way_out) from None
    require(isinstance(content, dict), str(path), content, "must be a mapping")
    return dict(content)


def chosen_suite(params: Mapping[str, Any]) -> str:
    """Return the suite that params.yaml chooses. Raises: BadSetting."""
    suite = params.get("suite")
    require(isinstance(suite, str), "suite", suite, "must name a file of suites/, such as mini")
    return str(suite)


# The stages before the scores of a role and pool, in the order of their seconds in run.json.
CHAIN = ("prepare", "multitask", "merge", "calibrate", "adapt", "evaluate")


def gather(name: str) -> None:
    """Copy outputs/<suite>/<name>/ to results/<suite>/, with the run's record."""
    root = project_root()
    suite = chosen_suite(read_yaml(root / "params.yaml"))
    outputs, (kind, _, key) = root / "outputs" / suite, name.partition("/")
    source, target = outputs / name, root / "results" / suite / name
    if not key or not source.is_dir():
        way_out = "name a folder, such as scores/clip_b32-8, and run its stage: dvc repro"
        raise MissingPath(source, "the results to gather", way_out)
    verb, runs = "measure" if kind == "drift" else kind, outputs / "run"
    record = _chain(runs, key) if kind == "scores" else read_json(runs / f"{verb}-{key}.json")
    if not (root / "results" / suite / "scores" / key).is_dir():
        # the seconds that the models took are on no other record
        record["seconds"] = _chain(runs, key)["seconds"] | record["seconds"]
    with atomic_folder(target) as folder:
        for file in sorted(source.iterdir()):
            shutil.copyfile(file, folder / file.name)
        write_json(folder / "run.json", record)


def _chain(runs: Path, key: str) -> dict[str, Any]:
    """Return the record of every stage before scores, and what each calibration cost."""
    texts = not key.rpartition("-")[2].isdigit()  # pools of texts have names
    names = ["prepare_texts" if texts else "prepare_data", *(f"{verb}-{key}" for verb in CHAIN)]
    paths = [runs / f"{name}.json" for name in names]
    seconds, gpu = dict[str, float](), ""
    cost: dict[str, dict[str, Any]] = {}  # by stage, by seed
    for record in (read_json(path) for path in paths if path.is_file()):
        seconds |= record["seconds"]
        cost |= record.get("cost", {})
        gpu = record["host"].get("gpu", gpu)
    return run_record(seconds, gpu, cost=cost)
