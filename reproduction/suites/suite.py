"""A suite as frozen dataclasses: which checkpoints and data play the roles of the experiments.

One file of suites/ each: mini (made from a seed), paper (hub), files (the user's own). Knows names and counts, opens nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from featcal.data.processors import PROCESSORS, Processor
from featcal.errors import BadSetting, UnknownKey
from featcal.settings import from_mapping, number, require, text, whole_number
from reproduction.experiments.params import read_yaml
from reproduction.experiments.runs import Pool
from reproduction.suites.language import Language, LanguageRole, language_of
from reproduction.suites.recipe import FineTune
from reproduction.suites.sentences import SentenceRole, Sentences, sentences_of


@dataclass(frozen=True)
class Data:
    """Where images come from. mini: drawn with a domain shift of `strength`; files: one folder per task in `folder`; hub: ids.

    processor: what resizes them for a model, pil or torchvision; pictures of mini are drawn at their models' size.
    """

    source: Literal["mini", "files", "hub"]
    train: int | None = None  # images per task; None: all there are
    validation: int | None = None
    test: int | None = None
    seed: int = 0
    strength: float = 0.0
    folder: str | None = None
    processor: Processor = "pil"


@dataclass(frozen=True)
class Role:
    """One size of model: a CLIP folder or hub id, and its experts: `fine_tune` them here, or a pattern with {task}."""

    clip: str
    experts: str = "fine_tune"


@dataclass(frozen=True)
class Suite:
    """What plays the roles; a role that is null is not run.

    heads: prompts, class_means, or auto: prompts where the text tower knows every word of the class names.
    """

    name: str
    data: Data
    pools: Mapping[int, tuple[str, ...]]
    roles: Mapping[str, Role]
    fine_tune: FineTune
    heads: Literal["prompts", "class_means", "auto"]
    expert_seed: int
    expert_steps: Mapping[str, int]  # tasks whose experts need other than fine_tune.steps
    workers: int
    device: Literal["cpu", "cuda", "auto"]  # auto: the GPU where there is one
    language: Language = Language()
    sentences: Sentences = Sentences()

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
        """Tasks of the pools of a role: of texts by their name, of sentences and of images by their size."""
        if role in self.language.roles:
            return {**self.language.pools}
        return {**(self.sentences.pools if role in self.sentences.roles else self.pools)}

    def tasks_of(self, role: str, pool: Pool) -> tuple[str, ...]:
        """The tasks of one pool of a role; raises BadSetting for a pool it does not have."""
        pools = self.pools_of(role)
        if pool not in pools:
            known = ", ".join(map(str, pools))
            raise BadSetting("pool", pool, f"is not in suites/{self.name}.yaml for {role}; there are {known}")
        return pools[pool]


KEYS = ("data", "pools", "roles", "fine_tune", "heads", "expert_seed", "expert_steps", "workers", "device")
LANGUAGE, SENTENCES = "language", "sentences"  # a suite may be without them


def load_suite(root: Path, name: str) -> Suite:
    """The suite of `suites/<name>.yaml`. Raises: MissingPath, UnknownKey, BadSetting."""
    path = root / "suites" / f"{name}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in (root / "suites").glob("*.yaml"))
        raise UnknownKey("suite", name, known)
    raw = read_yaml(path)
    for key in raw:
        if key not in (*KEYS, LANGUAGE, SENTENCES):
            raise UnknownKey(str(path), str(key), [*KEYS, LANGUAGE, SENTENCES])
    for key in KEYS:
        require(key in raw, f"suites/{name}.yaml", sorted(raw), f"lacks {key}")
    place = f"suites/{name}.yaml"
    whole_number(f"{place}: expert_seed", raw["expert_seed"], least=0)
    whole_number(f"{place}: workers", raw["workers"], least=0)
    data = _data(f"{place}: data", raw["data"])
    pools = _pools(f"{place}: pools", raw["pools"], data.source)
    given = _mapping(f"{place}: roles", raw["roles"])
    return Suite(
        name=name,
        data=data,
        pools=pools,
        roles={str(k): _role(f"{place}: roles.{k}", v) for k, v in given.items() if v},
        fine_tune=_fine_tune(f"{place}: fine_tune", raw["fine_tune"]),
        heads=_one_of(f"{place}: heads", raw["heads"], "prompts", "class_means", "auto"),
        expert_seed=raw["expert_seed"],
        expert_steps=_expert_steps(f"{place}: expert_steps", raw["expert_steps"], max(pools.values(), key=len)),
        workers=raw["workers"],
        device=_one_of(f"{place}: device", raw["device"], "cpu", "cuda", "auto"),
        language=language_of(f"{place}: {LANGUAGE}", raw.get(LANGUAGE)),
        sentences=sentences_of(f"{place}: {SENTENCES}", raw.get(SENTENCES)),
    )


def _data(place: str, raw: Mapping[str, Any]) -> Data:
    data = from_mapping(Data, raw, place)
    require(data.source in ("mini", "files", "hub"), f"{place}.source", data.source, "must be mini, files or hub")
    for name in ("train", "validation", "test"):
        if getattr(data, name) is not None or data.source == "mini":
            whole_number(f"{place}.{name}", getattr(data, name))
    whole_number(f"{place}.seed", data.seed, least=0)
    number(f"{place}.strength", data.strength)
    require(0 <= data.strength <= 1, f"{place}.strength", data.strength, "must lie in [0, 1]")
    require(data.processor in PROCESSORS, f"{place}.processor", data.processor, "must be pil or torchvision")
    needless = data.source != "mini" or "processor" not in raw
    require(needless, f"{place}.processor", data.processor, "must be left out: pictures of mini are drawn at their models' size")
    require(data.source != "files" or bool(data.folder), f"{place}.folder", data.folder, "must name the folder with your tasks")
    return data


def _mapping(place: str, raw: Any) -> Mapping[str, Any]:
    """A mapping; nothing at all stands for an empty one."""
    require(raw is None or isinstance(raw, dict), place, raw, "must be a mapping")
    return dict(raw or {})


def _pools(place: str, raw: Any, source: str) -> dict[int, tuple[str, ...]]:
    pools = _mapping(place, raw)
    require(bool(pools), place, raw, "must hold a pool of tasks, for example 8: [mnist, svhn]")
    for size, tasks in pools.items():
        whole_number(f"{place}: the name of a pool", size)
        fine = isinstance(tasks, list) and bool(tasks) and all(isinstance(task, str) for task in tasks)
        require(fine and len(set(tasks)) == len(tasks), f"{place}.{size}", tasks, "must be a list of tasks, each named once")
    known = _known_tasks(source) or max(pools.values(), key=len)
    for size, tasks in pools.items():
        for task in tasks:
            if task not in known:
                raise UnknownKey(f"{place}.{size}", task, list(known))
    every = set(max(pools.values(), key=len))
    for size, tasks in pools.items():
        require(set(tasks) <= every, f"{place}.{size}", tasks, "must hold only tasks of the largest pool")
    return {size: tuple(tasks) for size, tasks in pools.items()}


def _known_tasks(source: str) -> tuple[str, ...]:
    """The tasks there are to choose from; none where folders of the user's own say it."""
    if source == "mini":
        from reproduction.mini.tasks import TASKS as drawn

        return tuple(drawn)
    if source == "hub":
        from reproduction.data.registry import TASKS as listed

        return tuple(listed)
    return ()


def _role(place: str, raw: Any) -> Role:
    role = from_mapping(Role, raw, place)
    text(f"{place}.clip", role.clip)
    text(f"{place}.experts", role.experts)
    fine = role.experts == "fine_tune" or "{task}" in role.experts
    require(fine, f"{place}.experts", role.experts, "must be fine_tune, or a hub id with {task} in it")
    return role


def _fine_tune(place: str, raw: Any) -> FineTune:
    chosen = _mapping(place, raw)
    for name, value in chosen.items():
        if name == "frozen":
            fine = isinstance(value, list) and all(isinstance(start, str) for start in value)
            require(fine, f"{place}.frozen", value, "must be a list of beginnings of parameter names")
        else:
            number(f"{place}.{name}", value)
    return from_mapping(FineTune, chosen, place)


def _expert_steps(place: str, raw: Any, tasks: tuple[str, ...]) -> dict[str, int]:
    steps = dict(_mapping(place, raw))
    for task, value in steps.items():
        if task not in tasks:
            raise UnknownKey(place, str(task), list(tasks))
        whole_number(f"{place}.{task}", value)
    return steps


def _one_of(place: str, value: Any, *words: str) -> Any:
    require(value in words, place, value, f"must be one of {', '.join(words)}")
    return value
