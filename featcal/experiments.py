"""params.yaml as frozen dataclasses: which models are merged, calibrated, evaluated and measured, with which settings.

Every experiment carries one group of settings per suite; only the chosen suite's is used, and null means that the suite does not
run it. Knows nothing of torch, models or where results go.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from featcal.errors import BadSetting, MissingPath
from featcal.settings import Calibration, from_mapping, number, require

SETTINGS = ("suite", "paper")


@dataclass(frozen=True)
class MergeRun:
    """One merged model: role, pool and method; options are the method's own (task arithmetic: scale)."""

    role: str
    pool: int
    method: str
    options: Mapping[str, Any] | None  # None: not run in this suite


@dataclass(frozen=True)
class CalibrateRun:
    """One calibrated model per seed: what it starts from, the method's settings, and the calibration draw."""

    role: str
    pool: int
    upstream: str
    setting: str
    calibration: Calibration | None  # None: not run in this suite
    samples: int = 0  # n, images per task
    batch: int = 0
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class MeasureRun:
    """Drift on test images of one merged model and its calibrated ones, one per setting.

    task: whose features are projected to a plane, with the calibrated model of the first setting.
    """

    role: str
    pool: int
    upstream: str
    settings: tuple[str, ...]
    seed: int
    task: str

    def __post_init__(self) -> None:
        fine = bool(self.settings) and set(self.settings) <= set(SETTINGS)
        require(fine, "measure.settings", self.settings, f"must be a list of {' and '.join(SETTINGS)}")
        object.__setattr__(self, "settings", tuple(self.settings))  # YAML gives a list


@dataclass(frozen=True)
class Experiments:
    """What params.yaml asks for, in the chosen suite."""

    suite: str
    merge: Mapping[str, MergeRun]
    calibrate: Mapping[str, CalibrateRun]
    measure: Mapping[str, MeasureRun | None]  # None: not run in this suite
    raw: Mapping[str, Any] = field(repr=False)

    def merged_in(self, role: str, pool: int) -> dict[str, MergeRun]:
        """The merged models of one role and pool, by key."""
        return {k: m for k, m in self.merge.items() if (m.role, m.pool) == (role, pool) and m.options is not None}

    def calibrated_in(self, role: str, pool: int) -> dict[str, CalibrateRun]:
        """The calibrated models of one role and pool, by key."""
        return {k: c for k, c in self.calibrate.items() if (c.role, c.pool) == (role, pool) and c.calibration is not None}


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping; a missing file, a syntax error and anything but a mapping are errors that name the file."""
    if not path.is_file():
        raise MissingPath(path, "a settings file", "run the command in the project's folder, the one that holds params.yaml")
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise BadSetting(str(path), str(error).splitlines()[0], f"is not valid YAML: {' '.join(str(error).split())}") from None
    require(isinstance(content, dict), str(path), content, "must be a mapping")
    return dict(content)


def load_experiments(path: Path) -> Experiments:
    """Every experiment of params.yaml, checked once.

    Raises: MissingPath; BadSetting for a value out of range; UnknownKey for a misspelt key, with the nearest known one.
    """
    raw = read_yaml(path)
    suite = raw.get("suite")
    require(isinstance(suite, str), "suite", suite, "must name a file of suites/, for example mini")
    assert isinstance(suite, str)
    merge = {k: _merge_run(f"merge.{k}", v, suite) for k, v in _section(raw, "merge").items()}
    calibrate = {k: _calibrate_run(f"calibrate.{k}", v, suite) for k, v in _section(raw, "calibrate").items()}
    measure = {k: _measure_run(f"measure.{k}", v, suite) for k, v in _section(raw, "measure").items()}
    for key, run in calibrate.items():
        upstream = f"{run.role}-{run.pool}-{run.upstream}"
        require(upstream in merge, f"calibrate.{key}", upstream, f"must be one of the merged models: {', '.join(merge)}")
    return Experiments(suite, merge, calibrate, measure, raw)


def _section(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = raw.get(name, {})
    require(isinstance(section, dict), name, section, "must be a mapping of experiments")
    return dict(section)


def _for_suite(place: str, entry: Mapping[str, Any], suite: str, fixed: tuple[str, ...]) -> Mapping[str, Any] | None:
    """The settings of the chosen suite, and a check of the words around them."""
    require(isinstance(entry, dict), place, entry, "must be a mapping")
    for key in fixed:
        require(key in entry, place, dict(entry), f"lacks {key}")
    groups = {k: v for k, v in entry.items() if k not in fixed}
    way_out = f"has no settings for the suite {suite!r}; write `{suite}: null` to leave it out"
    require(suite in groups, place, sorted(groups), way_out)
    chosen = groups[suite]
    require(chosen is None or isinstance(chosen, dict), f"{place}.{suite}", chosen, "must be a mapping of settings, or null")
    return chosen


def _merge_run(place: str, entry: Mapping[str, Any], suite: str) -> MergeRun:
    options = _for_suite(place, entry, suite, ("role", "pool", "method"))
    return MergeRun(entry["role"], entry["pool"], entry["method"], options)


def _measure_run(place: str, entry: Mapping[str, Any], suite: str) -> MeasureRun | None:
    chosen = _for_suite(place, entry, suite, ("role", "pool"))
    if chosen is None:
        return None
    return from_mapping(MeasureRun, {"role": entry["role"], "pool": entry["pool"], **chosen}, f"{place}.{suite}")


def _calibrate_run(place: str, entry: Mapping[str, Any], suite: str) -> CalibrateRun:
    fixed = ("role", "pool", "upstream", "setting")
    chosen = _for_suite(place, entry, suite, fixed)
    words = {key: entry[key] for key in fixed}
    require(words["setting"] in SETTINGS, f"{place}.setting", words["setting"], f"must be one of {', '.join(SETTINGS)}")
    if chosen is None:
        return CalibrateRun(**words, calibration=None)
    method = dict(chosen)
    draw: dict[str, Any] = {}
    for key in ("samples", "batch", "seeds"):
        require(key in method, f"{place}.{suite}", chosen, f"lacks {key}")
        draw[key] = method.pop(key)
    for key in ("samples", "batch"):
        number(f"{place}.{key}", draw[key])
        whole = isinstance(draw[key], int) and draw[key] > 0
        require(whole, f"{place}.{suite}.{key}", draw[key], "must be a whole number above 0")
    seeds = draw["seeds"]
    whole = isinstance(seeds, list) and bool(seeds) and all(isinstance(s, int) for s in seeds)
    require(whole, f"{place}.{suite}.seeds", seeds, "must be a list of whole numbers")
    draw["seeds"] = tuple(seeds)
    return CalibrateRun(**words, calibration=from_mapping(Calibration, method, f"{place}.{suite}"), **draw)
