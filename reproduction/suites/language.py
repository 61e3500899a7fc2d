"""The language half of a suite as frozen dataclasses: which text models and texts play the roles of
the experiments.

A section of its own in suites/<name>.yaml, since texts, experts and scores of language models are
other than those of images. Knows names and counts, opens nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from featcal.arguments import require_fits
from featcal.settings import Checked, Count, Natural, from_mapping, require, whole_number
from reproduction.experiments.params import mapping
from reproduction.experiments.runs import TEXT_POOLS, Names, require_known
from reproduction.suites.text_recipe import FineTuneText

# Which expert's adapter is at work in a test that is none of the experts' own domains is a choice:
# adapters know their task.
DOMAINS = {
    "math500": "math", "gsm8k": "math", "humaneval_plus": "coding", "mbpp_plus": "coding", "ifeval": "instruction",
    "arc_challenge": "instruction",
}  # fmt: skip
FINE_TUNE = "fine_tune"


class MadeOrNamed:
    """For Annotated: experts that are fine-tuned here, or a pattern of their names."""

    def holds(self, experts: str) -> bool:
        return experts == FINE_TUNE or "{task}" in experts

    def __str__(self) -> str:
        return f": {FINE_TUNE}, or a hub id with {{task}} in it"


Experts = Annotated[str, MadeOrNamed()]


def require_source(given: Any, *counts: str) -> None:
    """Raise BadSetting unless a source of samples has what it needs: one that is drawn here counts,
    files a folder.
    """
    for name in counts if given.source == "mini" else ():
        whole_number(name, getattr(given, name))
    require(
        given.source != "files" or bool(given.folder),
        "folder",
        given.folder,
        "must name the folder with your tasks",
    )


@dataclass(frozen=True)
class Texts(Checked):
    """Where texts come from. mini: drawn here; files: one folder per task in `folder`; hub: ids of
    the paper's data sets.

    train, validation, test: samples per task; None: all there are.   domain_train: of the experts'
    domains, which are wider than
    a task of GLUE.
    """

    source: Literal["mini", "files", "hub"]
    train: Count | None = None
    domain_train: Count | None = None
    validation: Count | None = None
    test: Count | None = None
    seed: Natural = 0
    folder: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_source(self, "train", "domain_train", "validation", "test")


@dataclass(frozen=True)
class LanguageRole(Checked):
    """One language model: a folder or hub id, and its experts: `fine_tune` them here, or a pattern
    with {task}.

    fine_tune: how experts are trained here; with `lora`, and of fetched adapters, the expert is the
    dense model.
    steps:     of tasks that need other than fine_tune.steps.   dtype: in which the weights are
               kept.
    """

    model: str
    experts: Experts = FINE_TUNE
    fine_tune: FineTuneText = field(default_factory=FineTuneText)
    steps: Mapping[str, int] = field(default_factory=dict)
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        for task, steps in self.steps.items():
            whole_number(f"steps.{task}", steps)

    def fine_tuning(self, task: str) -> FineTuneText:
        """How the expert of one task is trained."""
        return replace(self.fine_tune, steps=self.steps.get(task, self.fine_tune.steps))


@dataclass(frozen=True)
class Language:
    """What plays the roles of language models.

    pools: tasks by pool; each has one expert per model.   tests: of the pool of domains, by its
    key, the task that
    lm-evaluation-harness knows, ours or a public one.
    """

    texts: Texts | None = None
    pools: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    roles: Mapping[str, LanguageRole] = field(default_factory=dict)
    tests: Mapping[str, str] = field(default_factory=dict)


def language_of(place: str, raw: Any) -> Language:
    """The section `language` of a suite; nothing there where a suite has no language models.
    Raises: UnknownKey, BadSetting.
    """
    if not (given := mapping(place, raw)):
        return Language()
    parts = {
        name: mapping(f"{place}: {name}", given.get(name)) for name in ("pools", "roles", "tests")
    }
    for part, known in (("pools", TEXT_POOLS), ("tests", tuple(DOMAINS))):
        for name in parts[part]:
            require_known(f"{place}: {part}", name, known)
    for name, tasks in parts["pools"].items():
        require_fits(f"{place}: pools.{name}", tasks, Names)
    given["texts"] = from_mapping(Texts, mapping(place, given.get("texts")), f"{place}: texts")
    given["pools"] = {name: tuple(tasks) for name, tasks in parts["pools"].items()}
    given["roles"] = {
        str(k): _role(f"{place}: roles.{k}", v) for k, v in parts["roles"].items() if v
    }
    given["tests"] = {name: str(test) for name, test in parts["tests"].items()}
    return from_mapping(Language, given, place)


def _role(place: str, raw: Any) -> LanguageRole:
    given = mapping(place, raw)
    recipe = mapping(f"{place}.fine_tune", given.get("fine_tune"))
    return from_mapping(
        LanguageRole,
        {**given, "fine_tune": from_mapping(FineTuneText, recipe, f"{place}.fine_tune")},
        place,
    )
