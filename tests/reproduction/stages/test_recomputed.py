"""What another setting of params.yaml makes stale: the experiments it changes, what is made of
their outputs, and no others.

Which experiments change is told by what params.yaml is read into; which stages are stale, by what
DVC compares.
"""

from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from functools import cache
from typing import Any
from unittest.mock import patch

import networkx
import pytest
from resolved import resolved

import pipeline
from reproduction import experiments as schema
from reproduction.experiments import METHODS, Experiments, studies

COUNTS = ("samples", "seed", "seeds")  # how many examples, and which draws of them
STARTS = "from"
AGAIN = "expert_seeds"  # a study that calibrates and adapts by the settings of those groups
Path = tuple[str | int, ...]

SETTINGS = pipeline.settings()
SUITE = SETTINGS["suite"]


def counts(value: Any, path: Path = ()) -> Iterator[Path]:
    """Where numbers of samples and seeds stand below a value."""
    entries = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for name, inner in entries:
        here = (*path, name)
        if name in COUNTS and not isinstance(inner, dict):
            yield here
        else:
            yield from counts(inner, here)


def at(path: Path, value: Any) -> Any:
    """The part of a mapping or list that a path leads to; None where it ends early."""
    for name in path:
        try:
            value = value[name]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def experiments() -> dict[tuple[str, str], list[Path]]:
    """By group and key, every place of an experiment of this suite that has such a number."""
    found: dict[tuple[str, str], list[Path]] = {}
    for group, keys in SETTINGS.items():
        for key, entry in keys.items() if isinstance(keys, dict) and group != METHODS else ():
            places = [
                path for path in counts(entry, (group, key)) if SUITE in path or STARTS in path
            ]
            if group == "measure" and not next_seed_is_calibrated(
                key
            ):  # its seed must be one that is calibrated with
                continue
            if places:
                found[group, key] = places
    return found


def next_seed_is_calibrated(key: str) -> bool:
    """Whether the next seed is calibrated with too, at both settings."""
    given = SETTINGS["calibrate"][key][STARTS]["task_arithmetic"]
    return all(len(given.get(setting, {}).get("seeds", ())) > 1 for setting in ("suite", "paper"))


EXPERIMENTS = experiments()


def altered(path: Path) -> dict[str, Any]:
    """The settings with another value at one place; all other entries are those of params.yaml
    themselves.
    """
    old = at(path, SETTINGS)
    value: Any = [*old, max(old) + 1] if isinstance(old, list) else (old or 0) + 1
    for depth in reversed(range(len(path))):
        outer = copy(at(path[:depth], SETTINGS))
        outer[path[depth]] = value
        value = outer
    return dict(value)


def touched(settings: dict[str, Any]) -> frozenset[str]:
    """The stages for which settings differ from those of params.yaml."""
    graph = resolved()
    entries = {entry for _, entry in graph.nodes.data("reads") for entry in entry}
    differing = {
        e for e in entries if at(tuple(e.split(".")), settings) != at(tuple(e.split(".")), SETTINGS)
    }
    return frozenset(stage for stage, reads in graph.nodes.data("reads") if differing & set(reads))


def once(reader: Callable[..., Any]) -> Callable[..., Any]:
    """A reader of entries that reads the first of each key once; these are those of params.yaml."""
    first: dict[str, tuple[Any, Any, Any]] = {}

    def read(key: str, *given: Any, **more: Any) -> Any:
        known, settings, found = first.get(key, ((), None, None))
        if settings == more and all(a is b for a, b in zip(known, given, strict=True)):
            return found
        found = reader(key, *given, **more)
        first.setdefault(key, (given, deepcopy(more), found))
        return found

    return read


READERS = {
    name: once(getattr(schema, name)) for name in ("_merge_runs", "_calibrate_runs", "_adapt_runs")
}


def read(settings: dict[str, Any]) -> Experiments:
    """What these settings ask for; writing and parsing their text each time would take ten times as
    long.
    """
    with (
        patch.object(schema, "read_all", lambda path: settings),
        patch.multiple(schema, **READERS),
    ):
        return schema.load_experiments(pipeline.ROOT / "params.yaml")


@cache
def runs_of() -> dict[tuple[str, str], Any]:
    """Every run by section and key."""
    return by_section(read(SETTINGS))


def by_section(found: Experiments) -> dict[tuple[str, str], Any]:
    sections = {
        name: getattr(found, name)
        for name in ("merge", "calibrate", "adapt", "multitask", "measure")
    }
    return {
        (section, key): run
        for section, runs in (sections | dict(found.studies)).items()
        for key, run in runs.items()
    }


def commands(section: str, key: str, run: Any) -> set[str]:
    """The commands that may make a run: of its role and pool, of its merged model, or of itself."""
    keys = {key, *((run.key, run.merged) if hasattr(run, "upstream") else ())}
    return {f"featcal stage {section} {one}" for one in keys}


def needed(settings: dict[str, Any]) -> set[str]:
    """The stages whose experiments are others with these settings."""
    before, after, stages = runs_of(), by_section(read(settings)), set()
    for (section, key), run in after.items():
        if run != before[section, key]:
            stages |= set().union(
                *(
                    made_with().get(cmd, set())
                    for cmd in commands(section, key, run or before[section, key])
                )
            )
    return stages


@cache
def made_with() -> dict[str, set[str]]:
    """The stages of every command."""
    found: dict[str, set[str]] = {}
    for stage, cmd in resolved().nodes.data("cmd"):
        found.setdefault(cmd, set()).add(stage)
    return found


def stale(stages: frozenset[str]) -> set[str]:
    """Those stages, and every one that needs what one of them makes."""
    return set().union(*({stage} | networkx.ancestors(resolved(), stage) for stage in stages))


def key_of(stage: str) -> str | None:
    """What a stage is repeated for: role, pool, and what is done with them; the study before it
    left out.
    """
    key = stage.partition("@")[2]
    study, _, rest = key.partition("-")
    return (rest if study in (*studies(), "scores", "drift") else key) or None


def below(key: str | None, start: str | None) -> bool:
    """Whether a key is another one, or begins with its parts."""
    return f"{key}-".startswith(f"{start}-")


def made_by(stage: str) -> str:
    """The stage's name on the command line."""
    return str(resolved().nodes[stage]["cmd"].split()[2])


@pytest.mark.parametrize(("group", "key"), EXPERIMENTS, ids=lambda name: name)
def test_samples_and_seeds_make_stale_what_they_change_and_no_other_experiment(group, key):
    for path in EXPERIMENTS[group, key]:
        settings = altered(path)
        own = touched(settings)
        assert own and needed(settings) <= own, (
            f"{path} changes {sorted(needed(settings) - own)}, which DVC does not see"
        )
        one = STARTS in path or group not in (
            "calibrate",
            "adapt",
        )  # a group is of all that is made of a role and pool
        assert not one or sum(made_by(stage) == group for stage in own) == 1, (
            f"{path} is a setting of {sorted(own)}"
        )
        for stage in own:
            assert made_by(stage) in (group, AGAIN) and below(key_of(stage), key), (
                f"{path} makes {stage} stale"
            )
        computed = {s for s in stale(own) if key_of(s) and not s.startswith("page")}
        foreign = {s for s in computed if not below(key_of(s), key)}
        assert not foreign, f"{path} also makes {sorted(foreign)} stale, of another role or pool"


@pytest.mark.parametrize("section", ["calibrate", "adapt"])
@pytest.mark.parametrize("key", ["clip_b32-8", "clip_l14-14", "llama_3b-mergebench"])
def test_what_differs_at_one_merged_model_is_a_setting_of_its_stage_alone(section, key):
    settings = deepcopy(SETTINGS)
    change = {"suite": {"samples": 257}}
    settings[section][key][STARTS]["task_arithmetic"] = (
        change if section == "calibrate" else {"surgery": change}
    )
    assert touched(settings) == needed(settings) and len(touched(settings)) == 1


def test_a_merged_model_that_nothing_is_made_of_is_calibrated_by_one_word():
    settings = deepcopy(SETTINGS)
    assert settings["calibrate"]["clip_b32-8"][STARTS]["ties"] is None
    settings["calibrate"]["clip_b32-8"][STARTS]["ties"] = {}
    assert touched(settings) == needed(settings) == {"calibrate@clip_b32-8"}
