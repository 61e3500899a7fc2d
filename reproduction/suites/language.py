"""The language half of a suite as settings: which text models and texts play the roles of
the experiments.

A section of its own in suites/<name>.yaml, since texts, experts and scores of language models are
other than those of images. Knows names and counts, opens nothing.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, NonNegativeInt, PositiveInt

from featcal.settings import Settings, require
from reproduction.experiments.runs import TEXT_POOLS, Names, require_known
from reproduction.suites.text_recipe import FineTuneText

# Which expert's adapter is at work in a test that is none of the experts' own domains is a choice:
# adapters know their task.
DOMAINS = {
    "math500": "math", "gsm8k": "math", "humaneval_plus": "coding", "mbpp_plus": "coding", "ifeval": "instruction",
    "arc_challenge": "instruction",
}  # fmt: skip
FINE_TUNE = "fine_tune"


def made_or_named(experts: str) -> str:
    """Return the experts' source. Raises: ValueError."""
    if experts != FINE_TUNE and "{task}" not in experts:
        raise ValueError(f"must be {FINE_TUNE}, or a hub id with {{task}} in it")
    return experts


def present(roles: Any) -> Any:
    """Return the roles without those that are null."""
    named = isinstance(roles, Mapping)
    return {key: role for key, role in roles.items() if role is not None} if named else roles


Experts = Annotated[str, AfterValidator(made_or_named)]
Present = BeforeValidator(present)


def require_source(given: Any, *counts: str) -> None:
    """Raise BadSetting unless a source of samples has what it needs: one that is drawn here counts,
    files a folder.
    """
    for name in counts if given.source == "mini" else ():
        require(getattr(given, name) is not None, name, None, "must be a number of samples")
    require(
        given.source != "files" or bool(given.folder),
        "folder",
        given.folder,
        "must name the folder with your tasks",
    )


class Texts(Settings):
    """Where texts come from. mini: drawn here; files: one folder per task in `folder`; hub: ids of
    the paper's data sets.

    train, validation, test: samples per task; None: all there are.   domain_train: of the experts'
    domains, which are wider than
    a task of GLUE.
    """

    source: Literal["mini", "files", "hub"]
    train: PositiveInt | None = None
    domain_train: PositiveInt | None = None
    validation: PositiveInt | None = None
    test: PositiveInt | None = None
    seed: NonNegativeInt = 0
    folder: str | None = None

    def check(self) -> None:
        require_source(self, "train", "domain_train", "validation", "test")


class LanguageRole(Settings):
    """One language model: a folder or hub id, and its experts: `fine_tune` them here, or a pattern
    with {task}.

    fine_tune: how experts are trained here; with `lora`, and of fetched adapters, the expert is the
    dense model.
    steps:     of tasks that need other than fine_tune.steps.   dtype: in which the weights are
               kept.
    """

    model: str
    experts: Experts = FINE_TUNE
    fine_tune: FineTuneText = FineTuneText()
    steps: Mapping[str, PositiveInt] = {}
    dtype: Literal["float32", "bfloat16"] = "float32"

    def fine_tuning(self, task: str) -> FineTuneText:
        """How the expert of one task is trained."""
        return self.fine_tune.but(steps=self.steps.get(task, self.fine_tune.steps))


class Language(Settings):
    """What plays the roles of language models.

    pools: tasks by pool; each has one expert per model.   tests: of the pool of domains, by its
    key, the task that
    lm-evaluation-harness knows, ours or a public one.
    """

    section = "language"
    texts: Texts | None = None
    pools: Mapping[str, Names] = {}
    roles: Annotated[Mapping[str, LanguageRole], Present] = {}
    tests: Mapping[str, str] = {}

    def check(self) -> None:
        for part, known in (("pools", TEXT_POOLS), ("tests", tuple(DOMAINS))):
            for name in getattr(self, part):
                require_known(f"language.{part}", name, known)
        require(
            self.texts is not None or not self.roles,
            "language.texts",
            None,
            "must say where texts come from",
        )
