"""The kinds of experiments of params.yaml as frozen dataclasses, each in the settings of one suite.

Every run has a role, a pool of tasks and, but for a merge, an `upstream`: the merged model it starts from. Knows nothing of
torch, models or where results go.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from featcal.errors import UnknownKey
from featcal.rivals.settings import AdapterMethod, MeanShift, ProbSurgery, Surgery
from featcal.settings import Calibration, number, require, text, whole_number

SETTINGS = ("suite", "paper")
# `suite` keeps the published code's proportion of an adapter to the width of the features, `paper` its absolute size: of images
# on test images, as in the method's own source, of texts on unlabelled ones that are not scored. `_train`: on what FeatCal sees;
# `_scored`: of texts, on the test texts themselves. A mean shift has no size, only a stream.
ADAPTER_SETTINGS = ("suite", "paper", "suite_train", "paper_train", "suite_scored", "paper_scored")
ADAPTERS: dict[str, type[AdapterMethod]] = {"surgery": Surgery, "prob_surgery": ProbSurgery, "mean_shift": MeanShift}
TEXT_ADAPTERS = ("surgery", "prob_surgery")  # those that stand before a language head
# Which images a method sees where params.yaml leaves `stream` out: those that the paper's comparison gave it.
STREAMS = {
    "adamerging": "test_unlabelled", "surgery": "test_unlabelled", "prob_surgery": "test_unlabelled",
    "mean_shift": "test_unlabelled", "regmean": "train", "regmean_plus_plus": "train", "lot": "train",
    "mats": "train", "fisher": "train",
}  # fmt: skip
Pool = int | str  # of images by the number of tasks, of texts by name
HEADLINE_POOL = 8  # of Tables 1 and 7, with every merger and all controls
TEXT_POOLS = GLUE_POOL, DOMAIN_POOL = "glue", "mergebench"
ANCHOR, RESCALED = "anchor", "rescaled"  # methods of the controls, as results call them
UNLABELLED = ("test_unlabelled", "unlabelled")  # streams without labels, of the scored samples or of others
SPLITS = {"train": "train", "test_unlabelled": "test", "unlabelled": "stream"}  # by the word of a stream


def role_and_pool(key: str, place: str = "role and pool") -> tuple[str, Pool]:
    """`clip_b32-8` as ("clip_b32", 8), `llama_3b-mergebench` as ("llama_3b", "mergebench"). Raises: UnknownKey."""
    role, _, pool = str(key).rpartition("-")
    if not role or not (pool.isdigit() or pool in TEXT_POOLS):
        raise UnknownKey(place, str(key), ["clip_b32-8", "clip_l14-8", "flan_t5_base-glue", "llama_3b-mergebench"])
    return role, int(pool) if pool.isdigit() else pool


def keys_of(run: Any) -> tuple[str, str]:
    """What a run belongs to: its role and pool (`clip_b32-14`), and one merged model of them (`clip_b32-8-wudi`)."""
    return f"{run.role}-{run.pool}", f"{run.role}-{run.pool}-{run.upstream}"


@dataclass(frozen=True)
class Draw:
    """The images or texts a method sees, labels unused.

    samples: of each task; None is the whole split, shuffled anew in every round.   batch: samples at a time.
    """

    stream: Literal["train", "test_unlabelled", "unlabelled"]
    samples: int | None
    batch: int
    seed: int = 42

    def __post_init__(self) -> None:
        require(self.stream in SPLITS, "draw.stream", self.stream, f"must be {' or '.join(SPLITS)}")
        if self.samples is not None:
            whole_number("draw.samples", self.samples)
        whole_number("draw.batch", self.batch)
        whole_number("draw.seed", self.seed, least=0)

    @property
    def split(self) -> str:
        return SPLITS[self.stream]


@dataclass(frozen=True)
class MergeRun:
    """One merged model: options are the method's own settings; `upstream` is what results call it."""

    role: str
    pool: Pool
    method: str
    upstream: str
    options: Mapping[str, Any] | None  # None: not run in this suite
    draw: Draw | None = None  # None: the method looks at no data


@dataclass(frozen=True)
class Reading:
    """What of its texts a language model is calibrated on; the paper tells none of it.

    split:   of the data the samples come from.
    decoder: of a model with a decoder, what that reads: the answer, teacher-forced, or the start token alone.
    counted: of a model without, which tokens count in the sums: of prompt and answer all, or those of one of both.
    tokens:  at most so many of a text; None for what the model is usually given.
    """

    split: Literal["train", "validation"] = "train"
    decoder: Literal["answer", "start"] = "answer"
    counted: Literal["all", "prompt", "answer"] = "all"
    tokens: int | None = None

    def __post_init__(self) -> None:
        known = {"split": ("train", "validation"), "decoder": ("answer", "start"), "counted": ("all", "prompt", "answer")}
        for name, words in known.items():
            require(getattr(self, name) in words, f"reading.{name}", getattr(self, name), f"must be one of {', '.join(words)}")
        if self.tokens is not None:
            whole_number("reading.tokens", self.tokens)


@dataclass(frozen=True)
class CalibrateRun:
    """One calibrated model per seed: what it starts from, the method's settings, and the calibration draw."""

    role: str
    pool: Pool
    upstream: str
    setting: str
    calibration: Calibration | None  # None: not run in this suite
    samples: int = 0  # n, images per task
    batch: int = 0
    seeds: tuple[int, ...] = ()
    reading: Reading | None = None  # of a language model

    @property
    def merged(self) -> str:
        """Key of the merged model, after which the stage is called that calibrates it."""
        return f"{self.role}-{self.pool}-{self.upstream}"


@dataclass(frozen=True)
class AdapterSetting:
    """One way to make the adapters of a method: its settings, its images, and one training per seed."""

    training: AdapterMethod
    draw: Draw
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class AdaptRun:
    """Adapters behind one merged model, by the word of their settings."""

    role: str
    pool: Pool
    upstream: str
    method: str
    settings: Mapping[str, AdapterSetting] | None  # None: not run in this suite

    @property
    def merged(self) -> str:
        """Key of the merged model, after which the stage is called that trains everything behind it."""
        return f"{self.role}-{self.pool}-{self.upstream}"


@dataclass(frozen=True)
class Rescaling:
    """A merged model is moved along its own change: base + factor · (merged − base), the best factor chosen on `split`."""

    factors: tuple[float, ...]
    split: str
    samples: int

    def __post_init__(self) -> None:
        fine = isinstance(self.factors, list | tuple) and bool(self.factors)
        require(fine, "rescale.factors", self.factors, "must be a list of numbers")
        for factor in self.factors:
            number("rescale.factors", factor)
        require(self.split in ("validation", "train"), "rescale.split", self.split, "must be validation or train, never test")
        whole_number("rescale.samples", self.samples)
        object.__setattr__(self, "factors", tuple(float(factor) for factor in self.factors))  # YAML gives a list


@dataclass(frozen=True)
class AblateRun:
    """What the gain is made of: FeatCal without one ingredient each, its anchor alone, and the merged model rescaled."""

    whole: CalibrateRun  # the settings that each variant changes one of
    without: Mapping[str, Calibration]
    rescale: Rescaling

    @property
    def settings(self) -> tuple[str, ...]:
        return tuple(self.without)


@dataclass(frozen=True)
class MultitaskRun:
    """One model for all tasks of a pool: fetched (`model`, a hub id) or trained as the experts are, in `steps` steps in all."""

    role: str
    pool: Pool
    model: str | None = None
    steps: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        one = (self.model is None) != (self.steps is None)
        require(one, "multitask.steps", self.steps, "must stand alone: either steps (and seed), or the model's hub id")
        if self.model is not None:
            text("multitask.model", self.model)
        if self.steps is not None:
            whole_number("multitask.steps", self.steps)
        whole_number("multitask.seed", self.seed, least=0)


@dataclass(frozen=True)
class MeasureRun:
    """One merged model, its calibrated ones and its adapters against the experts on test images, one of each per setting.

    task: whose images are told one by one.   In pictures the calibrated model is that of the first setting.
    """

    role: str
    pool: Pool
    upstream: str
    settings: tuple[str, ...]
    seed: int
    task: str

    def __post_init__(self) -> None:
        fine = isinstance(self.settings, list | tuple) and bool(self.settings) and all(s in SETTINGS for s in self.settings)
        require(fine, "measure.settings", self.settings, f"must be a list of {' and '.join(SETTINGS)}")
        whole_number("measure.seed", self.seed, least=0)
        text("measure.task", self.task)
        object.__setattr__(self, "settings", tuple(self.settings))  # YAML gives a list
