"""One entry of params.yaml into runs: the chosen suite's group of settings, checked, with errors
that name the place.

An entry is called <role>-<pool>. Null instead of a group means that the suite does not run the
experiment. What starts from merged models tells under `from` what differs there from the group.
Knows single entries; what refers to what is checked in experiments.py.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from featcal.merging.registry import method_names, settings_of
from featcal.settings import Calibration, Settings, require
from reproduction.experiments.runs import (
    ADAPTER_BATCH,
    ADAPTER_SETTINGS,
    ADAPTERS,
    HEADLINE_POOL,
    SETTINGS,
    STREAMS,
    TEXT_ADAPTERS,
    UNLABELLED,
    AdapterSetting,
    AdaptRun,
    CalibrateRun,
    Draw,
    MergeRun,
    require_known,
    role_and_pool,
)

P = TypeVar("P", bound=Settings)
Entry = Mapping[str, Any]
FROM = "from"


def for_suite(place: str, entry: Any, suite: str) -> Entry | None:
    """The settings of the chosen suite."""
    require(isinstance(entry, dict), place, entry, "must be a mapping")
    for key, group in entry.items():
        require(
            group is None or isinstance(group, dict),
            f"{place}.{key}",
            group,
            "must be a mapping of settings, or null",
        )
    way_out = f"has no settings for the suite {suite!r}; write `{suite}: null` to leave it out"
    require(suite in entry, place, sorted(map(str, entry)), way_out)
    chosen: Entry | None = entry[suite]
    return chosen


def merge_runs(key: str, entry: Any, suite: str) -> dict[str, MergeRun]:
    """The merged models of one role and pool, by key."""
    role, pool = role_and_pool(key, "merge")
    require(isinstance(entry, dict), f"merge.{key}", entry, "must be a mapping of mergers")
    found = {}
    for upstream, groups in entry.items():
        place = f"merge.{key}.{upstream}"
        told = str(upstream)
        if isinstance(groups, dict) and "method" in groups:  # of one that no suite runs here
            told, groups = (
                str(groups["method"]),
                {word: own for word, own in groups.items() if word != "method"},
            )
        group = for_suite(place, groups, suite)
        methods = {
            str(own.get("method", upstream)) for own in groups.values() if own is not None
        } or {told}
        require(
            len(methods) == 1,
            f"{place}.{suite}.method",
            sorted(methods),
            "must be the same in every suite",
        )
        (method,) = methods
        require_known(place, method, method_names())
        given = (
            None
            if group is None
            else {word: value for word, value in group.items() if word != "method"}
        )
        options, draw = merge_settings(f"{place}.{suite}", method, given)
        found[f"{key}-{upstream}"] = MergeRun(
            role=role,
            pool=pool,
            method=method,
            upstream=str(upstream),
            options=options,
            draw=draw,
        )
    return found


def merge_settings(
    place: str, method: str, group: Entry | None
) -> tuple[Entry | None, Draw | None]:
    """A merger's own settings, checked, and its images where it looks at any."""
    options, draw = group, None
    if group is not None and method in STREAMS:
        images = {key: group[key] for key in ("stream", "samples", "batch", "seed") if key in group}
        options = {key: value for key, value in group.items() if key not in images}
        draw = Draw.from_mapping({"stream": STREAMS[method], **images}, place)
    settings_of(method, options or {}, place)
    return options, draw


def group_and_rows(
    place: str, entry: Any, suite: str, made: Mapping[str, MergeRun]
) -> tuple[Entry | None, dict[str, Any]]:
    """The settings of the chosen suite, and what `from` tells of every merged model.

    Of one that nothing is made of, or that is not made itself, that is None.
    """
    require(isinstance(entry, dict), place, entry, "must be a mapping")
    require(FROM in entry, place, list(entry), f"lacks {FROM}")
    group, rows = (
        for_suite(place, {key: group for key, group in entry.items() if key != FROM}, suite),
        entry[FROM],
    )
    require(
        isinstance(rows, dict),
        f"{place}.{FROM}",
        rows,
        "must name the merged models, each with {} or what differs there",
    )
    there = {run.upstream: run.options is not None for run in made.values()}
    for upstream, row in rows.items():
        require_known(f"{place}.{FROM}", upstream, there)
        fine = row is None or isinstance(row, dict)
        require(
            fine, f"{place}.{FROM}.{upstream}", row, "must be a mapping of what differs, or null"
        )
    return group, {upstream: row if there[upstream] else None for upstream, row in rows.items()}


def differing(
    group: tuple[str, Entry], row: tuple[str, Entry], words: tuple[str, ...]
) -> dict[str, tuple[str, Entry]]:
    """Settings by word, in the order of `words`, with their place: those of the group with what the
    row changes.

    A word that is null in the group is not run, whatever the row says; one that is null in the row
    is not run there; one that the group does not name is the row's alone. group, row: the place of
    each and what it holds. Raises: UnknownKey for another word.
    """
    for place, held in (group, row):
        for word, settings in held.items():
            require_known(place, word, words)
            fine = settings is None or isinstance(settings, dict)
            require(fine, f"{place}.{word}", settings, "must be a mapping of settings, or null")
    found: dict[str, tuple[str, Entry]] = {}
    for word in words:
        both = [(place, held[word]) for place, held in (group, row) if word in held]
        if both and all(settings is not None for _, settings in both):
            merged = {key: value for _, settings in both for key, value in settings.items()}
            found[word] = (f"{both[-1][0]}.{word}", merged)
    return found


def calibrate_runs(
    key: str, entry: Any, suite: str, made: Mapping[str, MergeRun]
) -> dict[str, CalibrateRun]:
    """FeatCal of one role and pool, by key: on every merged model at every word of SETTINGS, also
    what is not run.
    """
    role, pool = role_and_pool(key, "calibrate")
    place = f"calibrate.{key}"
    group, rows = group_and_rows(place, entry, suite, made)
    found = {}
    for upstream, row in rows.items():
        own = (f"{place}.{FROM}.{upstream}", row)
        chosen = (
            {}
            if group is None or row is None
            else differing((f"{place}.{suite}", group), own, SETTINGS)
        )
        for setting in SETTINGS:
            words: dict[str, Any] = {
                "role": role,
                "pool": pool,
                "upstream": upstream,
                "setting": setting,
            }
            run = (
                calibration(*chosen[setting], words)
                if setting in chosen
                else CalibrateRun(**words, calibration=None)
            )
            found[f"{key}-{upstream}-{setting}"] = run
    return found


def adapt_runs(
    key: str, entry: Any, suite: str, made: Mapping[str, MergeRun]
) -> dict[str, AdaptRun]:
    """Adapters of one role and pool, by key: behind every merged model, a mapping per adapter and
    word of ADAPTER_SETTINGS.
    """
    role, pool = role_and_pool(key, "adapt")
    place = f"adapt.{key}.{suite}"
    group, rows = group_and_rows(f"adapt.{key}", entry, suite, made)
    methods = TEXT_ADAPTERS if isinstance(pool, str) else tuple(ADAPTERS)
    for where, mapping in (
        (place, group),
        *((f"adapt.{key}.{FROM}.{name}", row) for name, row in rows.items()),
    ):
        for method in mapping or ():
            require_known(where, method, methods)
    # rows of a results file stand in this order
    pairs = (
        [(u, m) for u in rows for m in methods]
        if pool == HEADLINE_POOL
        else [(u, m) for m in methods for u in rows]
    )
    found = {}
    for upstream, method in pairs:
        own, row = (group or {}).get(method), rows[upstream]
        settings = None
        if own is not None and row is not None:
            require(
                isinstance(own, dict),
                f"{place}.{method}",
                own,
                "must be a mapping of settings by their word",
            )
            changes = (f"adapt.{key}.{FROM}.{upstream}.{method}", row.get(method, {}))
            require(isinstance(changes[1], dict), *changes, "must be a mapping of what differs")
            chosen = differing((f"{place}.{method}", own), changes, ADAPTER_SETTINGS)
            settings = adapter_settings(method, chosen, texts=isinstance(pool, str)) or None
        found[f"{key}-{upstream}-{method}"] = AdaptRun(
            role=role, pool=pool, upstream=upstream, method=method, settings=settings
        )
    return found


def adapter_settings(
    method: str, chosen: Mapping[str, tuple[str, Entry]], texts: bool
) -> dict[str, AdapterSetting]:
    """Trainings of one method's adapters by the word of their settings, each given with its place.

    texts: of language models, whose adapters are trained where an answer is read, which unlabelled
    texts do not have.
    """
    settings = {}
    for name, (where, group) in chosen.items():
        own: dict[str, Any] = {"stream": "train" if texts else STREAMS[method], **group}
        for key in ("samples", "seeds"):
            require(key in own, where, list(group), f"lacks {key}")
        images = {key: own.pop(key) for key in ("stream", "samples")} | {"batch": ADAPTER_BATCH}
        made = {
            "draw": Draw.from_mapping(images, where),
            "seeds": own.pop("seeds"),
            "training": ADAPTERS[method].from_mapping(own, where),
        }
        settings[name] = AdapterSetting.from_mapping(made, where)
        stream, fitting = settings[name].draw.stream, UNLABELLED
        if texts or name.endswith("_train"):
            fitting = ("train",)
        elif name.endswith("_scored"):
            fitting = ("test_unlabelled",)
        require(stream in fitting, f"{where}.stream", stream, f"must be {' or '.join(fitting)}")
    return settings


def plain_run(kind: type[P], key: str, entry: Any, suite: str) -> P | None:
    """An entry whose group is the dataclass itself, in the section of its name; None where the
    suite does not run it.
    """
    role, pool = role_and_pool(key, kind.section)
    place = f"{kind.section}.{key}"
    chosen = for_suite(place, entry, suite)
    return (
        None
        if chosen is None
        else kind.from_mapping({"role": role, "pool": pool, **chosen}, f"{place}.{suite}")
    )


def calibration(place: str, group: Entry, words: Mapping[str, Any]) -> CalibrateRun:
    """Method and draw of a group that holds both."""
    for key in (
        "samples",
        "batch",
        "seeds",
        "ridge",
        "anchor_blend",
        "interpolation",
    ):  # whatever the library's defaults are
        require(key in group, place, list(group), f"lacks {key}")
    method = dict(group)
    draw: dict[str, Any] = {key: method.pop(key) for key in ("samples", "batch", "seeds")}
    if isinstance(words["pool"], str):
        draw["reading"] = method.pop("reading", {})
    own = Calibration.from_mapping(method, place)
    return CalibrateRun.from_mapping({**words, **draw, "calibration": own}, place)
