"""The sentence encoders of a suite as frozen dataclasses: which encoders and texts play the roles of the experiments.

A section of its own in suites/<name>.yaml. A role has the pools of this section, whose sizes are those of images. Knows names and
counts, opens nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from featcal.errors import UnknownKey
from featcal.settings import from_mapping, require, text, whole_number
from reproduction.suites.sentence_recipe import FineTuneSentences

KEYS = ("texts", "pools", "roles", "fine_tune")


@dataclass(frozen=True)
class SentenceRole:
    """One sentence encoder: a folder below the project, a hub id, or `pypi:<name>` for a package that holds one."""

    model: str


@dataclass(frozen=True)
class Sentences:
    """What plays the roles of sentence encoders; experts are fine-tuned here.

    texts: folder below the project with one folder per task.   pools: tasks by the size of the pool.
    """

    texts: str = ""
    pools: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    roles: Mapping[str, SentenceRole] = field(default_factory=dict)
    fine_tune: FineTuneSentences = field(default_factory=FineTuneSentences)


def sentences_of(place: str, raw: Any) -> Sentences:
    """The section `sentences` of a suite; nothing there where a suite has no encoders. Raises: UnknownKey, BadSetting."""
    if not _mapping(place, raw):
        return Sentences()
    for key in raw:
        if key not in KEYS:
            raise UnknownKey(place, str(key), list(KEYS))
    text(f"{place}: texts", raw.get("texts"))
    pools = {}
    for size, tasks in _mapping(f"{place}: pools", raw.get("pools")).items():
        whole_number(f"{place}: the name of a pool", size)
        fine = isinstance(tasks, list) and bool(tasks) and all(isinstance(task, str) for task in tasks)
        require(
            fine and len(set(tasks)) == len(tasks), f"{place}: pools.{size}", tasks, "must be a list of tasks, each named once"
        )
        pools[size] = tuple(tasks)
    require(bool(pools), f"{place}: pools", raw.get("pools"), "must hold a pool of tasks, for example 8: [banking77, clinc150]")
    every = set(max(pools.values(), key=len))
    for size, names in pools.items():
        require(set(names) <= every, f"{place}: pools.{size}", list(names), "must hold only tasks of the largest pool")
    roles = {}
    for name, given in _mapping(f"{place}: roles", raw.get("roles")).items():
        if given:
            roles[str(name)] = from_mapping(SentenceRole, _mapping(f"{place}: roles.{name}", given), f"{place}: roles.{name}")
            text(f"{place}: roles.{name}.model", roles[str(name)].model)
    recipe = from_mapping(FineTuneSentences, _mapping(f"{place}: fine_tune", raw.get("fine_tune")), f"{place}: fine_tune")
    return Sentences(raw["texts"], pools, roles, recipe)


def _mapping(place: str, raw: Any) -> dict[Any, Any]:
    require(raw is None or isinstance(raw, Mapping), place, raw, "must be a mapping")
    return dict(raw or {})
