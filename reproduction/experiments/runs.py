"""The kinds of experiments of params.yaml as settings, each in the settings of one suite.

Every run has a role, a pool of tasks and, but for a merge, an `upstream`: the merged model it
starts from. Knows nothing of torch, models or where results go.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import Field, NonNegativeInt, PositiveInt

from featcal.baselines.mean_shift import MeanShift
from featcal.baselines.prob_surgery import ProbSurgery
from featcal.baselines.surgery import Surgery
from featcal.errors import UnknownKey
from featcal.settings import Calibration, Distinct, Settings, require

Setting = Literal["suite", "paper"]
SETTINGS: tuple[Setting, ...] = get_args(Setting)
# `suite` keeps the published code's proportion of an adapter to the width of the features, `paper`
# its absolute size: of images
# on test images, as in the method's own source, of texts on unlabelled ones that are not scored.
# `_train`: on what FeatCal sees;
# `_scored`: of texts, on the test texts themselves. A mean shift has no size, only a stream.
AdapterWord = Literal[
    "suite", "paper", "suite_train", "paper_train", "suite_scored", "paper_scored"
]
ADAPTER_SETTINGS: tuple[AdapterWord, ...] = get_args(AdapterWord)
AdapterMethod = Surgery | ProbSurgery | MeanShift
ADAPTERS: dict[str, type[AdapterMethod]] = {
    "surgery": Surgery,
    "prob_surgery": ProbSurgery,
    "mean_shift": MeanShift,
}
ADAPTER_BATCH = 250  # samples encoded at a time: another number moves the last bits of a feature
TEXT_ADAPTERS = ("surgery", "prob_surgery")  # those that stand before a language head
# Which images a method sees where params.yaml leaves `stream` out: those that the paper's
# comparison gave it.
STREAMS = {
    "adamerging": "test_unlabelled", "surgery": "test_unlabelled", "prob_surgery": "test_unlabelled",
    "mean_shift": "test_unlabelled", "regmean": "train", "regmean_plus_plus": "train", "lot": "train",
    "mats": "train", "fisher": "train",
}  # fmt: skip
Pool = int | str  # of images by the number of tasks, of texts by name
HEADLINE_POOL = 8  # of Tables 1 and 7, with every merger and all controls
TEXT_POOLS = GLUE_POOL, DOMAIN_POOL = "glue", "mergebench"
ANCHOR, RESCALED = "anchor", "rescaled"  # methods of the controls, as results call them
UNLABELLED = (
    "test_unlabelled",
    "unlabelled",
)  # streams without labels, of the scored samples or of others
SPLITS = {
    "train": "train",
    "test_unlabelled": "test",
    "unlabelled": "stream",
}  # by the word of a stream
Stream = Literal["train", "test_unlabelled", "unlabelled"]


T = TypeVar("T")
Each = Annotated[tuple[T, ...], Field(min_length=1), Distinct]  # one or more, each named once
Numbers = Annotated[tuple[float, ...], Distinct]
Counts = Each[PositiveInt]
Names = Each[str]
Seeds = Each[NonNegativeInt]


def require_known(place: str, word: Any, known: Collection[Any]) -> None:
    """Raise UnknownKey, with the nearest word there is, unless a word is known."""
    if word not in known:
        raise UnknownKey(place, str(word), [str(one) for one in known])


def role_and_pool(key: str, place: str = "role and pool") -> tuple[str, Pool]:
    """`clip_b32-8` as ("clip_b32", 8), `llama_3b-mergebench` as ("llama_3b", "mergebench"). Raises:
    UnknownKey.
    """
    role, _, pool = str(key).rpartition("-")
    if not role or not (pool.isdigit() or pool in TEXT_POOLS):
        raise UnknownKey(
            place,
            str(key),
            ["clip_b32-8", "clip_l14-8", "flan_t5_base-glue", "llama_3b-mergebench"],
        )
    return role, int(pool) if pool.isdigit() else pool


def keys_of(run: Any) -> tuple[str, str]:
    """What a run belongs to: its role and pool (`clip_b32-14`), and one merged model of them
    (`clip_b32-8-wudi`).
    """
    return f"{run.role}-{run.pool}", f"{run.role}-{run.pool}-{run.upstream}"


class Draw(Settings):
    """The images or texts a method sees, labels unused.

    samples: of each task; None is the whole split, shuffled anew in every round.   batch: samples
    at a time.
    """

    section = "draw"
    stream: Stream
    samples: PositiveInt | None
    batch: PositiveInt
    seed: NonNegativeInt = 42

    @property
    def split(self) -> str:
        return SPLITS[self.stream]


class MergeRun(Settings):
    """One merged model: options are the method's own settings; `upstream` is what results call
    it.
    """

    role: str
    pool: Pool
    method: str
    upstream: str
    options: Mapping[str, Any] | None  # None: not run in this suite
    draw: Draw | None = None  # None: the method looks at no data


class Reading(Settings):
    """What of its texts a language model is calibrated on; the paper tells none of it.

    split:   of the data the samples come from.
    decoder: of a model with a decoder, what that reads: the answer, teacher-forced, or the start
    token alone.
    counted: of a model without, which tokens count in the sums: of prompt and answer all, or those
    of one of both.
    tokens:  at most so many of a text; None for what the model is usually given.
    """

    section = "reading"
    split: Literal["train", "validation"] = "train"
    decoder: Literal["answer", "start"] = "answer"
    counted: Literal["all", "prompt", "answer"] = "all"
    tokens: PositiveInt | None = None


class CalibrateRun(Settings):
    """One calibrated model per seed: what it starts from, the method's settings, and the
    calibration draw.
    """

    role: str
    pool: Pool
    upstream: str
    setting: str
    calibration: Calibration | None  # None: not run in this suite
    samples: PositiveInt = 0  # n, images per task
    batch: PositiveInt = 0
    seeds: Seeds = ()
    reading: Reading | None = None  # of a language model

    @property
    def merged(self) -> str:
        """Key of the merged model, after which the stage is called that calibrates it."""
        return f"{self.role}-{self.pool}-{self.upstream}"


class AdapterSetting(Settings):
    """One way to make the adapters of a method: its settings, its images, and one training per
    seed.
    """

    training: AdapterMethod
    draw: Draw
    seeds: Seeds


class AdaptRun(Settings):
    """Adapters behind one merged model, by the word of their settings."""

    role: str
    pool: Pool
    upstream: str
    method: str
    settings: Mapping[str, AdapterSetting] | None  # None: not run in this suite

    @property
    def merged(self) -> str:
        """Key of the merged model, after which the stage is called that trains everything behind
        it.
        """
        return f"{self.role}-{self.pool}-{self.upstream}"


class MultitaskRun(Settings):
    """One model for all tasks of a pool: fetched (`model`, a hub id) or trained as the experts are,
    in `steps` steps in all.
    """

    section = "multitask"
    role: str
    pool: Pool
    model: str | None = None
    steps: PositiveInt | None = None
    seed: NonNegativeInt = 0

    def check(self) -> None:
        one = (self.model is None) != (self.steps is None)
        require(
            one,
            "multitask.steps",
            self.steps,
            "must stand alone: either steps (and seed), or the model's hub id",
        )


class MeasureRun(Settings):
    """One merged model, its calibrated ones and its adapters against the experts on test images,
    one of each per setting.

    task: whose images are told one by one.   In pictures the calibrated model is that of the first
    setting.
    """

    section = "measure"
    role: str
    pool: Pool
    upstream: str
    settings: Each[Setting]
    seed: NonNegativeInt
    task: str
