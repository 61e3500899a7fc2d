"""params.yaml read and checked once: which models are merged, calibrated, adapted, evaluated and measured, with which settings.

Every experiment carries one group of settings per suite; only the chosen suite's is used, and null means that the suite does not
run it. Knows nothing of torch, models or where results go.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from featcal import entries
from featcal.errors import BadFile, MissingPath, UnknownKey
from featcal.pools import WholePool, language_pool, larger_pool
from featcal.runs import AblateRun, AdaptRun, CalibrateRun, MeasureRun, MergeRun, MultitaskRun, Pool
from featcal.settings import require
from featcal.studies import STUDIES, study_run

T = TypeVar("T")
Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # LibYAML's, where PyYAML was built with it, is six times as fast
SECTIONS = (
    "suite", "anchors", "merge", "merge_with_data", "upstreams", "calibrate", "adapt", "ablate", "multitask", "larger_pools",
    "language_pools", "prepare", "measure", *STUDIES, "page",
)  # fmt: skip


@dataclass(frozen=True)
class Experiments:
    """What params.yaml asks for, in the chosen suite."""

    suite: str
    merge: Mapping[str, MergeRun]  # with and without data; of larger pools too, as calibrate and adapt
    calibrate: Mapping[str, CalibrateRun]
    adapt: Mapping[str, AdaptRun]
    ablate: Mapping[str, AblateRun | None]  # None: not run in this suite
    multitask: Mapping[str, MultitaskRun | None]
    pools: Mapping[str, WholePool]  # larger pools of images, and pools of texts
    measure: Mapping[str, MeasureRun | None]
    studies: Mapping[str, Mapping[str, Any]]  # by kind, by key; None: not run in this suite
    prepared: tuple[tuple[str, Pool], ...]  # roles and pools
    raw: Mapping[str, Any] = field(repr=False)

    @property
    def roles(self) -> tuple[str, ...]:
        """All that `prepare` names."""
        return tuple(dict.fromkeys(role for role, _ in self.prepared))

    def merged_in(self, role: str, pool: Pool) -> dict[str, MergeRun]:
        """The merged models of one role and pool, by key."""
        return {k: m for k, m in self.merge.items() if (m.role, m.pool) == (role, pool) and m.options is not None}

    def calibrated_in(self, role: str, pool: Pool) -> dict[str, CalibrateRun]:
        """The calibrated models of one role and pool, by key."""
        return {k: c for k, c in self.calibrate.items() if (c.role, c.pool) == (role, pool) and c.calibration is not None}

    def adapted_in(self, role: str, pool: Pool) -> dict[str, AdaptRun]:
        """The adapters of one role and pool, by key."""
        return {k: a for k, a in self.adapt.items() if (a.role, a.pool) == (role, pool) and a.settings is not None}

    def ablated_in(self, role: str, pool: Pool) -> dict[str, AblateRun]:
        """The controls of one role and pool, by key."""
        return {k: a for k, a in self.ablate.items() if a is not None and (a.whole.role, a.whole.pool) == (role, pool)}


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping; a missing file, a syntax error and anything but a mapping are errors that name the file."""
    if not path.is_file():
        raise MissingPath(path, "a settings file", "run the command in the project's folder, the one that holds params.yaml")
    try:
        content = yaml.load(path.read_text("utf-8"), Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = f"not valid YAML ({' '.join(str(error).split())})"
        raise BadFile(path, problem, "mend that line; blanks, not tabs, show what belongs to what") from None
    require(isinstance(content, dict), str(path), content, "must be a mapping")
    return dict(content)


def load_experiments(path: Path, suite: str | None = None) -> Experiments:
    """Every experiment of params.yaml, checked once, in the suite it chooses or in another one.

    Raises: MissingPath; BadSetting for a value out of range; UnknownKey for a misspelt key, with the nearest known one.
    """
    raw = read_yaml(path)
    suite = suite or raw.get("suite")
    require(isinstance(suite, str), "suite", suite, "must name a file of suites/, for example mini")
    assert isinstance(suite, str)
    for key in raw:
        if key not in SECTIONS:
            raise UnknownKey(path.name, str(key), list(SECTIONS))
    there = sorted(file.stem for file in (path.parent / "suites").glob("*.yaml"))
    if there and suite not in there:
        raise UnknownKey("suite", suite, there)

    def read(name: str, kind: Callable[[str, Any, str], T]) -> dict[str, T]:
        return {key: kind(f"{name}.{key}", entry, suite) for key, entry in _section(raw, name).items()}

    alone, with_data = read("merge", entries.merge_run), read("merge_with_data", entries.merge_run)
    for key in set(alone) & set(with_data):
        require(False, f"merge_with_data.{key}", key, "is a merged model of `merge` already")
    whole = read("larger_pools", larger_pool) | read("language_pools", language_pool)
    found = Experiments(
        suite=suite,
        merge=alone | with_data | _pooled(whole, "merge"),
        calibrate=read("calibrate", entries.calibrate_run) | _pooled(whole, "calibrate"),
        adapt=read("adapt", entries.adapt_run) | _pooled(whole, "adapt"),
        ablate=read("ablate", entries.ablate_run),
        multitask=read("multitask", entries.multitask_run),
        pools=whole,
        measure=read("measure", entries.measure_run),
        studies={kind: read(kind, study_run) for kind in STUDIES},
        prepared=(*_prepared(raw), *((pool.role, pool.pool) for pool in whole.values() if isinstance(pool.pool, str))),
        raw=raw,
    )
    _check_references(found)
    return found


def _pooled(pools: Mapping[str, WholePool], part: str) -> dict[str, Any]:
    """The runs of one part of every whole pool, by key."""
    return {key: run for pool in pools.values() for key, run in getattr(pool, part).items()}


def _check_references(found: Experiments) -> None:
    """Whatever starts from a merged model names one that is made in this suite, and what is measured has been calibrated."""
    runs: dict[str, Any] = {f"calibrate.{k}": v for k, v in found.calibrate.items()}
    runs |= {f"adapt.{k}": v for k, v in found.adapt.items()}
    runs |= {f"ablate.{k}": v.whole for k, v in found.ablate.items() if v}
    runs |= {f"measure.{k}": v for k, v in found.measure.items() if v}
    runs |= {f"{kind}.{k}": v for kind, studies in found.studies.items() for k, v in studies.items() if v}
    for place, run in runs.items():
        for name in getattr(run, "upstreams", None) or (run.upstream,):
            upstream = f"{run.role}-{run.pool}-{name}"
            there = [key for key, made in found.merge.items() if (made.role, made.pool) == (run.role, run.pool)]
            require(upstream in there, place, upstream, f"must be one of the merged models: {', '.join(there) or 'none'}")
    for key, measured in found.measure.items():
        if measured is not None:
            _require_seeds(f"measure.{key}.{found.suite}.seed", measured, found)


def _require_seeds(place: str, measured: MeasureRun, found: Experiments) -> None:
    """Every calibrated model that is measured must be made in this suite, and adapters where the suite trains them at all."""
    merged = f"{measured.role}-{measured.pool}-{measured.upstream}"
    made: dict[str, tuple[int, ...]] = {}
    for name in measured.settings:
        wanted = f"{merged}-{name}"
        made[f"calibrate.{wanted}"] = found.calibrate[wanted].seeds if wanted in found.calibrate else ()
        trained = {k: a.settings or {} for k, a in found.adapt.items() if k.startswith(f"{merged}-")}
        made |= {f"adapt.{k}.{name}": settings[name].seeds for k, settings in trained.items() if name in settings}
    for run, seeds in made.items():
        words = f"must be one of the seeds of {run} ({', '.join(map(str, seeds)) or 'none in this suite'})"
        require(measured.seed in seeds, place, measured.seed, words)


def _prepared(raw: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """Roles and pools that are prepared, each under the name <role>-<pool>."""
    found = []
    for key, entry in _section(raw, "prepare").items():
        role, _, pool = str(key).rpartition("-")
        fine = isinstance(entry, dict) and entry == {"role": role} and pool.isdigit()
        require(fine, f"prepare.{key}", entry, "must hold `role:` and nothing else, and be called <role>-<pool>")
        found.append((role, int(pool)))
    return tuple(found)


def _section(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = raw.get(name, {})
    require(isinstance(section, dict), name, section, "must be a mapping of experiments")
    return dict(section)
