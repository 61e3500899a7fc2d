"""A suite as frozen dataclasses: which checkpoints and data play the roles of the experiments.

One file of suites/ each: mini (made from a seed), paper (hub), files (the user's own). Knows names
and counts, opens nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from featcal.data.processors import Processor
from featcal.errors import BadSetting, UnknownKey
from featcal.settings import Checked, Count, Natural, Share, from_mapping, require, whole_number
from reproduction.experiments.params import mapping, read_yaml
from reproduction.experiments.runs import Pool, require_known
from reproduction.suites.language import (
    FINE_TUNE,
    Experts,
    Language,
    LanguageRole,
    language_of,
    require_source,
)
from reproduction.suites.recipe import FineTune
from reproduction.suites.sentences import SentenceRole, Sentences, pools_by_size, sentences_of


@dataclass(frozen=True)
class Data(Checked):
    """Where images come from. mini: drawn with a domain shift of `strength`; files: one folder per
    task in `folder`; hub: ids.

    processor: what resizes them for a model, pil or torchvision; pictures of mini are drawn at
    their models' size.
    """

    source: Literal["mini", "files", "hub"]
    train: Count | None = None  # images per task; None: all there are
    validation: Count | None = None
    test: Count | None = None
    seed: Natural = 0
    strength: Share = 0.0
    folder: str | None = None
    processor: Processor = "pil"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_source(self, "train", "validation", "test")
        needless = self.source != "mini" or self.processor == "pil"
        require(
            needless,
            "processor",
            self.processor,
            "must be left out: pictures of mini are drawn at their models' size",
        )


@dataclass(frozen=True)
class Role(Checked):
    """One size of model: a CLIP folder or hub id, and its experts: `fine_tune` them here, or a
    pattern with {task}.
    """

    clip: str
    experts: Experts = FINE_TUNE


@dataclass(frozen=True)
class Suite(Checked):
    """What plays the roles; a role that is null is not run.

    heads: prompts, class_means, or auto: prompts where the text tower knows every word of the class
    names.
    """

    name: str
    data: Data
    pools: Mapping[int, tuple[str, ...]]
    roles: Mapping[str, Role]
    fine_tune: FineTune
    heads: Literal["prompts", "class_means", "auto"]
    expert_seed: Natural
    expert_steps: Mapping[str, int]  # tasks whose experts need other than fine_tune.steps
    workers: Natural
    device: Literal["cpu", "cuda", "auto"]  # auto: the GPU where there is one
    language: Language = Language()
    sentences: Sentences = Sentences()

    def __post_init__(self) -> None:
        super().__post_init__()
        for task, steps in self.expert_steps.items():
            require_known("expert_steps", task, self.tasks)
            whole_number(f"expert_steps.{task}", steps)

    def fine_tuning(self, task: str) -> FineTune:
        """How the expert of one task is trained."""
        return replace(self.fine_tune, steps=self.expert_steps.get(task, self.fine_tune.steps))

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
    for key in ("data", "pools", "roles", "fine_tune", "expert_steps"):
        require(key in raw, place, sorted(raw), f"lacks {key}")
    data, roles = (
        from_mapping(Data, raw["data"], f"{place}: data"),
        mapping(f"{place}: roles", raw["roles"]),
    )
    made = {
        "name": name,
        "data": data,
        "pools": pools_by_size(f"{place}: pools", raw["pools"], _known_tasks(data.source)),
        "roles": {
            str(k): from_mapping(Role, v, f"{place}: roles.{k}") for k, v in roles.items() if v
        },
        "fine_tune": from_mapping(
            FineTune, mapping(f"{place}: fine_tune", raw["fine_tune"]), f"{place}: fine_tune"
        ),
        "expert_steps": mapping(f"{place}: expert_steps", raw["expert_steps"]),
        "language": language_of(f"{place}: language", raw.get("language")),
        "sentences": sentences_of(f"{place}: sentences", raw.get("sentences")),
    }
    return from_mapping(Suite, {**raw, **made}, place)


def _known_tasks(source: str) -> tuple[str, ...]:
    """The tasks there are to choose from; none where folders of the user's own say it."""
    if source == "mini":
        from reproduction.mini.tasks import TASKS as drawn

        return tuple(drawn)
    if source == "hub":
        from reproduction.data.registry import TASKS as listed

        return tuple(listed)
    return ()
