"""A changed number of samples or seed makes stale its own experiments and their dependents only."""

from collections.abc import Iterator
from copy import copy
from functools import cache
from typing import Any
from unittest.mock import patch

import networkx
import pytest
from resolved import resolved

import pipeline
from reproduction import experiments as schema
from reproduction.experiments import FROM, METHODS, Experiments, studies

COUNTS = ("samples", "seed", "seeds")
AGAIN = "expert_seeds"  # a study that uses the settings of `calibrate` and `adapt`
Path = tuple[str | int, ...]

SETTINGS = pipeline.settings()
SUITE = SETTINGS["suite"]


def counts(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the paths of numbers of samples and of seeds below a value."""
    entries = value.items() if isinstance(value, dict) else ()
    for name, inner in enumerate(value) if isinstance(value, list) else entries:
        if name in COUNTS and not isinstance(inner, dict):
            yield (*path, name)
        else:
            yield from counts(inner, (*path, name))


def at(path: Path, value: Any) -> Any:
    """Return the part of a mapping or list at a path; None where it ends early."""
    for name in path:
        try:
            value = value[name]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def experiments() -> dict[tuple[str, str], list[Path]]:
    """Return the paths of such numbers in every experiment of this suite, by group and key."""
    paths_of: dict[tuple[str, str], list[Path]] = {}
    for group, keys in SETTINGS.items():
        for key, entry in keys.items() if isinstance(keys, dict) and group != METHODS else ():
            paths = [p for p in counts(entry, (group, key)) if SUITE in p or FROM in p]
            # the seed of `measure` must be one that is calibrated with
            if paths and (group != "measure" or next_seed_is_calibrated(key)):
                paths_of[group, key] = paths
    return paths_of


def next_seed_is_calibrated(key: str) -> bool:
    """Return whether models are calibrated with the next seed too, at both settings."""
    entry = SETTINGS["calibrate"][key][FROM]["task_arithmetic"]
    return all(len(entry.get(setting, {}).get("seeds", ())) > 1 for setting in ("suite", "paper"))


EXPERIMENTS = experiments()


def altered(path: Path) -> dict[str, Any]:
    """Return the settings with another value at one path; other entries are shared."""
    old = at(path, SETTINGS)
    value: Any = [*old, max(old) + 1] if isinstance(old, list) else (old or 0) + 1
    for depth in reversed(range(len(path))):
        outer = copy(at(path[:depth], SETTINGS))
        outer[path[depth]] = value
        value = outer
    return dict(value)


def touched(settings: dict[str, Any]) -> frozenset[str]:
    """Return the stages that read a setting that differs from params.yaml."""
    graph = resolved()
    entries = {entry for _, reads in graph.nodes.data("reads") for entry in reads}
    paths = {entry: tuple(entry.split(".")) for entry in entries}
    differing = {e for e, path in paths.items() if at(path, settings) != at(path, SETTINGS)}
    return frozenset(stage for stage, reads in graph.nodes.data("reads") if differing & set(reads))


def read(settings: dict[str, Any]) -> Experiments:
    """Return the experiments of settings without writing and parsing them."""
    with patch.object(schema, "read_all", lambda path: settings):
        return schema.load_experiments(pipeline.ROOT / "params.yaml")


def by_section(loaded: Experiments) -> dict[tuple[str, str], Any]:
    names = ("merge", "calibrate", "adapt", "multitask", "measure")
    sections = {name: getattr(loaded, name) for name in names} | dict(loaded.studies)
    return {(name, key): run for name, runs in sections.items() for key, run in runs.items()}


@cache
def runs_of() -> dict[tuple[str, str], Any]:
    return by_section(read(SETTINGS))


def needed(settings: dict[str, Any]) -> set[str]:
    """Return the stages whose experiments change with these settings."""
    before, stages = runs_of(), set()
    for (section, key), run in by_section(read(settings)).items():
        if run != before.get((section, key)):
            changed = run or before[section, key]
            keys = {key, *((changed.key, changed.merged) if hasattr(changed, "upstream") else ())}
            commands = {f"featcal stage {section} {name}" for name in keys}
            stages |= {s for s, cmd in resolved().nodes.data("cmd") if cmd in commands}
    return stages


def stale(stages: frozenset[str]) -> set[str]:
    """Return those stages and all that depend on them."""
    return set().union(*({stage} | networkx.ancestors(resolved(), stage) for stage in stages))


def key_of(stage: str) -> str | None:
    """Return the role and pool, and what follows, in the name of a stage."""
    key = stage.partition("@")[2]
    study, _, rest = key.partition("-")
    return (rest if study in (*studies(), "scores", "drift") else key) or None


def below(key: str | None, start: str | None) -> bool:
    """Return whether a key is another one, or begins with its parts."""
    return f"{key}-".startswith(f"{start}-")


def made_by(stage: str) -> str:
    """Return the verb of a stage's command."""
    return str(resolved().nodes[stage]["cmd"].split()[2])


@pytest.mark.parametrize(("group", "key"), EXPERIMENTS, ids=lambda name: name)
def test_samples_and_seeds_make_stale_what_they_change_and_no_other_experiment(group, key):
    for path in EXPERIMENTS[group, key]:
        settings = altered(path)
        seen = touched(settings)
        unseen = needed(settings) - seen
        assert seen and not unseen, f"{path} changes {sorted(unseen)}, which DVC does not see"
        # a group of `calibrate` or `adapt` is used by a study as well
        sole = FROM in path or group not in ("calibrate", "adapt")
        assert not sole or sum(made_by(stage) == group for stage in seen) == 1, (path, sorted(seen))
        for stage in seen:
            assert made_by(stage) in (group, AGAIN) and below(key_of(stage), key), (path, stage)
        computed = {s for s in stale(seen) if key_of(s) and not s.startswith("page")}
        foreign = {s for s in computed if not below(key_of(s), key)}
        assert not foreign, f"{path} also makes {sorted(foreign)} stale, of another role or pool"
