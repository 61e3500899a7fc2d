"""The sentence encoders of a suite as frozen dataclasses: which encoders and texts play the roles
of the experiments.

A section of its own in suites/<name>.yaml. A role has the pools of this section, whose sizes are
those of images. Knows names and counts, opens nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from featcal.arguments import require_fits
from featcal.errors import UnknownKey
from featcal.settings import Checked, from_mapping, require, text, whole_number
from reproduction.experiments.params import mapping
from reproduction.experiments.runs import Names
from reproduction.suites.sentence_recipe import FineTuneSentences


@dataclass(frozen=True)
class SentenceRole(Checked):
    """One sentence encoder: a folder below the project, a hub id, or `pypi:<name>` for a package
    that holds one.
    """

    model: str


@dataclass(frozen=True)
class Sentences:
    """What plays the roles of sentence encoders; experts are fine-tuned here.

    texts: folder below the project with one folder per task.   pools: tasks by the size of the
    pool.
    """

    texts: str = ""
    pools: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    roles: Mapping[str, SentenceRole] = field(default_factory=dict)
    fine_tune: FineTuneSentences = field(default_factory=FineTuneSentences)


def sentences_of(place: str, raw: Any) -> Sentences:
    """The section `sentences` of a suite; nothing there where a suite has no encoders. Raises:
    UnknownKey, BadSetting.
    """
    if not (given := mapping(place, raw)):
        return Sentences()
    text(f"{place}: texts", given.get("texts"))
    roles, recipe = (
        mapping(f"{place}: {name}", given.get(name)) for name in ("roles", "fine_tune")
    )
    given["pools"] = pools_by_size(f"{place}: pools", given.get("pools"))
    given["roles"] = {
        str(k): from_mapping(SentenceRole, v, f"{place}: roles.{k}") for k, v in roles.items() if v
    }
    given["fine_tune"] = from_mapping(FineTuneSentences, recipe, f"{place}: fine_tune")
    return from_mapping(Sentences, given, place)


def pools_by_size(place: str, raw: Any, known: Sequence[str] = ()) -> dict[int, tuple[str, ...]]:
    """Tasks by the size of their pool, all in the largest one.   known: what a task may be;
    anything where there are none.

    Raises: UnknownKey, BadSetting.
    """
    pools = mapping(place, raw)
    require(bool(pools), place, raw, "must hold a pool of tasks, for example 8: [mnist, svhn]")
    for size, tasks in pools.items():
        whole_number(f"{place}: the name of a pool", size)
        require_fits(f"{place}.{size}", tasks, Names)
    largest = max(pools.values(), key=len)
    for size, tasks in pools.items():
        for task in tasks:
            if known and task not in known:
                raise UnknownKey(f"{place}.{size}", task, list(known))
        require(
            set(tasks) <= set(largest),
            f"{place}.{size}",
            tasks,
            "must hold only tasks of the largest pool",
        )
    return {size: tuple(tasks) for size, tasks in pools.items()}
