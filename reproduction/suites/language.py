"""The language half of a suite as frozen dataclasses: which text models and texts play the roles of the experiments.

A section of its own in suites/<name>.yaml, since texts, experts and scores of language models are other than those of images.
Knows names and counts, opens nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from featcal.errors import UnknownKey
from featcal.settings import from_mapping, require, text, whole_number
from reproduction.experiments.runs import TEXT_POOLS
from reproduction.suites.text_recipe import FineTuneText

# Which expert's adapter is at work in a test that is none of the experts' own domains is a choice: adapters know their task.
DOMAINS = {
    "math500": "math", "gsm8k": "math", "humaneval_plus": "coding", "mbpp_plus": "coding", "ifeval": "instruction",
    "arc_challenge": "instruction",
}  # fmt: skip


@dataclass(frozen=True)
class Texts:
    """Where texts come from. mini: drawn here; files: one folder per task in `folder`; hub: ids of the paper's data sets.

    train, validation, test: samples per task; None: all there are.   domain_train: of the experts' domains, which are wider than
    a task of GLUE.
    """

    source: Literal["mini", "files", "hub"]
    train: int | None = None
    domain_train: int | None = None
    validation: int | None = None
    test: int | None = None
    seed: int = 0
    folder: str | None = None


@dataclass(frozen=True)
class LanguageRole:
    """One language model: a folder or hub id, and its experts: `fine_tune` them here, or a pattern with {task}.

    fine_tune: how experts are trained here; with `lora`, and of fetched adapters, the expert is the dense model.
    steps:     of tasks that need other than fine_tune.steps.   dtype: in which the weights are kept.
    """

    model: str
    experts: str = "fine_tune"
    fine_tune: FineTuneText = field(default_factory=FineTuneText)
    steps: Mapping[str, int] = field(default_factory=dict)
    dtype: Literal["float32", "bfloat16"] = "float32"

    def fine_tuning(self, task: str) -> FineTuneText:
        """How the expert of one task is trained."""
        return replace(self.fine_tune, steps=self.steps.get(task, self.fine_tune.steps))


@dataclass(frozen=True)
class Language:
    """What plays the roles of language models.

    pools: tasks by pool; each has one expert per model.   tests: of the pool of domains, by its key, the task that
    lm-evaluation-harness knows, ours or a public one.
    """

    texts: Texts | None = None
    pools: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    roles: Mapping[str, LanguageRole] = field(default_factory=dict)
    tests: Mapping[str, str] = field(default_factory=dict)


def language_of(place: str, raw: Any) -> Language:
    """The section `language` of a suite; nothing there where a suite has no language models. Raises: UnknownKey, BadSetting."""
    require(raw is None or isinstance(raw, dict), place, raw, "must be a mapping")
    if not raw:
        return Language()
    for key in raw:
        if key not in ("texts", "pools", "roles", "tests"):
            raise UnknownKey(place, str(key), ["texts", "pools", "roles", "tests"])
    texts = _texts(f"{place}: texts", raw.get("texts"))
    given = _mapping(f"{place}: pools", raw.get("pools"))
    pools = {str(name): _names(f"{place}: pools.{name}", tasks) for name, tasks in given.items()}
    for name in pools:
        if name not in TEXT_POOLS:
            raise UnknownKey(f"{place}: pools", name, list(TEXT_POOLS))
    roles = {str(k): _role(f"{place}: roles.{k}", v) for k, v in _mapping(f"{place}: roles", raw.get("roles")).items() if v}
    tests = {str(k): str(v) for k, v in _mapping(f"{place}: tests", raw.get("tests")).items()}
    for name in tests:
        if name not in DOMAINS:
            raise UnknownKey(f"{place}: tests", name, list(DOMAINS))
    return Language(texts, pools, roles, tests)


def _texts(place: str, raw: Any) -> Texts:
    require(isinstance(raw, dict), place, raw, "must be a mapping with `source`")
    texts = from_mapping(Texts, raw, place)
    require(texts.source in ("mini", "files", "hub"), f"{place}.source", texts.source, "must be mini, files or hub")
    for name in ("train", "domain_train", "validation", "test"):
        if getattr(texts, name) is not None or texts.source == "mini":
            whole_number(f"{place}.{name}", getattr(texts, name))
    whole_number(f"{place}.seed", texts.seed, least=0)
    needed = "must name the folder with your tasks"
    require(texts.source != "files" or bool(texts.folder), f"{place}.folder", texts.folder, needed)
    return texts


def _role(place: str, raw: Any) -> LanguageRole:
    require(isinstance(raw, dict), place, raw, "must be a mapping with `model`")
    given = dict(raw)
    given["fine_tune"] = from_mapping(FineTuneText, _mapping(f"{place}.fine_tune", given.get("fine_tune")), f"{place}.fine_tune")
    role = from_mapping(LanguageRole, given, place)
    text(f"{place}.model", role.model)
    text(f"{place}.experts", role.experts)
    fine = role.experts == "fine_tune" or "{task}" in role.experts
    require(fine, f"{place}.experts", role.experts, "must be fine_tune, or a hub id with {task} in it")
    for task, steps in _mapping(f"{place}.steps", role.steps).items():
        whole_number(f"{place}.steps.{task}", steps)
    require(role.dtype in ("float32", "bfloat16"), f"{place}.dtype", role.dtype, "must be float32 or bfloat16")
    return role


def _names(place: str, raw: Any) -> tuple[str, ...]:
    fine = isinstance(raw, list) and bool(raw) and all(isinstance(name, str) for name in raw) and len(set(raw)) == len(raw)
    require(fine, place, raw, "must be a list of tasks, each named once")
    return tuple(raw)


def _mapping(place: str, raw: Any) -> dict[str, Any]:
    require(raw is None or isinstance(raw, Mapping), place, raw, "must be a mapping")
    return dict(raw or {})
