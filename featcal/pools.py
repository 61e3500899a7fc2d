"""A larger pool of params.yaml: four mergers, FeatCal and both adapters on each, as the runs that single experiments are.

One group of settings per part and suite, because the four models of a part are made by one stage. Knows nothing of torch, models
or where results go.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from featcal.entries import Entry, adapter_settings, calibration, for_suite, merge_settings
from featcal.errors import UnknownKey
from featcal.runs import ADAPTERS, SETTINGS, STREAMS, AdaptRun, CalibrateRun, MergeRun
from featcal.settings import require

MERGERS = ("average", "task_arithmetic", "adamerging", "wudi")  # in the order of the paper's tables
PARTS = ("mergers", "featcal", *ADAPTERS)


@dataclass(frozen=True)
class LargerPool:
    """Everything made of one role and pool, by the key a single experiment would have; what a suite does not run is there too."""

    role: str
    pool: int
    merge: Mapping[str, MergeRun]
    calibrate: Mapping[str, CalibrateRun]
    adapt: Mapping[str, AdaptRun]


def larger_pool(place: str, entry: Entry, suite: str) -> LargerPool:
    """One entry of `larger_pools`.

    mergers: settings by merger. featcal, surgery, prob_surgery: by the word of the settings; each is run on every merger.
    Raises: UnknownKey for a misspelt merger or word; BadSetting.
    """
    require(isinstance(entry, dict), place, entry, "must be a mapping")
    for key in entry:
        if key not in ("role", "pool", *PARTS):
            raise UnknownKey(place, str(key), ["role", "pool", *PARTS])
    words = {key: entry[key] for key in ("role", "pool") if key in entry}
    for_suite(place, {**words, suite: None}, suite, ("role", "pool"))  # the entry's name
    chosen = {part: _part(f"{place}.{part}", entry.get(part), suite) for part in PARTS}
    merge = _merge(f"{place}.mergers.{suite}", chosen["mergers"], words)
    run = [run.upstream for run in merge.values() if run.options is not None]
    return LargerPool(
        **words,
        merge=merge,
        calibrate=_calibrate(f"{place}.featcal.{suite}", chosen["featcal"], words, run),
        adapt={
            _key(words, upstream, method): adapt
            for method in ADAPTERS
            for upstream, adapt in _adapt(f"{place}.{method}.{suite}", method, chosen[method], words, run).items()
        },
    )


def _part(place: str, groups: Any, suite: str) -> Entry:
    """The suite's group of one part; empty where it is null."""
    require(isinstance(groups, dict), place, groups, "must be a mapping with one group of settings per suite")
    way_out = f"has no settings for the suite {suite!r}; write `{suite}: null` to leave it out"
    require(suite in groups, place, sorted(groups), way_out)
    group = groups[suite]
    require(group is None or isinstance(group, dict), f"{place}.{suite}", group, "must be a mapping of settings, or null")
    for name, inner in (group or {}).items():
        require(isinstance(inner, dict), f"{place}.{suite}.{name}", inner, "must be a mapping of settings")
    return dict(group or {})


def _merge(place: str, chosen: Entry, words: Mapping[str, Any]) -> dict[str, MergeRun]:
    for method in chosen:
        if method not in MERGERS:
            raise UnknownKey(place, str(method), list(MERGERS))
    found = {}
    for method in MERGERS:
        options, draw = merge_settings(f"{place}.{method}", method, chosen.get(method), method in STREAMS)
        found[_key(words, method)] = MergeRun(**words, method=method, upstream=method, options=options, draw=draw)
    return found


def _calibrate(place: str, chosen: Entry, words: Mapping[str, Any], run: list[str]) -> dict[str, CalibrateRun]:
    for setting in chosen:
        if setting not in SETTINGS:
            raise UnknownKey(place, str(setting), list(SETTINGS))
    found = {}
    for upstream in MERGERS:
        for setting in SETTINGS:
            named = {**words, "upstream": upstream, "setting": setting}
            made = setting in chosen and upstream in run
            found[_key(words, upstream, setting)] = (
                calibration(f"{place}.{setting}", chosen[setting], named) if made else CalibrateRun(**named, calibration=None)
            )
    return found


def _adapt(place: str, method: str, chosen: Entry, words: Mapping[str, Any], run: list[str]) -> dict[str, AdaptRun]:
    settings = adapter_settings(place, method, chosen)
    return {
        upstream: AdaptRun(**words, upstream=upstream, method=method, settings=settings if settings and upstream in run else None)
        for upstream in MERGERS
    }


def _key(words: Mapping[str, Any], *more: str) -> str:
    return "-".join((words["role"], str(words["pool"]), *more))
