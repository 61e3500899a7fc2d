"""The schema of params.yaml, pipeline/models.yaml and pipeline/studies.yaml.

An entry is called <role>-<pool> and has one group of settings per suite; null: not run there.
What starts from merged models names under `from` what differs there.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import Field, NonNegativeInt, PositiveInt

from featcal.baselines.corrections import MeanShift, ProbSurgery, Surgery
from featcal.errors import UnknownKey
from featcal.merging.registry import method_names, settings_of
from featcal.settings import Calibration, Distinct, Settings, require
from reproduction.results import chosen_suite, read_yaml

AdapterMethod = Surgery | ProbSurgery | MeanShift
T = TypeVar("T")
S = TypeVar("S", bound=Settings)
Entry = Mapping[str, Any]
Main = Mapping[str, Mapping[str, Any]]  # by role: samples, and settings by their word
Pool = int | str  # of images and sentences by the number of tasks, of texts by name
Each = Annotated[tuple[T, ...], Field(min_length=1), Distinct]
Numbers = Annotated[tuple[float, ...], Distinct]
Counts = Each[PositiveInt]
Names = Each[str]
Seeds = Each[NonNegativeInt]
Stream = Literal["train", "test_unlabelled", "unlabelled"]
Setting = Literal["suite", "paper", "paper_8b"]  # paper_8b: of the larger of two models
# `suite` keeps the published code's ratio of adapter size to feature width, `paper` its own size.
# `_train`: trained on the samples that FeatCal sees; `_scored`: on the test texts themselves.
AdapterWord = Literal[
    "suite", "paper", "suite_train", "paper_train", "suite_scored", "paper_scored"
]
SETTINGS: tuple[Setting, ...] = get_args(Setting)
ADAPTER_SETTINGS: tuple[AdapterWord, ...] = get_args(AdapterWord)

HEADLINE_POOL = 8  # of Tables 1 and 7, with every merger and all controls
TEXT_POOLS = GLUE_POOL, DOMAIN_POOL, CHAT_POOL = "glue", "mergebench", "chat"
ANCHOR, RESCALED = "anchor", "rescaled"  # methods of the controls in results
ADAPTERS = {kind.name: kind for kind in (Surgery, ProbSurgery, MeanShift)}
TRAINED_ADAPTERS = ("surgery", "prob_surgery")  # the only ones before a language head
ADAPTER_BATCH = 250  # samples encoded at a time: another number moves the last bits of a feature
SPLITS = {"train": "train", "test_unlabelled": "test", "unlabelled": "stream"}  # by stream
UNLABELLED = ("test_unlabelled", "unlabelled")
# The stream of a method where params.yaml names none: the one of the paper's comparison.
STREAMS = dict.fromkeys(("adamerging", *ADAPTERS), "test_unlabelled")
STREAMS |= dict.fromkeys(("regmean", "regmean_plus_plus", "lot", "mats", "fisher"), "train")

MORE = ("pipeline/models.yaml", "pipeline/studies.yaml")  # settings that few edit
METHODS = "methods"  # settings with names, for entries to share; not experiments
STUDIED, FROM = "studied", "from"
MAIN = ("suite", "featcal", "mergers", "tasks")
SECTIONS = (*MAIN, METHODS, STUDIED, "merge", "calibrate", "adapt", "multitask", "measure")
SWEPT = ("ridge", "anchor_blend", "interpolation")


def require_known(place: str, word: Any, known: Collection[Any]) -> None:
    """Raise UnknownKey, with the nearest known word, unless a word is known."""
    if word not in known:
        raise UnknownKey(place, str(word), [str(one) for one in known])


def role_and_pool(key: str, place: str = "role and pool") -> tuple[str, Pool]:
    """Return `clip_b32-8` as ("clip_b32", 8). Raises: UnknownKey."""
    role, _, pool = str(key).rpartition("-")
    if not role or not (pool.isdigit() or pool in TEXT_POOLS):
        known = ["clip_b32-8", "clip_l14-8", "flan_t5_base-glue", "llama_3b-mergebench"]
        raise UnknownKey(place, str(key), known)
    return role, int(pool) if pool.isdigit() else pool


class SampleDraw(Settings):
    """The samples of each task that a method sees. samples: None is the whole split, shuffled."""

    section = "draw"
    stream: Stream
    samples: PositiveInt | None
    batch: PositiveInt
    seed: NonNegativeInt = 42

    @property
    def split(self) -> str:
        """Return the split of the data that the stream reads."""
        return SPLITS[self.stream]


class Reading(Settings):
    """What a language model reads of its calibration texts; the paper states none of it.

    split:   of the data the samples come from.
    decoder: what a decoder reads: the answer, teacher-forced, or the start token alone.
    counted: without a decoder, the tokens that count in the sums.
    tokens:  maximum per text. Default: what the model is usually given.
    """

    section = "reading"
    split: Literal["train", "validation"] = "train"
    decoder: Literal["answer", "start"] = "answer"
    counted: Literal["all", "prompt", "answer"] = "all"
    tokens: PositiveInt | None = None


class Experiment(Settings):
    """What is made or studied of one role and pool."""

    role: str
    pool: Pool

    @property
    def key(self) -> str:
        """Return the role and pool, such as `clip_b32-14`."""
        return f"{self.role}-{self.pool}"

    @property
    def merged(self) -> str:
        """Return the key of the merged model it starts from, such as `clip_b32-8-wudi`."""
        return f"{self.key}-{self.upstream}"  # type: ignore[attr-defined]

    @property
    def starts(self) -> tuple[str, ...]:
        """Return the mergers that it starts from."""
        several: tuple[str, ...] = getattr(self, "upstreams", ())
        return several or ((self.upstream,) if hasattr(self, "upstream") else ())


class MergeRun(Experiment):
    """One merged model. options: the method's own settings; None: not run in this suite."""

    method: str
    upstream: str
    options: Mapping[str, Any] | None
    draw: SampleDraw | None = None  # None: the method looks at no data


class CalibrateRun(Experiment):
    """One calibrated model per seed."""

    upstream: str
    setting: str
    calibration: Calibration
    samples: PositiveInt  # n of each task
    batch: PositiveInt
    seeds: Seeds
    reading: Reading | None = None  # of a language model


class AdapterSetting(Settings):
    """One training of adapters, once per seed."""

    training: AdapterMethod
    draw: SampleDraw
    seeds: Seeds


class AdaptRun(Experiment):
    """Adapters after one merged model. settings: by their word."""

    upstream: str
    method: str
    settings: Mapping[str, AdapterSetting]


class MultitaskRun(Experiment):
    """One model for all tasks: fetched (`model`, a hub id), or trained as the experts are."""

    section = "multitask"
    model: str | None = None
    steps: PositiveInt | None = None
    seed: NonNegativeInt = 0

    def check(self) -> None:
        one = (self.model is None) != (self.steps is None)
        expected = "must stand alone: either steps (and seed), or the model's hub id"
        require(one, "multitask.steps", self.steps, expected)


class MeasureRun(Experiment):
    """A merged model and what calibrates it against the experts; `task` is shown sample by sample."""

    section = "measure"
    upstream: str
    settings: Each[Setting]
    seed: NonNegativeInt
    task: str


class Comparison(Settings):
    """The three ways to calibrate that a study compares.

    setting: the word of their settings in results.
    stream:  what adapters see; FeatCal sees training samples.
    batch:   of FeatCal; it moves the last bits of the result only.
    """

    section = "comparison"
    setting: Setting
    featcal: Calibration
    surgery: Surgery
    prob_surgery: ProbSurgery
    stream: Stream = "test_unlabelled"
    batch: PositiveInt = 128

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Return what adapters see, and FeatCal's samples where those are others."""
        return (self.stream,) if self.stream == "train" else (self.stream, "train")

    def draw(self, method: str, samples: int, seed: int, stream: str = "") -> SampleDraw:
        """Return the samples of a method. stream: of adapters that see others."""
        own = {"stream": "train", "batch": self.batch}
        if method != "featcal":
            own = {"stream": stream or self.stream, "batch": ADAPTER_BATCH}
        return SampleDraw(**own, samples=samples, seed=seed)


class Study(Experiment):
    """A study of one role and pool.

    scores:        columns of its scores.   tables: columns of other tables, by name.
    described:     whether a file of its settings lies next to them.
    from_prepared: whether it needs models of the stage `prepare`.
    device:        where it computes in place of the suite's.
    """

    device: Literal["auto"] | None = None
    scores: ClassVar[Sequence[str]] = ()
    tables: ClassVar[Mapping[str, Sequence[str]]] = {}
    described: ClassVar[bool] = True
    from_prepared: ClassVar[bool] = True

    @property
    def label(self) -> str:
        """Return its name in messages, such as `sweep clip_b32-8`."""
        return f"{self.section} {self.key}"

    @abstractmethod
    def run(self, setup: Any, folder: Path) -> Any:
        """Return what the study finds, its models made below `folder`."""

    @staticmethod
    def finish(folder: Path, found: Any) -> None:
        """Write results that are no table."""

    def drawn(self, **changes: Any) -> SampleDraw:
        """Return the training samples that FeatCal sees in the study."""
        names = {"samples", "batch", "seed"} - changes.keys()
        own = {name: getattr(self, name) for name in names}
        return SampleDraw(stream="train", **own, **changes)


@cache
def studies() -> dict[str, type[Study]]:
    """Return the settings class of every study, one in each file of reproduction/studies/."""
    found = {}
    for file in sorted((Path(__file__).parent / "studies").glob("[a-z]*.py")):
        members = vars(import_module(f"reproduction.studies.{file.stem}")).values()
        kinds = [one for one in members if isinstance(one, type) and issubclass(one, Study)]
        (found[file.stem],) = (kind for kind in kinds if kind.section == file.stem)
    return found


@dataclass(frozen=True)
class Experiments:
    """The experiments of params.yaml in one suite, by key; None: not run in this suite."""

    suite: str
    tasks: tuple[str, ...] | None
    merge: Mapping[str, MergeRun]
    calibrate: Mapping[str, CalibrateRun]
    adapt: Mapping[str, AdaptRun]
    multitask: Mapping[str, MultitaskRun | None]
    measure: Mapping[str, MeasureRun | None]
    studies: Mapping[str, Mapping[str, Any]]  # by kind, by key
    prepared: tuple[tuple[str, Pool], ...]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(role for role, _ in self.prepared))

    def merged_in(self, role: str, pool: Pool) -> dict[str, MergeRun]:
        """Return the merged models of a role and pool that are run."""
        return {k: m for k, m in _of(self.merge, role, pool).items() if m.options is not None}

    def calibrated_in(self, role: str, pool: Pool) -> dict[str, CalibrateRun]:
        return _of(self.calibrate, role, pool)

    def adapted_in(self, role: str, pool: Pool) -> dict[str, AdaptRun]:
        return _of(self.adapt, role, pool)


def _mapping(place: str, value: Any, expected: str = "must be a mapping of settings") -> Entry:
    require(isinstance(value, dict), place, value, expected)
    return dict(value)


def _of(runs: Mapping[str, Any], role: str, pool: Pool) -> dict[str, Any]:
    return {key: run for key, run in runs.items() if (run.role, run.pool) == (role, pool)}


def read_all(path: Path) -> dict[str, Any]:
    """Return params.yaml with the sections of MORE. Raises: BadSetting for a section in two."""
    raw = read_yaml(path)
    for name in MORE:
        file = path.parent / name
        more = read_yaml(file) if file.is_file() else {}
        twice = sorted(raw.keys() & more.keys())
        require(not twice, ", ".join(twice), "given", f"must not be in {name} and elsewhere too")
        raw |= more
    return raw


def load_experiments(path: Path, suite: str | None = None) -> Experiments:
    """Return every experiment in the suite that params.yaml chooses, or in another one.

    Raises: MissingPath; BadSetting for a value out of range; UnknownKey for a misspelt key.
    """
    raw = read_all(path)
    suite = suite or chosen_suite(raw)
    for key in raw:
        require_known(path.name, key, (*SECTIONS, *studies()))
    suites = sorted(file.stem for file in (path.parent / "suites").glob("*.yaml"))
    if suites:
        require_known("suite", suite, suites)
    mergers, main, tasks = raw.get("mergers"), _main_settings(raw.get("featcal")), raw.get("tasks")
    fine = tasks is None or (isinstance(tasks, list) and bool(tasks))
    require(fine, "tasks", tasks, "must be null, or a list of tasks")

    def read(name: str, kind: Callable[..., T], *more: Any) -> dict[str, T]:
        entries = _mapping(name, raw.get(name) or {}, "must be a mapping")
        return {key: kind(key, entry, suite, *more) for key, entry in entries.items()}

    merged = read("merge", _merge_runs, mergers)
    known = {run.upstream for own in merged.values() for run in own.values()}
    for name in mergers or ():
        require_known("mergers", name, known)
    calibrated = read("calibrate", _calibrate_runs, merged, main)
    adapted = read("adapt", _adapt_runs, merged)
    shared = read(STUDIED, shared_settings, main)
    found = Experiments(
        suite=suite,
        tasks=None if tasks is None else tuple(tasks),
        merge=_joined(merged),
        calibrate=_joined(calibrated),
        adapt=_joined(adapted),
        multitask=read("multitask", partial(_plain_run, MultitaskRun)),
        measure=read("measure", partial(_plain_run, MeasureRun)),
        studies={kind: read(kind, partial(study_run, kind), shared) for kind in studies()},
        prepared=tuple(role_and_pool(key) for key in merged),
    )
    _check_references(found)
    return found


def _joined(runs: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    return {key: run for own in runs.values() for key, run in own.items()}


def _main_settings(raw: Any) -> Main:
    roles = _mapping("featcal", raw or {}, "must be a mapping of settings by role")
    for role, words in roles.items():
        for word, own in _mapping(f"featcal.{role}", words).items():
            require_known(f"featcal.{role}", word, ("samples", *SETTINGS))
            if word != "samples":
                _mapping(f"featcal.{role}.{word}", own)
    return roles


def for_suite(place: str, entry: Any, suite: str) -> Entry | None:
    """Return an entry's settings in a suite. Raises: BadSetting."""
    for key, group in _mapping(place, entry, "must be a mapping").items():
        _require_group(f"{place}.{key}", group)
    way_out = f"has no settings for the suite {suite!r}; write `{suite}: null` to leave it out"
    require(suite in entry, place, sorted(map(str, entry)), way_out)
    return entry[suite]


def _require_group(place: str, group: Any) -> None:
    fine = group is None or isinstance(group, dict)
    require(fine, place, group, "must be a mapping of settings, or null")


def _merge_runs(
    key: str, entry: Any, suite: str, mergers: Collection[str] | None
) -> dict[str, MergeRun]:
    """Return the merged models of one role and pool, by key. mergers: that are run; None: all."""
    role, pool = role_and_pool(key, "merge")
    found = {}
    for upstream, groups in _mapping(f"merge.{key}", entry, "must be a mapping of mergers").items():
        place, method, options, draw = f"merge.{key}.{upstream}", str(upstream), None, None
        if isinstance(groups, dict) and "method" in groups:  # a merger that no suite runs here
            groups = dict(groups)
            method = str(groups.pop("method"))
        group = for_suite(place, groups, suite)
        named = {str(own.get("method", upstream)) for own in groups.values() if own is not None}
        expected = "must be the same in every suite"
        require(len(named) < 2, f"{place}.{suite}.method", sorted(named), expected)
        method = named.pop() if named else method
        require_known(place, method, method_names())
        if group is not None and (mergers is None or upstream in mergers):
            options = {word: value for word, value in group.items() if word != "method"}
            if method in STREAMS:
                own = {w: options.pop(w) for w in SampleDraw.model_fields if w in options}
                own = {"stream": STREAMS[method], **own}
                draw = SampleDraw.from_mapping(own, f"{place}.{suite}")
        settings_of(method, options or {}, f"{place}.{suite}")
        words = {"role": role, "pool": pool, "method": method, "upstream": str(upstream)}
        found[f"{key}-{upstream}"] = MergeRun(**words, options=options, draw=draw)
    return found


def _group_and_rows(
    section: str, key: str, entry: Any, suite: str, merged: Mapping[str, Mapping[str, MergeRun]]
) -> tuple[Entry | None, dict[str, Any]]:
    """Return the suite's settings, and by merged model what differs there; None: not made."""
    require_known(section, key, merged)
    place, made = f"{section}.{key}", merged[key]
    groups = _mapping(place, entry, "must be a mapping")
    require(FROM in groups, place, list(groups), f"lacks {FROM}")
    expected = "must name the merged models, each with {} or what differs there"
    rows = _mapping(f"{place}.{FROM}", groups.pop(FROM), expected)
    group = for_suite(place, groups, suite)
    run = {one.upstream: one.options is not None for one in made.values()}
    for upstream, row in rows.items():
        require_known(f"{place}.{FROM}", upstream, run)
        _require_group(f"{place}.{FROM}.{upstream}", row)
    return group, {upstream: row if run[upstream] else None for upstream, row in rows.items()}


def _differing(
    group: tuple[str, Entry], row: tuple[str, Entry], words: tuple[str, ...]
) -> dict[str, tuple[str, Entry]]:
    """Return the group's settings with the row's changes, and their place, by word."""
    for place, held in (group, row):
        for word, settings in held.items():
            require_known(place, word, words)
            _require_group(f"{place}.{word}", settings)
    found: dict[str, tuple[str, Entry]] = {}
    for word in words:
        both = [(place, held[word]) for place, held in (group, row) if word in held]
        if both and all(settings is not None for _, settings in both):
            merged = {key: value for _, settings in both for key, value in settings.items()}
            found[word] = (f"{both[-1][0]}.{word}", merged)
    return found


def _calibrate_runs(
    key: str, entry: Any, suite: str, merged: Mapping[str, Mapping[str, MergeRun]], main: Main
) -> dict[str, CalibrateRun]:
    """Return FeatCal of one role and pool: each merged model at each setting that is run."""
    group, rows = _group_and_rows("calibrate", key, entry, suite, merged)
    role, pool = role_and_pool(key, "calibrate")
    place, found, role_main = f"calibrate.{key}", {}, main.get(role, {})
    drawn = ("samples", "batch", "seeds")
    for upstream, row in rows.items():
        if group is None or row is None:
            continue
        changes = (f"{place}.{FROM}.{upstream}", row)
        chosen = _differing((f"{place}.{suite}", group), changes, SETTINGS)
        for setting, (where, own) in chosen.items():
            shared = {word: held for word, held in role_main.items() if word not in SETTINGS}
            method = {**shared, **role_main.get(setting, {}), **own}
            for word in (*drawn, *SWEPT):  # whatever the library's defaults are
                require(word in method, where, list(method), f"lacks {word}")
            words = {"role": role, "pool": pool, "upstream": upstream, "setting": setting}
            words |= {word: method.pop(word) for word in drawn}
            words |= {"reading": method.pop("reading", {})} if isinstance(pool, str) else {}
            words["calibration"] = Calibration.from_mapping(method, where)
            found[f"{key}-{upstream}-{setting}"] = CalibrateRun.from_mapping(words, where)
    return found


def _adapt_runs(
    key: str, entry: Any, suite: str, merged: Mapping[str, Mapping[str, MergeRun]]
) -> dict[str, AdaptRun]:
    """Return the adapters of one role and pool: each merged model and method that is run."""
    group, rows = _group_and_rows("adapt", key, entry, suite, merged)
    role, pool = role_and_pool(key, "adapt")
    place, texts, found = f"adapt.{key}.{suite}", isinstance(pool, str), {}
    methods = TRAINED_ADAPTERS if texts else tuple(ADAPTERS)
    named = {f"adapt.{key}.{FROM}.{upstream}": row for upstream, row in rows.items()}
    for where, mapping in ({place: group} | named).items():
        for method in mapping or ():
            require_known(where, method, methods)
    pairs = [(upstream, method) for upstream in rows for method in methods]
    if pool != HEADLINE_POOL:  # the order of the rows of a results file
        pairs.sort(key=lambda pair: methods.index(pair[1]))
    for upstream, method in pairs:
        own, row = (group or {}).get(method), rows[upstream]
        if own is None or row is None:
            continue
        given = (f"{place}.{method}", _mapping(f"{place}.{method}", own))
        where = f"adapt.{key}.{FROM}.{upstream}.{method}"
        changes = (where, _mapping(where, row.get(method, {}), "must be a mapping of what differs"))
        chosen = _differing(given, changes, ADAPTER_SETTINGS)
        settings = {w: _adapter_setting(method, w, *own, texts) for w, own in chosen.items()}
        if settings:
            words = {"role": role, "pool": pool, "upstream": upstream, "method": method}
            found[f"{key}-{upstream}-{method}"] = AdaptRun(**words, settings=settings)
    return found


def _adapter_setting(
    method: str, word: str, place: str, group: Entry, texts: bool
) -> AdapterSetting:
    """Return one training of a method's adapters. texts: those of language models."""
    own: dict[str, Any] = {"stream": "train" if texts else STREAMS[method], **group}
    for key in ("samples", "seeds"):
        require(key in own, place, list(group), f"lacks {key}")
    drawn = {key: own.pop(key) for key in ("stream", "samples")} | {"batch": ADAPTER_BATCH}
    draw, seeds = SampleDraw.from_mapping(drawn, place), own.pop("seeds")
    training = ADAPTERS[method].from_mapping(own, place)
    fitting = ("test_unlabelled",) if word.endswith("_scored") else UNLABELLED
    fitting = ("train",) if texts or word.endswith("_train") else fitting
    expected = f"must be {' or '.join(fitting)}"
    require(draw.stream in fitting, f"{place}.stream", draw.stream, expected)
    return AdapterSetting.from_mapping({"draw": draw, "seeds": seeds, "training": training}, place)


def _plain_run(kind: type[S], key: str, entry: Any, suite: str) -> S | None:
    """Return an entry whose group is the settings class itself; None: not run."""
    (role, pool), place = role_and_pool(key, kind.section), f"{kind.section}.{key}"
    chosen = for_suite(place, entry, suite)
    words = {"role": role, "pool": pool, **(chosen or {})}
    return None if chosen is None else kind.from_mapping(words, f"{place}.{suite}")


def shared_settings(key: str, entry: Any, suite: str, main: Main) -> Entry:
    """Return what the studies of a role and pool share: `comparison`, and the paper's settings."""
    role, _ = role_and_pool(key, STUDIED)
    place, group = f"{STUDIED}.{key}", for_suite(f"{STUDIED}.{key}", entry, suite)
    if not group:
        return {}
    for word, settings in group.items():
        require_known(f"{place}.{suite}", word, ("comparison",))
        _mapping(f"{place}.{suite}.{word}", settings)
    known = {word: own for word, own in main.get(role, {}).items() if word != "samples"}
    comparison = dict(group.get("comparison", {}))
    if comparison.get("setting") in known:
        comparison = {"featcal": known[comparison["setting"]], **comparison}
    return {"comparison": comparison, **({"paper": known["paper"]} if "paper" in known else {})}


def study_run(
    kind: str, key: str, entry: Any, suite: str, studied: Mapping[str, Entry] | None = None
) -> Any:
    """Return one study, or None, with the settings that studies share and those of its own."""
    role, pool = role_and_pool(key, kind)
    place, own = f"{kind}.{key}.{suite}", for_suite(f"{kind}.{key}", entry, suite)
    if own is None:
        return None
    common = (studied or {}).get(key, {})
    comparison, paper = common.get("comparison", {}), common.get("paper")
    featcal, setting = comparison.get("featcal"), comparison.get("setting")
    words: dict[str, Any] = {"comparison": comparison, "setting": setting, "featcal": featcal}
    words |= {"paper": paper, "suite": featcal}
    found = {name: words[name] for name in studies()[kind].model_fields if words.get(name)}
    found |= {"role": role, "pool": pool, **own}
    if isinstance(own.get("comparison"), dict):
        found["comparison"] = {**comparison, **own["comparison"]}
    if isinstance(own.get("at_papers"), bool):
        fine = not own["at_papers"] or (paper is not None and setting != "paper")
        expected = "must be left out where the suite has no settings but the paper's"
        require(fine, f"{place}.at_papers", True, expected)
        found["at_papers"] = paper if own["at_papers"] else None
    if isinstance(own.get("without"), dict):
        for name, change in own["without"].items():
            fine = isinstance(change, dict) and bool(change)
            require(fine, f"{place}.without.{name}", change, "must be a mapping of settings")
        shared = found.get("featcal") or {}
        found["without"] = {n: {**shared, **change} for n, change in own["without"].items()}
    if isinstance(own.get("around"), list):
        at = {"paper": {"featcal": paper}, setting: {"featcal": featcal}}
        found["around"] = [{**at.get(one.get("setting"), {}), **one} for one in own["around"]]
    return studies()[kind].from_mapping(found, place)


def _check_references(found: Experiments) -> None:
    """Raise BadSetting unless studies start from merged models and measure calibrated ones."""
    for kind, runs in {"measure": found.measure, **found.studies}.items():
        for key, run in ((key, run) for key, run in runs.items() if run):
            merged, place = _of(found.merge, run.role, run.pool), f"{kind}.{key}.{found.suite}"
            expected = f"must be one of the merged models: {', '.join(merged) or 'none'}"
            for upstream in run.starts:
                require(f"{key}-{upstream}" in merged, place, f"{key}-{upstream}", expected)
            if isinstance(run, MeasureRun):
                _require_seeds(f"{place}.seed", run, found)


def _require_seeds(place: str, measured: MeasureRun, found: Experiments) -> None:
    """Raise BadSetting unless every model that is measured is made with its seed."""
    made: dict[str, tuple[int, ...]] = {}
    for name in measured.settings:
        calibrated = found.calibrate.get(f"{measured.merged}-{name}")
        run = f"calibrate.{measured.key} from {measured.upstream} at {name}"
        made[run] = calibrated.seeds if calibrated else ()
        for adapt in found.adapt.values():
            if adapt.merged == measured.merged and name in adapt.settings:
                run = f"adapt.{measured.key} from {measured.upstream}, {adapt.method} at {name}"
                made[run] = adapt.settings[name].seeds
    for run, seeds in made.items():
        those = ", ".join(map(str, seeds)) or "none in this suite"
        expected = f"must be one of the seeds of {run} ({those})"
        require(measured.seed in seeds, place, measured.seed, expected)
