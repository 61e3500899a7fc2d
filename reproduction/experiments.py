"""The schema of params.yaml, pipeline/models.yaml and pipeline/studies.yaml.

An entry is called <role>-<pool> and has one group of settings per suite; null: not run there.
Entries that start from merged models list changes per model under `from`.
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
Main = Mapping[str, Mapping[str, Any]]  # by role: samples, and settings by name
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
AdapterSettingName = Literal[
    "suite", "paper", "suite_train", "paper_train", "suite_scored", "paper_scored"
]
SETTINGS: tuple[Setting, ...] = get_args(Setting)
ADAPTER_SETTINGS: tuple[AdapterSettingName, ...] = get_args(AdapterSettingName)

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


def require_known(location: str, key: Any, known: Collection[Any]) -> None:
    """Raise UnknownKey, with the nearest known key, unless the key is known."""
    if key not in known:
        raise UnknownKey(location, str(key), [str(name) for name in known])


def role_and_pool(key: str, location: str = "role and pool") -> tuple[str, Pool]:
    """Return `clip_b32-8` as ("clip_b32", 8). Raises: UnknownKey."""
    role, _, pool = str(key).rpartition("-")
    if not role or not (pool.isdigit() or pool in TEXT_POOLS):
        examples = ["clip_b32-8", "clip_l14-8", "flan_t5_base-glue", "llama_3b-mergebench"]
        raise UnknownKey(location, str(key), examples)
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
    """The part of the calibration texts that a language model reads; the paper does not state it.

    split:   of the data the samples come from.
    decoder: input of a decoder: the answer, teacher-forced, or the start token alone.
    counted: without a decoder, the tokens that count in the sums.
    tokens:  maximum per text. Default: what the model is usually given.
    """

    section = "reading"
    split: Literal["train", "validation"] = "train"
    decoder: Literal["answer", "start"] = "answer"
    counted: Literal["all", "prompt", "answer"] = "all"
    tokens: PositiveInt | None = None


class Experiment(Settings):
    """A model or a study of one role and pool."""

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
    """Adapters after one merged model. settings: by name."""

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
        exclusive = (self.model is None) != (self.steps is None)
        expected = "must stand alone: either steps (and seed), or the model's hub id"
        require(exclusive, "multitask.steps", self.steps, expected)


class MeasureRun(Experiment):
    """A merged model and its calibrations against the experts; `task` is shown sample by sample."""

    section = "measure"
    upstream: str
    settings: Each[Setting]
    seed: NonNegativeInt
    task: str


class Comparison(Settings):
    """The three ways to calibrate that a study compares.

    setting: name of their settings in results.
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
        """Return the adapters' stream, and FeatCal's if it is another."""
        return (self.stream,) if self.stream == "train" else (self.stream, "train")

    def draw(self, method: str, samples: int, seed: int, stream: str = "") -> SampleDraw:
        """Return the samples of a method. stream: of adapters that see others."""
        fields = {"stream": "train", "batch": self.batch}
        if method != "featcal":
            fields = {"stream": stream or self.stream, "batch": ADAPTER_BATCH}
        return SampleDraw(**fields, samples=samples, seed=seed)


class Study(Experiment):
    """A study of one role and pool.

    scores:        columns of its scores.   tables: columns of other tables, by name.
    described:     whether a file of its settings lies next to them.
    pictured:      whether its examples do.
    from_prepared: whether it needs models of the stage `prepare`.
    device:        where it computes in place of the suite's.
    """

    device: Literal["auto"] | None = None
    scores: ClassVar[Sequence[str]] = ()
    tables: ClassVar[Mapping[str, Sequence[str]]] = {}
    described: ClassVar[bool] = True
    pictured: ClassVar[bool] = False
    from_prepared: ClassVar[bool] = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.section = cls.__module__.rpartition(".")[2]  # the name of its file

    @property
    def label(self) -> str:
        """Return its name in messages, such as `sweep clip_b32-8`."""
        return f"{self.section} {self.key}"

    @abstractmethod
    def run(self, setup: Any, folder: Path) -> Any:
        """Return the study's results; models are made below `folder`."""

    def featcal_draw(self, **changes: Any) -> SampleDraw:
        """Return the training samples that FeatCal sees in the study."""
        names = {"samples", "batch", "seed"} - changes.keys()
        fields = {name: getattr(self, name) for name in names}
        return SampleDraw(stream="train", **fields, **changes)


@cache
def studies() -> dict[str, type[Study]]:
    """Return the settings class of every study, one in each file of reproduction/studies/."""
    by_name = {}
    for file in sorted((Path(__file__).parent / "studies").glob("[a-z]*.py")):
        members = vars(import_module(f"reproduction.studies.{file.stem}")).values()
        kinds = [kind for kind in members if isinstance(kind, type) and issubclass(kind, Study)]
        (by_name[file.stem],) = (kind for kind in kinds if kind.section == file.stem)
    return by_name


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


def _mapping(location: str, value: Any, expected: str = "must be a mapping of settings") -> Entry:
    require(isinstance(value, dict), location, value, expected)
    return dict(value)


def _of(runs: Mapping[str, Any], role: str, pool: Pool) -> dict[str, Any]:
    return {key: run for key, run in runs.items() if (run.role, run.pool) == (role, pool)}


def read_all(path: Path) -> dict[str, Any]:
    """Return params.yaml with the sections of MORE. Raises: BadSetting for a section in two."""
    raw = read_yaml(path)
    for name in MORE:
        file = path.parent / name
        extra = read_yaml(file) if file.is_file() else {}
        twice = sorted(raw.keys() & extra.keys())
        require(not twice, ", ".join(twice), "given", f"must not be in {name} and elsewhere too")
        raw |= extra
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
    valid = tasks is None or (isinstance(tasks, list) and bool(tasks))
    require(valid, "tasks", tasks, "must be null, or a list of tasks")

    def read(name: str, kind: Callable[..., T], *arguments: Any) -> dict[str, T]:
        entries = _mapping(name, raw.get(name) or {}, "must be a mapping")
        return {key: kind(key, entry, suite, *arguments) for key, entry in entries.items()}

    merged = read("merge", _merge_runs, mergers)
    known = {run.upstream for runs in merged.values() for run in runs.values()}
    for name in mergers or ():
        require_known("mergers", name, known)
    calibrated = read("calibrate", _calibrate_runs, merged, main)
    adapted = read("adapt", _adapt_runs, merged)
    shared = read(STUDIED, shared_settings, main)
    experiments = Experiments(
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
    _check_references(experiments)
    return experiments


def _joined(groups: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    return {key: run for runs in groups.values() for key, run in runs.items()}


def _main_settings(raw: Any) -> Main:
    roles = _mapping("featcal", raw or {}, "must be a mapping of settings by role")
    for role, by_name in roles.items():
        for name, settings in _mapping(f"featcal.{role}", by_name).items():
            require_known(f"featcal.{role}", name, ("samples", *SETTINGS))
            if name != "samples":
                _mapping(f"featcal.{role}.{name}", settings)
    return roles


def for_suite(location: str, entry: Any, suite: str) -> Entry | None:
    """Return an entry's settings in a suite. Raises: BadSetting."""
    for key, group in _mapping(location, entry, "must be a mapping").items():
        _require_group(f"{location}.{key}", group)
    way_out = f"has no settings for the suite {suite!r}; write `{suite}: null` to leave it out"
    require(suite in entry, location, sorted(map(str, entry)), way_out)
    return entry[suite]


def _require_group(location: str, group: Any) -> None:
    valid = group is None or isinstance(group, dict)
    require(valid, location, group, "must be a mapping of settings, or null")


def _merge_runs(
    key: str, entry: Any, suite: str, mergers: Collection[str] | None
) -> dict[str, MergeRun]:
    """Return the merged models of one role and pool, by key. mergers: that are run; None: all."""
    role, pool = role_and_pool(key, "merge")
    runs = {}
    for upstream, groups in _mapping(f"merge.{key}", entry, "must be a mapping of mergers").items():
        location, method, options, draw = f"merge.{key}.{upstream}", str(upstream), None, None
        if isinstance(groups, dict) and "method" in groups:  # a merger that no suite runs here
            groups = dict(groups)
            method = str(groups.pop("method"))
        group = for_suite(location, groups, suite)
        methods = {str(g.get("method", upstream)) for g in groups.values() if g is not None}
        expected = "must be the same in every suite"
        require(len(methods) < 2, f"{location}.{suite}.method", sorted(methods), expected)
        method = methods.pop() if methods else method
        require_known(location, method, method_names())
        if group is not None and (mergers is None or upstream in mergers):
            options = {name: value for name, value in group.items() if name != "method"}
            if method in STREAMS:
                fields = {w: options.pop(w) for w in SampleDraw.model_fields if w in options}
                fields = {"stream": STREAMS[method], **fields}
                draw = SampleDraw.from_mapping(fields, f"{location}.{suite}")
        settings_of(method, options or {}, f"{location}.{suite}")
        keys = {"role": role, "pool": pool, "method": method, "upstream": str(upstream)}
        runs[f"{key}-{upstream}"] = MergeRun(**keys, options=options, draw=draw)
    return runs


def _group_and_rows(
    section: str, key: str, entry: Any, suite: str, merged: Mapping[str, Mapping[str, MergeRun]]
) -> tuple[Entry | None, dict[str, Any]]:
    """Return the suite's settings, and the changes by merged model; None: not made."""
    require_known(section, key, merged)
    location, runs = f"{section}.{key}", merged[key]
    groups = _mapping(location, entry, "must be a mapping")
    require(FROM in groups, location, list(groups), f"lacks {FROM}")
    expected = "must name the merged models, each with {} or what differs there"
    rows = _mapping(f"{location}.{FROM}", groups.pop(FROM), expected)
    group = for_suite(location, groups, suite)
    is_run = {run.upstream: run.options is not None for run in runs.values()}
    for upstream, row in rows.items():
        require_known(f"{location}.{FROM}", upstream, is_run)
        _require_group(f"{location}.{FROM}.{upstream}", row)
    return group, {upstream: row if is_run[upstream] else None for upstream, row in rows.items()}


def _with_changes(
    group: tuple[str, Entry], row: tuple[str, Entry], names: tuple[str, ...]
) -> dict[str, tuple[str, Entry]]:
    """Return the group's settings with the row's changes, and their location, by name."""
    for location, by_name in (group, row):
        for name, settings in by_name.items():
            require_known(location, name, names)
            _require_group(f"{location}.{name}", settings)
    result: dict[str, tuple[str, Entry]] = {}
    for name in names:
        entries = [(at, by_name[name]) for at, by_name in (group, row) if name in by_name]
        if entries and all(settings is not None for _, settings in entries):
            merged = {key: value for _, settings in entries for key, value in settings.items()}
            result[name] = (f"{entries[-1][0]}.{name}", merged)
    return result


def _calibrate_runs(
    key: str, entry: Any, suite: str, merged: Mapping[str, Mapping[str, MergeRun]], main: Main
) -> dict[str, CalibrateRun]:
    """Return FeatCal of one role and pool: each merged model at each setting that is run."""
    group, rows = _group_and_rows("calibrate", key, entry, suite, merged)
    role, pool = role_and_pool(key, "calibrate")
    prefix, runs, role_main = f"calibrate.{key}", {}, main.get(role, {})
    draw_names = ("samples", "batch", "seeds")
    for upstream, row in rows.items():
        if group is None or row is None:
            continue
        changes = (f"{prefix}.{FROM}.{upstream}", row)
        at_settings = _with_changes((f"{prefix}.{suite}", group), changes, SETTINGS)
        for setting, (location, overrides) in at_settings.items():
            shared = {name: value for name, value in role_main.items() if name not in SETTINGS}
            method = {**shared, **role_main.get(setting, {}), **overrides}
            for name in (*draw_names, *SWEPT):  # whatever the library's defaults are
                require(name in method, location, list(method), f"lacks {name}")
            fields = {"role": role, "pool": pool, "upstream": upstream, "setting": setting}
            fields |= {name: method.pop(name) for name in draw_names}
            fields |= {"reading": method.pop("reading", {})} if isinstance(pool, str) else {}
            fields["calibration"] = Calibration.from_mapping(method, location)
            runs[f"{key}-{upstream}-{setting}"] = CalibrateRun.from_mapping(fields, location)
    return runs


def _adapt_runs(
    key: str, entry: Any, suite: str, merged: Mapping[str, Mapping[str, MergeRun]]
) -> dict[str, AdaptRun]:
    """Return the adapters of one role and pool: each merged model and method that is run."""
    group, rows = _group_and_rows("adapt", key, entry, suite, merged)
    role, pool = role_and_pool(key, "adapt")
    prefix, texts, runs = f"adapt.{key}.{suite}", isinstance(pool, str), {}
    methods = TRAINED_ADAPTERS if texts else tuple(ADAPTERS)
    row_mappings = {f"adapt.{key}.{FROM}.{upstream}": row for upstream, row in rows.items()}
    for path, mapping in ({prefix: group} | row_mappings).items():
        for method in mapping or ():
            require_known(path, method, methods)
    pairs = [(upstream, method) for upstream in rows for method in methods]
    if pool != HEADLINE_POOL:  # the order of the rows of a results file
        pairs.sort(key=lambda pair: methods.index(pair[1]))
    for upstream, method in pairs:
        adapter, row = (group or {}).get(method), rows[upstream]
        if adapter is None or row is None:
            continue
        group_settings = (f"{prefix}.{method}", _mapping(f"{prefix}.{method}", adapter))
        path = f"adapt.{key}.{FROM}.{upstream}.{method}"
        changes = (path, _mapping(path, row.get(method, {}), "must be a mapping of what differs"))
        entries = _with_changes(group_settings, changes, ADAPTER_SETTINGS)
        settings = {n: _adapter_setting(method, n, *entry, texts) for n, entry in entries.items()}
        if settings:
            keys = {"role": role, "pool": pool, "upstream": upstream, "method": method}
            runs[f"{key}-{upstream}-{method}"] = AdaptRun(**keys, settings=settings)
    return runs


def _adapter_setting(
    method: str, name: str, location: str, group: Entry, texts: bool
) -> AdapterSetting:
    """Return one training of a method's adapters. texts: for language models."""
    fields: dict[str, Any] = {"stream": "train" if texts else STREAMS[method], **group}
    for key in ("samples", "seeds"):
        require(key in fields, location, list(group), f"lacks {key}")
    draw_fields = {key: fields.pop(key) for key in ("stream", "samples")} | {"batch": ADAPTER_BATCH}
    draw, seeds = SampleDraw.from_mapping(draw_fields, location), fields.pop("seeds")
    training = ADAPTERS[method].from_mapping(fields, location)
    fitting = ("test_unlabelled",) if name.endswith("_scored") else UNLABELLED
    fitting = ("train",) if texts or name.endswith("_train") else fitting
    expected = f"must be {' or '.join(fitting)}"
    require(draw.stream in fitting, f"{location}.stream", draw.stream, expected)
    setting = {"draw": draw, "seeds": seeds, "training": training}
    return AdapterSetting.from_mapping(setting, location)


def _plain_run(kind: type[S], key: str, entry: Any, suite: str) -> S | None:
    """Return an entry whose group is the settings class itself; None: not run."""
    (role, pool), location = role_and_pool(key, kind.section), f"{kind.section}.{key}"
    settings = for_suite(location, entry, suite)
    fields = {"role": role, "pool": pool, **(settings or {})}
    return None if settings is None else kind.from_mapping(fields, f"{location}.{suite}")


def shared_settings(key: str, entry: Any, suite: str, main: Main) -> Entry:
    """Return the settings that studies of a role and pool share: `comparison` and `paper`."""
    role, _ = role_and_pool(key, STUDIED)
    location, group = f"{STUDIED}.{key}", for_suite(f"{STUDIED}.{key}", entry, suite)
    if not group:
        return {}
    for name, settings in group.items():
        require_known(f"{location}.{suite}", name, ("comparison",))
        _mapping(f"{location}.{suite}.{name}", settings)
    by_name = {name: value for name, value in main.get(role, {}).items() if name != "samples"}
    comparison = dict(group.get("comparison", {}))
    if comparison.get("setting") in by_name:
        comparison = {"featcal": by_name[comparison["setting"]], **comparison}
    return {"comparison": comparison, **({"paper": by_name["paper"]} if "paper" in by_name else {})}


def study_run(
    kind: str, key: str, entry: Any, suite: str, studied: Mapping[str, Entry] | None = None
) -> Any:
    """Return one study, or None, with the settings that studies share and those of its own."""
    role, pool = role_and_pool(key, kind)
    location, settings = f"{kind}.{key}.{suite}", for_suite(f"{kind}.{key}", entry, suite)
    if settings is None:
        return None
    common = (studied or {}).get(key, {})
    comparison, paper = common.get("comparison", {}), common.get("paper")
    featcal, setting = comparison.get("featcal"), comparison.get("setting")
    shared: dict[str, Any] = {"comparison": comparison, "setting": setting, "featcal": featcal}
    shared |= {"paper": paper, "suite": featcal}
    fields = {name: shared[name] for name in studies()[kind].model_fields if shared.get(name)}
    fields |= {"role": role, "pool": pool, **settings}
    if isinstance(settings.get("comparison"), dict):
        fields["comparison"] = {**comparison, **settings["comparison"]}
    if isinstance(settings.get("at_papers"), bool):
        valid = not settings["at_papers"] or (paper is not None and setting != "paper")
        expected = "must be left out where the suite has no settings but the paper's"
        require(valid, f"{location}.at_papers", True, expected)
        fields["at_papers"] = paper if settings["at_papers"] else None
    if isinstance(settings.get("without"), dict):
        for name, change in settings["without"].items():
            valid = isinstance(change, dict) and bool(change)
            require(valid, f"{location}.without.{name}", change, "must be a mapping of settings")
        base = fields.get("featcal") or {}
        fields["without"] = {n: {**base, **change} for n, change in settings["without"].items()}
    if isinstance(settings.get("around"), list):
        at = {"paper": {"featcal": paper}, setting: {"featcal": featcal}}
        fields["around"] = [{**at.get(s.get("setting"), {}), **s} for s in settings["around"]]
    return studies()[kind].from_mapping(fields, location)


def _check_references(experiments: Experiments) -> None:
    """Raise BadSetting unless studies start from merged models and measure calibrated ones."""
    for kind, runs in {"measure": experiments.measure, **experiments.studies}.items():
        for key, run in ((key, run) for key, run in runs.items() if run):
            merged = _of(experiments.merge, run.role, run.pool)
            location = f"{kind}.{key}.{experiments.suite}"
            expected = f"must be one of the merged models: {', '.join(merged) or 'none'}"
            for upstream in run.starts:
                require(f"{key}-{upstream}" in merged, location, f"{key}-{upstream}", expected)
            if isinstance(run, MeasureRun):
                _require_seeds(f"{location}.seed", run, experiments)


def _require_seeds(location: str, measured: MeasureRun, experiments: Experiments) -> None:
    """Raise BadSetting unless every model that is measured is made with its seed."""
    seeds_by_run: dict[str, tuple[int, ...]] = {}
    for name in measured.settings:
        calibrated = experiments.calibrate.get(f"{measured.merged}-{name}")
        run = f"calibrate.{measured.key} from {measured.upstream} at {name}"
        seeds_by_run[run] = calibrated.seeds if calibrated else ()
        for adapt in experiments.adapt.values():
            if adapt.merged == measured.merged and name in adapt.settings:
                run = f"adapt.{measured.key} from {measured.upstream}, {adapt.method} at {name}"
                seeds_by_run[run] = adapt.settings[name].seeds
    for run, seeds in seeds_by_run.items():
        listed = ", ".join(map(str, seeds)) or "none in this suite"
        expected = f"must be one of the seeds of {run} ({listed})"
        require(measured.seed in seeds, location, measured.seed, expected)
