"""The studies of params.yaml as frozen dataclasses: experiments that make many models of one role and pool and keep no weights.

Each is one stage of the same name and writes outputs/<suite>/<study>/<key>/; `gather` copies its small files to results/. Knows
nothing of torch, models or where results go.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from featcal.errors import UnknownKey
from featcal.merging.settings import settings_of
from featcal.rivals.settings import IntervMerge, ProbSurgery, Surgery, SurgeryV2
from featcal.settings import Calibration, from_mapping, number, require, several, text, whole_number
from reproduction.experiments.beyond import BeyondStudy
from reproduction.experiments.choices import ChoicesStudy
from reproduction.experiments.entries import Entry, for_suite
from reproduction.experiments.runs import ADAPTER_SETTINGS, SETTINGS, Draw, Reading, role_and_pool
from reproduction.experiments.sweeps import Sweep, SweepStudy
from reproduction.experiments.tunings import TuneStudy

ADAPTER_BATCH = 250  # images encoded at a time, as in `adapt`: another number moves the last bits of a feature
CORRUPTIONS = ("gaussian_noise", "motion_blur", "fog")
TRAINED = ("prodistill", "surgery_v2", "interv_merge")  # what trains for minutes behind a merger
TEXT_CORRUPTIONS = ("typing_errors", "dropped_words", "swapped_words")


@dataclass(frozen=True)
class Rivals:
    """The three ways to calibrate that a study holds against each other.

    setting: the word of their settings in results.   stream: what the adapters see; FeatCal sees training samples.
    batch:   of FeatCal; the result depends on it in the last bits only.
    """

    setting: str
    featcal: Calibration
    surgery: Surgery
    prob_surgery: ProbSurgery
    stream: Literal["test_unlabelled", "unlabelled", "train"] = "test_unlabelled"
    batch: int = 128

    def __post_init__(self) -> None:
        require(self.setting in SETTINGS, "rivals.setting", self.setting, f"must be one of {', '.join(SETTINGS)}")
        whole_number("rivals.batch", self.batch)
        self.draw("surgery", 1, 0)

    def draw(self, method: str, samples: int, seed: int) -> Draw:
        """Which images a method sees, n of each task."""
        if method == "featcal":
            return Draw("train", samples, self.batch, seed)
        return Draw(self.stream, samples, ADAPTER_BATCH, seed)


@dataclass(frozen=True)
class Study:
    """What every study has: the models it is about."""

    role: str
    pool: int
    upstream: str


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
class TheoryStudy(Study):
    """Propositions 1 to 8 and both corollaries, checked on one merged model, its experts and FeatCal with these settings.

    images: of each task.   traced: of those, the images that are followed along their segments and matched token by token.
    nodes: numbers of quadrature nodes at which path-averaged Jacobians are tried.
    """

    setting: str
    featcal: Calibration
    samples: int
    batch: int
    seed: int
    images: int
    traced: int
    nodes: tuple[int, ...]

    def __post_init__(self) -> None:
        require(self.setting in SETTINGS, "theory.setting", self.setting, f"must be one of {', '.join(SETTINGS)}")
        for name in ("samples", "batch", "images", "traced"):
            whole_number(f"theory.{name}", getattr(self, name))
        require(self.traced <= self.images, "theory.traced", self.traced, f"must be at most theory.images, {self.images}")
        whole_number("theory.seed", self.seed, least=0)
        several("theory.nodes", self.nodes)


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
class FieldStudy:
    """Every merger from the same experts and the same samples: as it is, with FeatCal, adapters and SVC behind it.

    mergers: settings by method; of a list of scales, validation samples choose one, as in the sources.
    best_behind: mergers behind which FeatCal's preset best stands too, as it takes twice as long; all where None.
    samples, batch, seed: of each task, for what looks at training samples.   rows: validation samples of each task.
    tangent: scales of task arithmetic in the tangent space, of which validation samples choose one; none where it is not run, as
             where experts are not fine-tuned here.
    scored: how many test samples of each task are scored; all where None.
    trained: mergers behind which what costs minutes is put too: surgery_v2, interv_merge, and ProDistill in so many epochs.
    Methods that adapt without labels see the stream of `rivals`, which holds none of the samples that are scored.
    """

    role: str
    pool: int
    rivals: Rivals
    mergers: Mapping[str, Mapping[str, Any]]
    samples: int
    batch: int
    seed: int
    rows: int
    trained: tuple[str, ...]
    surgery_v2: SurgeryV2
    interv_merge: IntervMerge
    epochs: int
    best_behind: tuple[str, ...] | None = None
    tangent: tuple[float, ...] = ()
    scored: int | None = None

    def __post_init__(self) -> None:
        for key in ("samples", "batch", "rows", "epochs"):
            whole_number(f"field.{key}", getattr(self, key))
        if self.scored is not None:
            whole_number("field.scored", self.scored)
        if self.tangent:
            several("field.tangent", self.tangent, number)
        whole_number("field.seed", self.seed, least=0)
        for key in ("trained", "best_behind"):
            for merger in getattr(self, key) or ():
                require(merger in self.mergers, f"field.{key}", merger, f"must be one of {', '.join(self.mergers)}")
        scored = "must hold other samples than are scored: train, or unlabelled"
        require(self.rivals.stream != "test_unlabelled", "field.rivals.stream", self.rivals.stream, scored)
        for method in self.mergers:
            for scale in self.scales(method) or (None,):
                more = {} if scale is None else {"scale": scale}
                settings_of(method, {**self.settings(method), **more}, f"field.mergers.{method}")

    def behind(self, merger: str) -> list[str]:
        """What is put behind a merger, by method: `featcal_best` is FeatCal at its preset best."""
        best = ["featcal_best"] if self.best_behind is None or merger in self.best_behind else []
        return ["featcal", *best, "surgery", "prob_surgery", "svc", *(TRAINED if merger in self.trained else ())]

    def scales(self, method: str) -> tuple[float, ...]:
        """The scales of a method of which validation samples choose one; none where its settings hold no list."""
        given = self.mergers[method].get("scale")
        return tuple(given) if isinstance(given, list) else ()

    def settings(self, method: str) -> dict[str, Any]:
        """The settings of a method, but for a scale that is chosen."""
        return {key: value for key, value in self.mergers[method].items() if key != "scale" or not self.scales(method)}


STUDIES: dict[str, type[Any]] = {
    "samples": SamplesStudy, "corrupted": CorruptedStudy, "cost": CostStudy, "sweep": SweepStudy, "theory": TheoryStudy,
    "choices": ChoicesStudy, "tune": TuneStudy, "task_counts": TaskCountsStudy, "beyond": BeyondStudy,
    "expert_seeds": ExpertSeedsStudy, "field": FieldStudy,
}  # fmt: skip
NESTED: dict[str, type[Any]] = {
    "rivals": Rivals, "featcal": Calibration, "surgery": Surgery, "prob_surgery": ProbSurgery, "around": Sweep,
    "at_papers": Calibration, "reading": Reading, "paper": Calibration, "suite": Calibration,
    "surgery_v2": SurgeryV2, "interv_merge": IntervMerge,
}  # fmt: skip
SHARED = ("rivals", "paper")


def shared(key: str, entry: Any, suite: str) -> Entry:
    """What the studies of one role and pool have in common: `rivals`, and `paper`, FeatCal's settings of the paper."""
    role_and_pool(key, "studied")
    group = for_suite(f"studied.{key}", entry, suite) or {}
    for word, settings in group.items():
        if word not in SHARED:
            raise UnknownKey(f"studied.{key}.{suite}", str(word), list(SHARED))
        require(isinstance(settings, dict), f"studied.{key}.{suite}.{word}", settings, "must be a mapping of settings")
    return group


def study_run(kind: str, key: str, entry: Any, suite: str, studied: Mapping[str, Entry] | None = None) -> Any:
    """One entry of a study's section, as its dataclass; None where the suite does not run it.

    studied: what `shared` returns, by role and pool; a study's own words count more.
    """
    role, pool = role_and_pool(key, kind)
    chosen = for_suite(f"{kind}.{key}", entry, suite)
    if chosen is None:
        return None
    place, common = f"{kind}.{key}.{suite}", (studied or {}).get(key, {})
    return _filled(STUDIES[kind], {"role": role, "pool": pool, **_with_shared(STUDIES[kind], chosen, common, place)}, place)


def _with_shared(kind: type[Any], own: Entry, common: Entry, place: str) -> dict[str, Any]:
    """A study's words, with those that it leaves to what studies have in common."""
    rivals, paper = common.get("rivals", {}), common.get("paper")
    featcal, setting = rivals.get("featcal"), rivals.get("setting")
    values = {"rivals": rivals, "setting": setting, "featcal": featcal, "paper": paper, "suite": featcal}
    found = {f.name: values[f.name] for f in fields(kind) if values.get(f.name)}
    if kind is TuneStudy and setting == "paper":
        found["suite"] = None  # nothing was chosen with labels
    found |= own
    if isinstance(own.get("rivals"), dict):
        found["rivals"] = {**rivals, **own["rivals"]}
    if isinstance(own.get("at_papers"), bool):
        require(not own["at_papers"] or paper is not None, f"{place}.at_papers", True, "must be false without `paper` in studied")
        found["at_papers"] = paper if own["at_papers"] else None
    if isinstance(own.get("around"), list):
        at = {"paper": {"featcal": paper}, setting: {"featcal": featcal}}
        found["around"] = [{**at.get(one.get("setting"), {}), **one} for one in own["around"]]
    return found


def _filled(kind: type[Any], mapping: Mapping[str, Any], place: str) -> Any:
    """from_mapping, with mappings inside made into their own dataclasses and YAML's lists into tuples."""
    values = {}
    for key, value in mapping.items():
        if key in NESTED and isinstance(value, list):
            value = [_filled(NESTED[key], part, f"{place}.{key}") for part in value]
        elif key in NESTED and value is not None:
            value = _filled(NESTED[key], value, f"{place}.{key}")
        values[key] = tuple(value) if isinstance(value, list) else value
    return from_mapping(kind, values, place)
