"""The sentence encoders of a suite as settings: which encoders and texts play the roles
of the experiments.

A section of its own in suites/<name>.yaml. A role has the pools of this section, whose sizes are
those of images. Knows names and counts, opens nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import PositiveInt

from featcal.errors import UnknownKey
from featcal.settings import Settings, require
from reproduction.experiments.runs import Names
from reproduction.suites.language import Present
from reproduction.suites.sentence_recipe import FineTuneSentences


class SentenceRole(Settings):
    """One sentence encoder: a folder below the project, a hub id, or `pypi:<name>` for a package
    that holds one.
    """

    model: str


class Sentences(Settings):
    """What plays the roles of sentence encoders; experts are fine-tuned here.

    texts: folder below the project with one folder per task.   pools: tasks by the size of the
    pool.
    """

    section = "sentences"
    texts: str = ""
    pools: Mapping[PositiveInt, Names] = {}
    roles: Annotated[Mapping[str, SentenceRole], Present] = {}
    fine_tune: FineTuneSentences = FineTuneSentences()

    def check(self) -> None:
        if self.roles:
            require(bool(self.texts), "sentences.texts", None, "must name the folder of the texts")
            require_nested("sentences.pools", self.pools)


def require_nested(
    place: str, pools: Mapping[int, Sequence[str]], known: Sequence[str] = ()
) -> None:
    """Raise unless there are pools, all of them in the largest one.   known: tasks there are;
    anything where there are none.

    Raises: UnknownKey, BadSetting.
    """
    require(bool(pools), place, pools, "must hold a pool of tasks, for example 8: [mnist, svhn]")
    largest = max(pools.values(), key=len)
    for size, tasks in pools.items():
        for task in tasks:
            if known and task not in known:
                raise UnknownKey(f"{place}.{size}", task, list(known))
        inside = set(tasks) <= set(largest)
        require(inside, f"{place}.{size}", tasks, "must hold only tasks of the largest pool")
