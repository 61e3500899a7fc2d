"""A whole pool of params.yaml: its mergers, FeatCal and the adapters on each, as the runs that single experiments are.

Larger pools of images, and pools of texts. One group of settings per part and suite, because the models of a part are made by one
stage. Knows nothing of torch, models or where results go.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from featcal.entries import Entry, adapter_settings, calibration, for_suite, merge_settings
from featcal.errors import UnknownKey
from featcal.runs import ADAPTERS, SETTINGS, STREAMS, AdaptRun, CalibrateRun, MergeRun, Pool
from featcal.settings import require

MERGERS = ("average", "task_arithmetic", "adamerging", "wudi")  # in the order of the paper's tables
TEXT_MERGERS = ("task_arithmetic",)
TEXT_ADAPTERS = ("surgery", "prob_surgery")
PARTS = ("mergers", "featcal", *ADAPTERS)
TEXT_PARTS = ("mergers", "featcal", *TEXT_ADAPTERS)


@dataclass(frozen=True)
class WholePool:
    """Everything made of one role and pool, by the key a single experiment would have, also what a suite does not run."""

    role: str
    pool: Pool
    merge: Mapping[str, MergeRun]
    calibrate: Mapping[str, CalibrateRun]
    adapt: Mapping[str, AdaptRun]


def larger_pool(place: str, entry: Entry, suite: str) -> WholePool:
    """One entry of `larger_pools`."""
    return _whole_pool(place, entry, suite, MERGERS, PARTS)


def language_pool(place: str, entry: Entry, suite: str) -> WholePool:
    """One entry of `language_pools`, whose one merger is task arithmetic, as in the paper."""
    return _whole_pool(place, entry, suite, TEXT_MERGERS, TEXT_PARTS)


def _whole_pool(place: str, entry: Entry, suite: str, mergers: tuple[str, ...], parts: tuple[str, ...]) -> WholePool:
    """Everything made of one role and pool.

    mergers: settings by merger. featcal and the adapters: by the word of the settings; each is run on every merger.
    Raises: UnknownKey for a misspelt merger or word; BadSetting.
    """
    require(isinstance(entry, dict), place, entry, "must be a mapping")
    for key in entry:
        if key not in ("role", "pool", *parts):
            raise UnknownKey(place, str(key), ["role", "pool", *parts])
    words = {key: entry[key] for key in ("role", "pool") if key in entry}
    for_suite(place, {**words, suite: None}, suite, ("role", "pool"))  # the entry's name
    chosen = {part: _part(f"{place}.{part}", entry.get(part), suite) for part in parts}
    merge = _merge(f"{place}.mergers.{suite}", chosen["mergers"], words, mergers)
    upstreams = {run.upstream: run.options is not None for run in merge.values()}
    return WholePool(
        **words,
        merge=merge,
        calibrate=_calibrate(f"{place}.featcal.{suite}", chosen["featcal"], words, upstreams),
        adapt={
            _key(words, upstream, method): adapt
            for method in ADAPTERS
            if method in parts
            for upstream, adapt in _adapt(f"{place}.{method}.{suite}", method, chosen[method], words, upstreams).items()
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


def _merge(place: str, chosen: Entry, words: Mapping[str, Any], mergers: tuple[str, ...]) -> dict[str, MergeRun]:
    for method in chosen:
        if method not in mergers:
            raise UnknownKey(place, str(method), list(mergers))
    found = {}
    for method in mergers:
        options, draw = merge_settings(f"{place}.{method}", method, chosen.get(method), method in STREAMS)
        found[_key(words, method)] = MergeRun(**words, method=method, upstream=method, options=options, draw=draw)
    return found


def _calibrate(place: str, chosen: Entry, words: Mapping[str, Any], upstreams: Mapping[str, bool]) -> dict[str, CalibrateRun]:
    for setting in chosen:
        if setting not in SETTINGS:
            raise UnknownKey(place, str(setting), list(SETTINGS))
    found = {}
    for upstream, made in upstreams.items():
        for setting in SETTINGS:
            named = {**words, "upstream": upstream, "setting": setting}
            found[_key(words, upstream, setting)] = (
                calibration(f"{place}.{setting}", chosen[setting], named)
                if made and setting in chosen
                else CalibrateRun(**named, calibration=None)
            )
    return found


def _adapt(place: str, method: str, chosen: Entry, words: Mapping[str, Any], run: Mapping[str, bool]) -> dict[str, AdaptRun]:
    settings = adapter_settings(place, method, chosen, texts=isinstance(words["pool"], str))
    return {
        upstream: AdaptRun(**words, upstream=upstream, method=method, settings=settings if settings and made else None)
        for upstream, made in run.items()
    }


def _key(words: Mapping[str, Any], *more: str) -> str:
    return "-".join((words["role"], str(words["pool"]), *more))
