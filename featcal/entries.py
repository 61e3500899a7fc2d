"""One entry of params.yaml into one run: the chosen suite's group of settings, checked, with errors that name the place.

Null instead of a group means that the suite does not run the experiment. Knows single entries; what refers to what is checked in
experiments.py.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from featcal.merging.settings import SETTINGS as SETTINGS_OF
from featcal.merging.settings import settings_of
from featcal.runs import (
    ADAPTER_SETTINGS,
    ADAPTERS,
    SETTINGS,
    STREAMS,
    TEXT_POOLS,
    AblateRun,
    AdapterSetting,
    AdaptRun,
    CalibrateRun,
    Draw,
    MeasureRun,
    MergeRun,
    MultitaskRun,
    Reading,
    Rescaling,
)
from featcal.settings import Calibration, from_mapping, require, text, whole_number

Entry = Mapping[str, Any]


def for_suite(place: str, entry: Entry, suite: str, fixed: tuple[str, ...], free: tuple[str, ...] = ()) -> Entry | None:
    """The settings of the chosen suite, and a check of the words around them.

    fixed: words that make up the entry's name.   free: other words that stand beside the groups.
    """
    require(isinstance(entry, dict), place, entry, "must be a mapping")
    for key in (*fixed, *free):
        require(key in entry, place, list(entry), f"lacks {key}")
        if key != "pool" or entry[key] not in TEXT_POOLS:
            (whole_number if key == "pool" else text)(f"{place}.{key}", entry[key])
    wanted = "-".join(str(entry[key]) for key in fixed)  # files and stages are found by this name
    require(place.partition(".")[2] == wanted, place, wanted, "must be the entry's name, made of " + ", ".join(fixed))
    groups = {k: v for k, v in entry.items() if k not in (*fixed, *free)}
    for key, group in groups.items():
        require(group is None or isinstance(group, dict), f"{place}.{key}", group, "must be a mapping of settings, or null")
    way_out = f"has no settings for the suite {suite!r}; write `{suite}: null` to leave it out"
    require(suite in groups, place, sorted(groups), way_out)
    chosen: Entry | None = groups[suite]
    return chosen


def merge_run(place: str, entry: Entry, suite: str) -> MergeRun:
    """A merged model of `merge` (no data) or `merge_with_data`, whose groups also tell samples, batch, seed and stream."""
    with_data = place.startswith("merge_with_data.")
    named = "upstream" in entry if isinstance(entry, dict) else False  # two models by one method need two names
    fixed, free = (("role", "pool", "upstream"), ("method",)) if named else (("role", "pool", "method"), ())
    group = for_suite(place, entry, suite, fixed, free)
    method = entry["method"]
    section = "merge_with_data" if method in STREAMS else "merge"
    if method in SETTINGS_OF:
        require(place.startswith(f"{section}."), place, method, f"belongs to {section}: methods that look at data stand apart")
    options, draw = merge_settings(f"{place}.{suite}" if group else place, method, group, with_data)
    return MergeRun(entry["role"], entry["pool"], method, entry.get("upstream", method), options, draw)


def merge_settings(place: str, method: str, group: Entry | None, with_data: bool) -> tuple[Entry | None, Draw | None]:
    """A merger's own settings, checked, and its images where it looks at any."""
    options, draw = group, None
    if group is not None and with_data:
        images = {key: group[key] for key in ("stream", "samples", "batch", "seed") if key in group}
        options = {key: value for key, value in group.items() if key not in images}
        draw = from_mapping(Draw, {"stream": STREAMS.get(method, "train"), **images}, place)
    settings_of(method, options or {}, place)
    return options, draw


def calibrate_run(place: str, entry: Entry, suite: str) -> CalibrateRun:
    """Calibrated models, one per seed."""
    fixed = ("role", "pool", "upstream", "setting")
    chosen = for_suite(place, entry, suite, fixed)
    words = {key: entry[key] for key in fixed}
    require(words["setting"] in SETTINGS, f"{place}.setting", words["setting"], f"must be one of {', '.join(SETTINGS)}")
    if chosen is None:
        return CalibrateRun(**words, calibration=None)
    return calibration(f"{place}.{suite}", chosen, words)


def adapt_run(place: str, entry: Entry, suite: str) -> AdaptRun:
    """Adapters of one method behind one merged model: a group holds one mapping per word of ADAPTER_SETTINGS."""
    fixed = ("role", "pool", "upstream", "method")
    chosen = for_suite(place, entry, suite, fixed)
    words = {key: entry[key] for key in fixed}
    require(words["method"] in ADAPTERS, f"{place}.method", words["method"], f"must be one of {', '.join(ADAPTERS)}")
    if chosen is None:
        return AdaptRun(**words, settings=None)
    return AdaptRun(**words, settings=adapter_settings(f"{place}.{suite}", words["method"], chosen))


def adapter_settings(place: str, method: str, chosen: Entry, texts: bool = False) -> dict[str, AdapterSetting]:
    """Trainings of one method's adapters by the word of their settings.

    texts: of language models, whose adapters are trained where an answer is read, which unlabelled texts do not have.
    """
    settings = {}
    for name, group in chosen.items():
        where = f"{place}.{name}"
        require(name in ADAPTER_SETTINGS, place, name, f"must hold {', '.join(ADAPTER_SETTINGS)}")
        settings[str(name)] = _adapter_setting(where, method, group, texts)
        streams = "train" if texts or name.endswith("_train") else "test_unlabelled"
        require(settings[name].draw.stream == streams, f"{where}.stream", settings[name].draw.stream, f"must be {streams}")
    return settings


def _adapter_setting(place: str, method: str, group: Any, texts: bool) -> AdapterSetting:
    require(isinstance(group, dict), place, group, "must be a mapping of settings")
    training = dict(group)
    for key in ("samples", "seeds"):
        require(key in training, place, list(group), f"lacks {key}")
    stream = training.pop("stream", "train" if texts else STREAMS[method])
    samples, seeds = training.pop("samples"), training.pop("seeds")
    drawn = _seeds(f"{place}.seeds", seeds)
    settings = from_mapping(ADAPTERS[method], training, place)
    return AdapterSetting(settings, from_mapping(Draw, {"stream": stream, "samples": samples, "batch": 250}, place), drawn)


def ablate_run(place: str, entry: Entry, suite: str) -> AblateRun | None:
    """FeatCal's settings as in `calibrate`, with `without` (by name, what is changed) and `rescale`."""
    fixed = ("role", "pool", "upstream")
    chosen = for_suite(place, entry, suite, fixed)
    if chosen is None:
        return None
    place, settings = f"{place}.{suite}", dict(chosen)
    for key in ("without", "rescale"):
        require(isinstance(settings.get(key), dict), place, list(chosen), f"must hold a mapping called {key}")
    changes, rescale = settings.pop("without"), settings.pop("rescale")
    whole = calibration(place, settings, {**{key: entry[key] for key in fixed}, "setting": "whole"})
    assert whole.calibration is not None
    values = asdict(whole.calibration)
    without = {}
    for name, change in changes.items():
        require(isinstance(change, dict) and bool(change), f"{place}.without.{name}", change, "must be a mapping of settings")
        without[str(name)] = from_mapping(Calibration, values | change, f"{place}.without.{name}")
    return AblateRun(whole, without, from_mapping(Rescaling, rescale, f"{place}.rescale"))


def multitask_run(place: str, entry: Entry, suite: str) -> MultitaskRun | None:
    """The model trained on all tasks of one role and pool."""
    chosen = for_suite(place, entry, suite, ("role", "pool"))
    if chosen is None:
        return None
    return from_mapping(MultitaskRun, {"role": entry["role"], "pool": entry["pool"], **chosen}, f"{place}.{suite}")


def measure_run(place: str, entry: Entry, suite: str) -> MeasureRun | None:
    """Drift and projection of one role and pool."""
    chosen = for_suite(place, entry, suite, ("role", "pool"))
    if chosen is None:
        return None
    return from_mapping(MeasureRun, {"role": entry["role"], "pool": entry["pool"], **chosen}, f"{place}.{suite}")


def calibration(place: str, group: Entry, words: Mapping[str, Any]) -> CalibrateRun:
    """Method and draw of a group that holds both."""
    method = dict(group)
    draw: dict[str, Any] = {}
    if isinstance(words["pool"], str):
        draw["reading"] = from_mapping(Reading, method.pop("reading", {}), f"{place}.reading")
    for key in ("samples", "batch", "seeds"):
        require(key in method, place, list(group), f"lacks {key}")
        draw[key] = method.pop(key)
    for key in ("samples", "batch"):
        whole_number(f"{place}.{key}", draw[key])
    draw["seeds"] = _seeds(f"{place}.seeds", draw["seeds"])
    return CalibrateRun(**words, calibration=from_mapping(Calibration, method, place), **draw)


def _seeds(place: str, seeds: Any) -> tuple[int, ...]:
    require(isinstance(seeds, list) and bool(seeds), place, seeds, "must be a list of whole numbers")
    for seed in seeds:
        whole_number(place, seed, least=0)
    require(len(set(seeds)) == len(seeds), place, seeds, "must name each seed once")
    return tuple(seeds)
