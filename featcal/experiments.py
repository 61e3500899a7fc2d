"""params.yaml as frozen dataclasses: which models are merged, calibrated, evaluated and measured, with which settings.

Every experiment carries one group of settings per suite; only the chosen suite's is used, and null means that the suite does not
run it. Knows nothing of torch, models or where results go.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from featcal.errors import BadFile, MissingPath, UnknownKey
from featcal.merging.settings import settings_of
from featcal.settings import Calibration, from_mapping, require, text, whole_number

SETTINGS = ("suite", "paper")
SECTIONS = ("suite", "anchors", "merge", "calibrate", "prepare", "measure", "page")


@dataclass(frozen=True)
class MergeRun:
    """One merged model: role, pool and method; options are the method's own settings."""

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
        fine = isinstance(self.settings, list | tuple) and bool(self.settings) and all(s in SETTINGS for s in self.settings)
        require(fine, "measure.settings", self.settings, f"must be a list of {' and '.join(SETTINGS)}")
        whole_number("measure.seed", self.seed, least=0)
        text("measure.task", self.task)
        object.__setattr__(self, "settings", tuple(self.settings))  # YAML gives a list


@dataclass(frozen=True)
class Experiments:
    """What params.yaml asks for, in the chosen suite."""

    suite: str
    merge: Mapping[str, MergeRun]
    calibrate: Mapping[str, CalibrateRun]
    measure: Mapping[str, MeasureRun | None]  # None: not run in this suite
    roles: tuple[str, ...]  # all that `prepare` names
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
        content = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = f"not valid YAML ({' '.join(str(error).split())})"
        raise BadFile(path, problem, "mend that line; blanks, not tabs, show what belongs to what") from None
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
    for key in raw:
        if key not in SECTIONS:
            raise UnknownKey(path.name, str(key), list(SECTIONS))
    there = sorted(file.stem for file in (path.parent / "suites").glob("*.yaml"))
    if there and suite not in there:
        raise UnknownKey("suite", suite, there)
    merge = {k: _merge_run(f"merge.{k}", v, suite) for k, v in _section(raw, "merge").items()}
    calibrate = {k: _calibrate_run(f"calibrate.{k}", v, suite) for k, v in _section(raw, "calibrate").items()}
    measure = {k: _measure_run(f"measure.{k}", v, suite) for k, v in _section(raw, "measure").items()}
    runs = {f"calibrate.{k}": v for k, v in calibrate.items()} | {f"measure.{k}": v for k, v in measure.items() if v}
    for place, run in runs.items():
        upstream = f"{run.role}-{run.pool}-{run.upstream}"
        require(upstream in merge, place, upstream, f"must be one of the merged models: {', '.join(merge)}")
    for key, measured in measure.items():
        for name in measured.settings if measured else ():
            _require_seed(f"measure.{key}.{suite}", measured, f"{key}-{measured.upstream}-{name}", calibrate)
    return Experiments(suite, merge, calibrate, measure, _roles(raw), raw)


def _require_seed(place: str, measured: MeasureRun, wanted: str, calibrate: Mapping[str, CalibrateRun]) -> None:
    """The calibrated model that is measured must be made in this suite."""
    seeds = calibrate[wanted].seeds if wanted in calibrate else ()
    made = f"of calibrate.{wanted} ({', '.join(map(str, seeds)) or 'none in this suite'})"
    require(measured.seed in seeds, f"{place}.seed", measured.seed, f"must be one of the seeds {made}")


def _roles(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """The roles that are prepared, each under the name <role>-<pool>."""
    found = []
    for key, entry in _section(raw, "prepare").items():
        fine = isinstance(entry, dict) and set(entry) == {"role"} and str(key).rpartition("-")[0] == entry["role"]
        require(fine, f"prepare.{key}", entry, "must hold `role:` and nothing else, and be called <role>-<pool>")
        found.append(entry["role"])
    return tuple(dict.fromkeys(found))


def _section(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = raw.get(name, {})
    require(isinstance(section, dict), name, section, "must be a mapping of experiments")
    return dict(section)


def _for_suite(place: str, entry: Mapping[str, Any], suite: str, fixed: tuple[str, ...]) -> Mapping[str, Any] | None:
    """The settings of the chosen suite, and a check of the words around them."""
    require(isinstance(entry, dict), place, entry, "must be a mapping")
    for key in fixed:
        require(key in entry, place, list(entry), f"lacks {key}")
        (whole_number if key == "pool" else text)(f"{place}.{key}", entry[key])
    wanted = "-".join(str(entry[key]) for key in fixed)  # files and stages are found by this name
    require(place.partition(".")[2] == wanted, place, wanted, "must be the entry's name, made of " + ", ".join(fixed))
    groups = {k: v for k, v in entry.items() if k not in fixed}
    for key, group in groups.items():
        require(group is None or isinstance(group, dict), f"{place}.{key}", group, "must be a mapping of settings, or null")
    way_out = f"has no settings for the suite {suite!r}; write `{suite}: null` to leave it out"
    require(suite in groups, place, sorted(groups), way_out)
    chosen: Mapping[str, Any] | None = groups[suite]
    return chosen


def _merge_run(place: str, entry: Mapping[str, Any], suite: str) -> MergeRun:
    options = _for_suite(place, entry, suite, ("role", "pool", "method"))
    settings_of(entry["method"], options or {}, f"{place}.{suite}" if options else place)
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
        require(key in method, f"{place}.{suite}", list(chosen), f"lacks {key}")
        draw[key] = method.pop(key)
    for key in ("samples", "batch"):
        whole_number(f"{place}.{suite}.{key}", draw[key])
    seeds, where = draw["seeds"], f"{place}.{suite}.seeds"
    require(isinstance(seeds, list) and bool(seeds), where, seeds, "must be a list of whole numbers")
    for seed in seeds:
        whole_number(where, seed, least=0)
    require(len(set(seeds)) == len(seeds), where, seeds, "must name each seed once")
    draw["seeds"] = tuple(seeds)
    return CalibrateRun(**words, calibration=from_mapping(Calibration, method, f"{place}.{suite}"), **draw)
