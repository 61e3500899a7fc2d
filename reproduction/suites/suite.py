"""A suite as settings: which checkpoints and data play the roles of the experiments.

One file of suites/ each: mini (made from a seed), paper (hub), files (the user's own). Knows names
and counts, opens nothing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import NonNegativeInt, PositiveInt

from featcal.errors import BadSetting, UnknownKey
from featcal.settings import Fraction, Settings, require
from reproduction.experiments.params import read_yaml
from reproduction.experiments.runs import Names, Pool, require_known
from reproduction.suites.language import (
    FINE_TUNE,
    Experts,
    Language,
    LanguageRole,
    Present,
    require_source,
)
from reproduction.suites.recipe import FineTune
from reproduction.suites.sentences import SentenceRole, Sentences, require_nested
from reproduction.suites.sources import Processor

SECTIONS = ("language", "sentences")  # null or left out where a suite has none


class Data(Settings):
    """Where images come from. mini: drawn with a domain shift of `strength`; files: one folder per
    task in `folder`; hub: ids.

    processor: what resizes them for a model, pil or torchvision; pictures of mini are drawn at
    their models' size.
    """

    source: Literal["mini", "files", "hub"]
    train: PositiveInt | None = None  # images per task; None: all there are
    validation: PositiveInt | None = None
    test: PositiveInt | None = None
    seed: NonNegativeInt = 0
    strength: Fraction = 0.0
    folder: str | None = None
    processor: Processor = "pil"

    def check(self) -> None:
        require_source(self, "train", "validation", "test")
        needless = self.source != "mini" or self.processor == "pil"
        require(
            needless,
            "processor",
            self.processor,
            "must be left out: pictures of mini are drawn at their models' size",
        )


class Role(Settings):
    """One size of model: a CLIP folder or hub id, and its experts: `fine_tune` them here, or a
    pattern with {task}.
    """

    clip: str
    experts: Experts = FINE_TUNE


class Suite(Settings):
    """What plays the roles; a role that is null is not run.

    heads: prompts, class_means, or auto: prompts where the text tower knows every word of the class
    names.
    """

    name: str
    data: Data
    pools: Mapping[PositiveInt, Names]
    roles: Annotated[Mapping[str, Role], Present]
    fine_tune: FineTune
    heads: Literal["prompts", "class_means", "auto"]
    expert_seed: NonNegativeInt
    expert_steps: Mapping[str, PositiveInt]  # tasks whose experts need other than fine_tune.steps
    workers: NonNegativeInt
    device: Literal["cpu", "cuda", "auto"]  # auto: the GPU where there is one
    language: Language = Language()
    sentences: Sentences = Sentences()

    def check(self) -> None:
        require_nested("pools", self.pools, _known_tasks(self.data.source))
        for task in self.expert_steps:
            require_known("expert_steps", task, self.tasks)

    def fine_tuning(self, task: str) -> FineTune:
        """How the expert of one task is trained."""
        return self.fine_tune.but(steps=self.expert_steps.get(task, self.fine_tune.steps))

    @property
    def tasks(self) -> tuple[str, ...]:
        """Every task of images in any pool, in the order of the largest."""
        return max(self.pools.values(), key=len)

    @property
    def every_role(self) -> dict[str, Role | LanguageRole | SentenceRole]:
        """Models of images, of sentences and of texts."""
        return {**self.roles, **self.sentences.roles, **self.language.roles}

    def pools_of(self, role: str) -> dict[Pool, tuple[str, ...]]:
        """Tasks of the pools of a role: of texts by their name, of sentences and of images by their
        size.
        """
        if role in self.language.roles:
            return {**self.language.pools}
        return {**(self.sentences.pools if role in self.sentences.roles else self.pools)}

    def tasks_of(self, role: str, pool: Pool) -> tuple[str, ...]:
        """The tasks of one pool of a role; raises BadSetting for a pool it does not have."""
        pools = self.pools_of(role)
        if pool not in pools:
            known = ", ".join(map(str, pools))
            raise BadSetting(
                "pool", pool, f"is not in suites/{self.name}.yaml for {role}; there are {known}"
            )
        return pools[pool]


def load_suite(root: Path, name: str) -> Suite:
    """The suite of `suites/<name>.yaml`. Raises: MissingPath, UnknownKey, BadSetting."""
    place = f"suites/{name}.yaml"
    if not (root / place).is_file():
        known = sorted(p.stem for p in (root / "suites").glob("*.yaml"))
        raise UnknownKey("suite", name, known)
    raw = read_yaml(root / place)
    given = {key: value for key, value in raw.items() if key not in SECTIONS or value}
    return Suite.from_mapping({**given, "name": name}, place)


def _known_tasks(source: str) -> tuple[str, ...]:
    """The tasks there are to choose from; none where folders of the user's own say it."""
    if source == "mini":
        from reproduction.mini import tasks

        return tuple(tasks.TASKS)
    if source == "hub":
        from reproduction.data import registry

        return tuple(registry.TASKS)
    return ()
