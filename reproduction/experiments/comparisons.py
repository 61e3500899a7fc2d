"""Studies that hold FeatCal against its rivals, as frozen dataclasses. Knows nothing of torch, models or where results go."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from featcal.settings import Calibration, require, several, text, whole_number
from reproduction.experiments.rivals import Rivals, Study
from reproduction.experiments.runs import ADAPTER_SETTINGS

CORRUPTIONS = ("gaussian_noise", "motion_blur", "fog")
TEXT_CORRUPTIONS = ("typing_errors", "dropped_words", "swapped_words")


@dataclass(frozen=True)
class SamplesStudy(Study):
    """Table 12, Figure 3 and Table 13: the rivals at every number of images per task and every seed."""

    rivals: Rivals
    samples: tuple[int, ...]
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        several("samples.samples", self.samples)
        several("samples.seeds", self.seeds, least=0)


@dataclass(frozen=True)
class CorruptedStudy(Study):
    """Table 6 and Figure 4: the rivals on corrupted calibration images, evaluated on clean test images.

    severity:  of images 3; of texts one or more of 1, 2 and 3.
    at_papers: FeatCal at the paper's settings too, where those of `rivals` are the suite's own.
    """

    rivals: Rivals
    corruptions: tuple[str, ...]
    severity: int | tuple[int, ...]
    samples: int
    seeds: tuple[int, ...]
    at_papers: Calibration | None = None

    def __post_init__(self) -> None:
        known = TEXT_CORRUPTIONS if self.of_texts else CORRUPTIONS
        fine = all(c in known for c in self.corruptions) and bool(self.corruptions)
        require(fine, "corrupted.corruptions", self.corruptions, f"must be a list of {', '.join(known)}")
        if self.of_texts:
            fine = isinstance(self.severity, tuple) and bool(self.severity) and set(self.severity) <= {1, 2, 3}
            require(fine, "corrupted.severity", self.severity, "must be a list of 1, 2 and 3")
        else:
            require(self.severity == 3, "corrupted.severity", self.severity, "must be 3, the only one the paper uses")
        whole_number("corrupted.samples", self.samples)
        several("corrupted.seeds", self.seeds, least=0)
        twice = self.at_papers is not None and self.rivals.setting == "paper"
        require(not twice, "corrupted.at_papers", self.at_papers, "must be left out where the rivals' settings are the paper's")

    @property
    def of_texts(self) -> bool:
        """Whether texts are damaged."""
        return any(corruption in TEXT_CORRUPTIONS for corruption in self.corruptions)

    @property
    def damages(self) -> tuple[str, ...]:
        """What results call each damage: of texts its name with the strength behind it."""
        strengths = [""] if isinstance(self.severity, int) else [f"-{strength}" for strength in self.severity]
        return tuple(corruption + strength for corruption in self.corruptions for strength in strengths)

    @property
    def ways(self) -> list[tuple[str, str]]:
        """Method and setting of every way to calibrate, the longest first; adapters on other samples also on training samples."""
        adapters = ("prob_surgery", "surgery")
        also = [("featcal", "paper")] if self.at_papers else []
        also += [(method, f"{self.rivals.setting}_train") for method in adapters if self.rivals.stream != "train"]
        return [*((method, self.rivals.setting) for method in (*adapters, "featcal")), *also]


@dataclass(frozen=True)
class TaskCountsStudy:
    """The gap that the rivals recover by the number of tasks: drawn parts of the pool, each merged anew.

    counts:    of tasks that are merged.   shuffles: the pool is shuffled so often, and cut each time into parts of every count:
               every task is in as many of them as any other.
    samples:   of each task. Adapters are trained on test images and, apart from those, on the training images that FeatCal sees;
               everything is scored on the test images that none of them has seen.
    at_papers: FeatCal at the paper's settings too, where those of `rivals` are the suite's own.
    """

    role: str
    pool: int
    upstreams: tuple[str, ...]
    rivals: Rivals
    counts: tuple[int, ...]
    shuffles: int
    samples: int
    seed: int
    at_papers: Calibration | None = None

    def __post_init__(self) -> None:
        for upstream in self.upstreams:
            text("task_counts.upstreams", upstream)
        several("task_counts.counts", self.counts)
        whole_number("task_counts.shuffles", self.shuffles)
        whole_number("task_counts.samples", self.samples)
        whole_number("task_counts.seed", self.seed, least=0)
        twice = self.at_papers is not None and self.rivals.setting == "paper"
        require(not twice, "task_counts.at_papers", self.at_papers, "must be left out where the rivals' settings are the paper's")

    @property
    def calibrations(self) -> dict[str, Calibration]:
        """FeatCal's settings by their word in results."""
        also = {"paper": self.at_papers} if self.at_papers else {}
        return {self.rivals.setting: self.rivals.featcal} | also


@dataclass(frozen=True)
class CostStudy(Study):
    """Table 5: time and memory of each rival, alone in a process of its own.

    Adapters are trained twice, with kept features and as published, every batch encoded again.   audit: steps after which the
    latter are scored; where there are none they are not trained.
    """

    rivals: Rivals
    samples: int
    seed: int
    audit: tuple[int, ...]

    def __post_init__(self) -> None:
        whole_number("cost.samples", self.samples)
        whole_number("cost.seed", self.seed, least=0)
        if self.audit:
            several("cost.audit", self.audit)
        steps = min(self.rivals.surgery.steps, self.rivals.prob_surgery.steps)
        require(
            max(self.audit, default=0) <= steps, "cost.audit", self.audit, f"must not go beyond the {steps} steps that are made"
        )


@dataclass(frozen=True)
class ExpertSeedsStudy:
    """The main comparison with experts of other trainings.

    upstreams: mergers.   settings: of FeatCal and of adapters.
    seeds: of the experts' trainings but the first, which `evaluate` scores.
    """

    role: str
    pool: int
    upstreams: tuple[str, ...]
    settings: tuple[str, ...]
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        for upstream in self.upstreams:
            text("expert_seeds.upstreams", upstream)
        for setting in self.settings:
            known = f"must be one of {', '.join(ADAPTER_SETTINGS)}"
            require(setting in ADAPTER_SETTINGS, "expert_seeds.settings", setting, known)
        several("expert_seeds.seeds", self.seeds)


@dataclass(frozen=True)
class SecondEncoderStudy:
    """The main comparison with another encoder, whose experts, heads and models are made here, on the same texts.

    model: as a role of the suite tells it.   fine_tune: of its experts (FineTuneSentences).
    upstreams: mergers, with their settings of that role.   samples, seed: of each task, of FeatCal and the adapters alike.
    scored: how many test samples of each task count.
    """

    role: str
    pool: int
    model: str
    fine_tune: Mapping[str, Any]
    upstreams: tuple[str, ...]
    rivals: Rivals
    paper: Calibration
    samples: int
    seed: int
    scored: int

    def __post_init__(self) -> None:
        text("second_encoder.model", self.model)
        for upstream in self.upstreams:
            text("second_encoder.upstreams", upstream)
        for name in ("samples", "scored"):
            whole_number(f"second_encoder.{name}", getattr(self, name))
        whole_number("second_encoder.seed", self.seed, least=0)
