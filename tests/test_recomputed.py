"""What another number of samples or another seed makes stale: the experiment that has it, and what is made of its outputs."""

from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any

import networkx
import pytest
from resolved import params, resolved

COUNTS = ("samples", "seed", "seeds")  # how many examples, and which draws of them
Path = tuple[str | int, ...]

SETTINGS = params()
SUITE = SETTINGS["suite"]


def counts(value: Any, path: Path = ()) -> Iterator[Path]:
    """Where numbers of samples and seeds stand below a value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
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
    for group, entries in SETTINGS.items():
        for key, entry in entries.items() if isinstance(entries, dict) and group != "anchors" else ():
            places = [path for path in counts(entry, (group, key)) if SUITE in path]
            if places:
                found[group, key] = places
    return found


EXPERIMENTS = experiments()


def altered(path: Path) -> dict[str, Any]:
    """The settings with another value at one place."""
    settings = deepcopy(SETTINGS)
    place, old = at(path[:-1], settings), at(path, settings)
    place[path[-1]] = [*old, 1] if isinstance(old, list) else (old or 0) + 1
    return settings


@cache
def touched(path: Path) -> frozenset[str]:
    """The stages for which settings differ when the value at one place does."""
    settings, graph = altered(path), resolved()
    entries = {entry for _, entry in graph.nodes.data("reads") for entry in entry}
    differing = {e for e in entries if at(tuple(e.split(".")), settings) != at(tuple(e.split(".")), SETTINGS)}
    return frozenset(stage for stage, reads in graph.nodes.data("reads") if differing & set(reads))


def stale(path: Path) -> set[str]:
    """Those stages, and every one that needs what one of them makes."""
    return set().union(*({stage} | networkx.ancestors(resolved(), stage) for stage in touched(path)))


def key_of(stage: str) -> str | None:
    """What a stage is repeated for: role, pool, and what is done with them."""
    return stage.split("@")[1] if "@" in stage else None


def below(key: str | None, start: str | None) -> bool:
    """Whether a key is another one, or begins with its parts."""
    return f"{key}-".startswith(f"{start}-")


def of_others(group: str, key: str) -> set[str]:
    """The stages of a group that have settings of other experiments than this one."""
    others = [path for (g, other), paths in EXPERIMENTS.items() if g == group and other != key for path in paths]
    return set().union(*(touched(path) for path in others))


def test_every_kind_of_experiment_is_looked_at():
    groups = {group for group, _ in EXPERIMENTS}
    counted = {"samples", "corrupted", "cost", "sweep", "choices", "task_counts", "larger_pools", "language_pools"}
    assert counted <= groups, "params.yaml: no experiment with samples or a seed in these groups"


@pytest.mark.parametrize(("group", "key"), EXPERIMENTS, ids=lambda name: name)
def test_samples_and_seeds_of_one_experiment_make_no_other_stale(group, key):
    role_and_pool = "-".join(key.split("-")[:2])
    for path in EXPERIMENTS[group, key]:
        own = touched(path)
        assert len(own) == 1, f"{path} is a setting of {sorted(own)}"
        (stage,) = own
        assert below(key, key_of(stage)), f"{stage} does not belong to {key}"
        again = stale(path)
        others = {other for other in of_others(group, key) if key_of(other) != key_of(stage)}
        assert not again & others, f"{path} also makes {sorted(again & others)} stale"
        computed = {s for s in again if key_of(s) and not s.startswith("page")}
        foreign = {s for s in computed if not below(key_of(s), role_and_pool)}
        assert not foreign, f"{path} also makes {sorted(foreign)} stale, of another role or pool"
