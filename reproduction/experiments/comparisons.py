"""Studies that hold FeatCal against its rivals, as settings. Knows nothing of torch,
models or where results go.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, NonNegativeInt, PositiveInt

from featcal.settings import Calibration, Distinct, Settings, require
from reproduction.experiments.rivals import Rivals, Study
from reproduction.experiments.runs import AdapterWord, Counts, Each, Seeds

Corruption = Literal["gaussian_noise", "motion_blur", "fog"]
TextCorruption = Literal["typing_errors", "dropped_words", "swapped_words"]


def at_papers_once(place: str, at_papers: Calibration | None, rivals: Rivals) -> None:
    """Raise BadSetting where a study would run FeatCal at the paper's settings twice."""
    twice = at_papers is not None and rivals.setting == "paper"
    require(
        not twice,
        f"{place}.at_papers",
        at_papers,
        "must be left out where the rivals' settings are the paper's",
    )


class SamplesStudy(Study):
    """Table 12, Figure 3 and Table 13: the rivals at every number of images per task and every
    seed.
    """

    section = "samples"
    rivals: Rivals
    samples: Counts
    seeds: Seeds


class CorruptedStudy(Study):
    """Table 6 and Figure 4: the rivals on corrupted calibration images, evaluated on clean test
    images.

    severity:  of images 3; of texts one or more of 1, 2 and 3.
    at_papers: FeatCal at the paper's settings too, where those of `rivals` are the suite's own.
    """

    section = "corrupted"
    rivals: Rivals
    corruptions: Each[Corruption] | Each[TextCorruption]
    severity: int | Each[Annotated[int, Field(ge=1, le=3)]]
    samples: PositiveInt
    seeds: Seeds
    at_papers: Calibration | None = None

    def check(self) -> None:
        fine = isinstance(self.severity, tuple) if self.of_texts else self.severity == 3
        require(
            fine,
            "corrupted.severity",
            self.severity,
            "must be 3, as the paper has it, or of texts a list of 1, 2 and 3",
        )
        at_papers_once("corrupted", self.at_papers, self.rivals)

    @property
    def of_texts(self) -> bool:
        """Whether texts are damaged."""
        return self.corruptions[0] in get_args(TextCorruption)

    @property
    def damages(self) -> tuple[str, ...]:
        """What results call each damage: of texts its name with the strength behind it."""
        strengths = (
            [""]
            if isinstance(self.severity, int)
            else [f"-{strength}" for strength in self.severity]
        )
        return tuple(
            corruption + strength for corruption in self.corruptions for strength in strengths
        )

    @property
    def ways(self) -> list[tuple[str, str]]:
        """Method and setting of every way to calibrate, the longest first; adapters on other
        samples also on training samples.
        """
        adapters = ("prob_surgery", "surgery")
        also = [("featcal", "paper")] if self.at_papers else []
        also += [
            (method, f"{self.rivals.setting}_train")
            for method in adapters
            if self.rivals.stream != "train"
        ]
        return [*((method, self.rivals.setting) for method in (*adapters, "featcal")), *also]


class TaskCountsStudy(Settings):
    """The gap that the rivals recover by the number of tasks: drawn parts of the pool, each merged
    anew.

    counts:    of tasks that are merged.   shuffles: the pool is shuffled so often, and cut each
               time into parts of every count:
               every task is in as many of them as any other.
    samples:   of each task. Adapters are trained on test images and, apart from those, on the
               training images that FeatCal sees;
               everything is scored on the test images that none of them has seen.
    at_papers: FeatCal at the paper's settings too, where those of `rivals` are the suite's own.
    """

    section = "task_counts"
    role: str
    pool: int
    upstreams: tuple[str, ...]
    rivals: Rivals
    counts: Counts
    shuffles: PositiveInt
    samples: PositiveInt
    seed: NonNegativeInt
    at_papers: Calibration | None = None

    def check(self) -> None:
        at_papers_once("task_counts", self.at_papers, self.rivals)

    @property
    def calibrations(self) -> dict[str, Calibration]:
        """FeatCal's settings by their word in results."""
        also = {"paper": self.at_papers} if self.at_papers else {}
        return {self.rivals.setting: self.rivals.featcal} | also


class CostStudy(Study):
    """Table 5: time and memory of each rival, alone in a process of its own.

    Adapters are trained twice, with kept features and as published, every batch encoded again.
    audit: steps after which the
    latter are scored; where there are none they are not trained.
    """

    section = "cost"
    rivals: Rivals
    samples: PositiveInt
    seed: NonNegativeInt
    audit: Annotated[tuple[PositiveInt, ...], Distinct]

    def check(self) -> None:
        steps = min(self.rivals.surgery.steps, self.rivals.prob_surgery.steps)
        there = max(self.audit, default=0) <= steps
        require(
            there, "cost.audit", self.audit, f"must not go beyond the {steps} steps that are made"
        )


class ExpertSeedsStudy(Settings):
    """The main comparison with experts of other trainings.

    upstreams: mergers.   settings: of FeatCal and of adapters.
    seeds: of the experts' trainings but the first, which `evaluate` scores.
    """

    section = "expert_seeds"
    role: str
    pool: int
    upstreams: tuple[str, ...]
    settings: tuple[AdapterWord, ...]
    seeds: Counts


class SecondEncoderStudy(Settings):
    """The main comparison with another encoder, whose experts, heads and models are made here, on
    the same texts.

    model: as a role of the suite tells it.   fine_tune: of its experts (FineTuneSentences).
    upstreams: mergers, with their settings of that role.   samples, seed: of each task, of FeatCal
    and the adapters alike.
    scored: how many test samples of each task count.
    """

    section = "second_encoder"
    role: str
    pool: int
    model: str
    fine_tune: Mapping[str, Any]
    upstreams: tuple[str, ...]
    rivals: Rivals
    paper: Calibration
    samples: PositiveInt
    seed: NonNegativeInt
    scored: PositiveInt
