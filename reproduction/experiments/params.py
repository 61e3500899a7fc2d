"""params.yaml and pipeline/studies.yaml read and checked once: which models are made and studied,
with which settings.

Every entry carries one group of settings per suite; only the chosen suite's is used, and null means
that the suite does not run it. Knows nothing of torch, models or where results go.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from featcal.errors import BadFile, MissingPath, UnknownKey
from featcal.settings import require
from reproduction.experiments import entries
from reproduction.experiments.runs import (
    AdaptRun,
    CalibrateRun,
    MeasureRun,
    MergeRun,
    MultitaskRun,
    Pool,
    require_known,
    role_and_pool,
)
from reproduction.experiments.studies import STUDIES, shared, study_run

T = TypeVar("T")
Loader: Any = getattr(
    yaml, "CSafeLoader", yaml.SafeLoader
)  # LibYAML's, where PyYAML was built with it, is six times as fast
MORE = "pipeline/studies.yaml"  # studies that few edit, beside params.yaml
METHODS, EXP = (
    "methods",
    "exp",
)  # settings with names, for the experiments to share and for `dvc exp run -S`; not experiments
STUDIED = "studied"  # what studies have in common
SECTIONS = (
    "suite",
    METHODS,
    EXP,
    STUDIED,
    "merge",
    "calibrate",
    "adapt",
    "multitask",
    "measure",
    *STUDIES,
)


@dataclass(frozen=True)
class Experiments:
    """What params.yaml asks for, in the chosen suite."""

    suite: str
    merge: Mapping[str, MergeRun]  # with and without data
    calibrate: Mapping[str, CalibrateRun]
    adapt: Mapping[str, AdaptRun]
    multitask: Mapping[str, MultitaskRun | None]  # None: not run in this suite
    measure: Mapping[str, MeasureRun | None]
    studies: Mapping[str, Mapping[str, Any]]  # by kind, by key; None: not run in this suite
    prepared: tuple[tuple[str, Pool], ...]  # roles and pools

    @property
    def roles(self) -> tuple[str, ...]:
        """All that have merged models."""
        return tuple(dict.fromkeys(role for role, _ in self.prepared))

    def merged_in(self, role: str, pool: Pool) -> dict[str, MergeRun]:
        """The merged models of one role and pool, by key."""
        return {
            k: m
            for k, m in self.merge.items()
            if (m.role, m.pool) == (role, pool) and m.options is not None
        }

    def calibrated_in(self, role: str, pool: Pool) -> dict[str, CalibrateRun]:
        """The calibrated models of one role and pool, by key."""
        return {
            k: c
            for k, c in self.calibrate.items()
            if (c.role, c.pool) == (role, pool) and c.calibration is not None
        }

    def adapted_in(self, role: str, pool: Pool) -> dict[str, AdaptRun]:
        """The adapters of one role and pool, by key."""
        return {
            k: a
            for k, a in self.adapt.items()
            if (a.role, a.pool) == (role, pool) and a.settings is not None
        }


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping; a missing file, a syntax error and anything but a mapping are errors that
    name the file.
    """
    if not path.is_file():
        raise MissingPath(
            path,
            "a settings file",
            "run the command in the project's folder, the one that holds params.yaml",
        )
    try:
        content = yaml.load(path.read_text("utf-8"), Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = f"not valid YAML ({' '.join(str(error).split())})"
        raise BadFile(
            path, problem, "mend that line; blanks, not tabs, show what belongs to what"
        ) from None
    require(isinstance(content, dict), str(path), content, "must be a mapping")
    return dict(content)


def read_all(path: Path) -> dict[str, Any]:
    """params.yaml, with the studies of the file beside it. Raises: BadSetting for a section that
    both have.
    """
    raw, more = read_yaml(path), path.parent / MORE
    studies = read_yaml(more) if more.is_file() else {}
    twice = sorted(raw.keys() & studies.keys())
    require(not twice, f"{path.name}: {', '.join(twice)}", "given", f"must not stand in {MORE} too")
    return raw | studies


def load_experiments(path: Path, suite: str | None = None) -> Experiments:
    """Every experiment of params.yaml, checked once, in the suite it chooses or in another one.

    Raises: MissingPath; BadSetting for a value out of range; UnknownKey for a misspelt key, with
    the nearest known one.
    """
    raw = read_all(path)
    suite = suite or raw.get("suite")
    require(isinstance(suite, str), "suite", suite, "must name a file of suites/, for example mini")
    assert isinstance(suite, str)
    for key in raw:
        require_known(path.name, key, SECTIONS)
    there = sorted(file.stem for file in (path.parent / "suites").glob("*.yaml"))
    if there and suite not in there:
        raise UnknownKey("suite", suite, there)

    def read(name: str, kind: Callable[[str, Any, str], T]) -> dict[str, T]:
        return {key: kind(key, entry, suite) for key, entry in mapping(name, raw.get(name)).items()}

    merged = read("merge", entries.merge_runs)

    def read_from(name: str, kind: Callable[..., Mapping[str, T]]) -> dict[str, T]:
        found: dict[str, T] = {}
        for key, entry in mapping(name, raw.get(name)).items():
            require_known(name, key, merged)
            found |= kind(key, entry, suite, merged[key])
        return found

    studied = read(STUDIED, shared)
    found = Experiments(
        suite=suite,
        merge={key: run for runs in merged.values() for key, run in runs.items()},
        calibrate=read_from("calibrate", entries.calibrate_runs),
        adapt=read_from("adapt", entries.adapt_runs),
        multitask=read("multitask", partial(entries.plain_run, MultitaskRun)),
        measure=read("measure", partial(entries.plain_run, MeasureRun)),
        studies={kind: read(kind, partial(study_run, kind, studied=studied)) for kind in STUDIES},
        prepared=tuple(role_and_pool(key) for key in merged),
    )
    _check_references(found)
    return found


def _check_references(found: Experiments) -> None:
    """Whatever a study starts from is a merged model, and what is measured has been calibrated."""
    runs: dict[str, Any] = {f"measure.{k}.{found.suite}": v for k, v in found.measure.items() if v}
    runs |= {
        f"{kind}.{k}.{found.suite}": v
        for kind, studies in found.studies.items()
        for k, v in studies.items()
        if v
    }
    for place, run in runs.items():
        for name in getattr(run, "upstreams", None) or (
            [run.upstream] if hasattr(run, "upstream") else []
        ):
            upstream = f"{run.role}-{run.pool}-{name}"
            there = [
                key
                for key, made in found.merge.items()
                if (made.role, made.pool) == (run.role, run.pool)
            ]
            require(
                upstream in there,
                place,
                upstream,
                f"must be one of the merged models: {', '.join(there) or 'none'}",
            )
    for key, measured in found.measure.items():
        if measured is not None:
            _require_seeds(f"measure.{key}.{found.suite}.seed", measured, found)


def _require_seeds(place: str, measured: MeasureRun, found: Experiments) -> None:
    """Every calibrated model that is measured must be made in this suite, and adapters where the
    suite trains them at all.
    """
    key = f"{measured.role}-{measured.pool}"
    merged = f"{key}-{measured.upstream}"
    made: dict[str, tuple[int, ...]] = {}
    for name in measured.settings:
        calibrated = found.calibrate.get(f"{merged}-{name}")
        made[f"calibrate.{key} from {measured.upstream} at {name}"] = (
            calibrated.seeds if calibrated else ()
        )
        trained = {
            a.method: a.settings or {} for k, a in found.adapt.items() if k.startswith(f"{merged}-")
        }
        for method, settings in trained.items():
            if name in settings:
                made[f"adapt.{key} from {measured.upstream}, {method} at {name}"] = settings[
                    name
                ].seeds
    for run, seeds in made.items():
        words = f"must be one of the seeds of {run} ({', '.join(map(str, seeds)) or 'none in this suite'})"
        require(measured.seed in seeds, place, measured.seed, words)


def mapping(place: str, raw: Any) -> dict[Any, Any]:
    """A mapping of YAML; nothing at all stands for an empty one. Raises: BadSetting."""
    require(raw is None or isinstance(raw, dict), place, raw, "must be a mapping")
    return dict(raw or {})
