"""Build the page on what the gain is made of: controls, shares of the gap by number of tasks, drift, ranks."""

import math
from collections.abc import Iterator
from html import escape
from typing import Any

from matplotlib.figure import Figure

from reproduction.report.claims import studied_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import INK, one_panel, shown
from reproduction.report.html import PageOutput, margin, note, table
from reproduction.report.paper import IMAGES, REAL, SIZES, paper_value
from reproduction.report.statistics import noise
from reproduction.report.tables import (
    LARGER,
    MERGERS,
    METHODS,
    NAMES,
    SETTING_LABELS,
    SHIFT,
    UPSTREAMS,
    Key,
    average,
    paper_recovered,
    row_name,
    settings_shown,
    share,
)

CLOSED = "wudi_closed_form"
STUDIED = ("task_arithmetic", "wudi")  # mergers that have every control
INGREDIENTS = {
    "without_bias": "w/ FeatCal, biases left", "without_norm": "w/ FeatCal, LayerNorms left",
    "without_task_weights": "w/ FeatCal, tasks not weighted", "without_forward_order": "w/ FeatCal, on the merger’s features",
    "without_interpolation": "w/ FeatCal, α = 1", "without_extrapolation": "w/ FeatCal, ρ = 1",
}  # fmt: skip
ADAPTERS = {
    "suite": "in proportion, unlabelled", "suite_train": "in proportion, training",
    "suite_scored": "in proportion, unlabelled and scored",
    "paper": "published code’s size, unlabelled", "paper_train": "published code’s size, training",
}  # fmt: skip
SHIFTED = "w/ mean shift, one constant vector per task"
ASKED = ("task_arithmetic", "wudi", CLOSED)  # mergers that the questions are asked of
SCORED = (
    "_scored"  # adapters trained on the scored rows: on drawn images the main setting does that
)
SHORT = {
    "anchor": "anchor alone", "rescaled": "merger at best scale", "regmean": "RegMean, same samples",
    "regmean_plus_plus": "RegMean++, same samples", "without_bias": "biases left", "without_norm": "norms left",
    "without_task_weights": "tasks not weighted", "without_forward_order": "merger’s features",
    "without_interpolation": "α = 1", "without_extrapolation": "ρ = 1", "surgery": "Surgery",
    "prob_surgery": "ProbSurgery", "suite": "in proportion, unlabelled", "suite_train": "in proportion, train",
    "suite_scored": "in proportion, scored", "paper": "published size, unlabelled",
    "paper_train": "published size, train", SHIFT: "mean shift",
}  # fmt: skip
LOOKS: dict[str, dict[str, Any]] = {
    REAL: {"color": "#009E73", "marker": "D"}, IMAGES: {"color": "#0072B2", "marker": "o"},
    "clip_l14": {"color": "#D55E00", "marker": "s", "markerfacecolor": "white"},
}  # fmt: skip  # Okabe and Ito
TABLES = {REAL: "table01", IMAGES: "table01", "clip_l14": "table07"}
POOLS = ("8", *LARGER)


def controls_of(suite: str, upstream: str) -> dict[Key, str]:
    """Return the rows next to one merger by what names them; the merger itself and FeatCal come first."""
    main, rows = studied_setting(suite), {(upstream, "merged", ""): MERGERS[upstream]}
    rows |= {
        (upstream, "featcal", name): f"w/ FeatCal, {SETTING_LABELS[name]}"
        for name in settings_shown(suite)
    }
    if upstream in STUDIED:
        rows |= {(upstream, "anchor", ""): "The anchor alone, ρ times the merger’s change"}
        rows |= {(upstream, "rescaled", ""): f"{MERGERS[upstream]} at its best scale"}
        rows |= {
            (name, "merged", ""): f"{MERGERS[name]}, FeatCal’s images"
            for name in ("regmean", "regmean_plus_plus")
        }
        rows |= {(upstream, "featcal", name): words for name, words in INGREDIENTS.items()}
    rows |= {(upstream, SHIFT, main): f"{SHIFTED}, unlabelled"}
    rows |= {(upstream, SHIFT, f"{main}_train"): f"{SHIFTED}, training"}
    for method in ("surgery", "prob_surgery"):
        rows |= {
            (upstream, method, name): f"{METHODS[method]}, {words}"
            for name, words in ADAPTERS.items()
        }
    return rows


def questions(suite: str) -> PageOutput:
    """Show pairs of rows with their margins, per merger and model."""
    rows = []
    for words, *sides in _pairs(studied_setting(suite)):
        cells = [escape(words)]
        for merger in ASKED:
            for role in SIZES:
                keys = [
                    (
                        upstream or merger,
                        method,
                        setting if role == REAL else setting.removesuffix(SCORED),
                    )
                    for upstream, method, setting in sides
                ]
                cells.append(margin(*(average(Evidence(suite, role, "8"), key) for key in keys)))
        rows.append(("", cells))
    head = [
        "First minus second",
        *(f"{MERGERS[m]}, {size}" for m in ASKED for size in SIZES.values()),
    ]
    caption = "Margins of the average (points); within noise: at most two standard errors"
    return PageOutput(table(head, rows, caption, "fc-long"))


def _pairs(main: str) -> list[tuple[str, Key, Key]]:
    """Return the questions with the two rows that answer them; an empty upstream is the block's merger."""
    featcal, same, scored = ("", "featcal", main), f"{main}_train", f"{main}{SCORED}"
    return [
        ("FeatCal, its anchor alone", featcal, ("", "anchor", "")),
        ("FeatCal, the merger at its best scale", featcal, ("", "rescaled", "")),
        ("FeatCal, FeatCal with ρ = 1", featcal, ("", "featcal", "without_extrapolation")),
        ("FeatCal, FeatCal on the merger’s features", featcal, ("", "featcal", "without_forward_order")),
        ("FeatCal, FeatCal with α = 1", featcal, ("", "featcal", "without_interpolation")),
        ("FeatCal with ρ = 1, the merger", ("", "featcal", "without_extrapolation"), ("", "merged", "")),
        ("FeatCal, RegMean on the same samples", featcal, ("regmean", "merged", "")),
        ("FeatCal, RegMean++ on the same samples", featcal, ("regmean_plus_plus", "merged", "")),
        ("FeatCal, mean shift on the same samples", featcal, ("", SHIFT, same)),
        ("Mean shift, the merger", ("", SHIFT, same), ("", "merged", "")),
        ("FeatCal, Surgery on the same samples", featcal, ("", "surgery", same)),
        ("FeatCal, ProbSurgery on the same samples", featcal, ("", "prob_surgery", same)),
        ("Surgery on scored, on training samples", ("", "surgery", scored), ("", "surgery", same)),
        ("ProbSurgery on scored, on training samples", ("", "prob_surgery", scored), ("", "prob_surgery", same)),
    ]  # fmt: skip


def dots(merger: str, suite: str) -> PageOutput:
    """Draw the gain of every control over one merger, for every model, with two standard errors."""
    return shown(_dots(merger, suite), f"gains over {MERGERS[merger]}")


def _dots(merger: str, suite: str) -> Figure | None:
    keys = list(controls_of(suite, merger))[1:]
    gains: dict[str, dict[Key, tuple[float, float]]] = {role: {} for role in SIZES}
    for role, own in gains.items():
        ours = Evidence(suite, role, "8")
        start = average(ours, (merger, "merged", ""))
        for key in keys:
            if start and (one := average(ours, key)):
                own[key] = one.mean - start.mean, noise(one, start)
    drawn = [key for key in keys if any(key in own for own in gains.values())]
    if not drawn:
        return None
    with one_panel(0.36 * len(drawn) + 1.6) as (figure, axes):
        for place, (role, size) in enumerate(SIZES.items()):
            there = [
                (row, *gains[role][key]) for row, key in enumerate(drawn) if key in gains[role]
            ]
            if there:
                y, x, bars = zip(
                    *((row + 0.26 * place - 0.26, *more) for row, *more in there), strict=True
                )
                axes.errorbar(
                    x, y, xerr=bars, ls="", elinewidth=1.2, markersize=8, label=size, **LOOKS[role]
                )
        axes.axvline(0, color=INK, lw=1.2)
        axes.set_yticks(range(len(drawn)), [_name(key) for key in drawn], fontsize=11)
        axes.set_ylim(len(drawn) - 0.4, -0.6)
        axes.set(xlabel=f"gain over {MERGERS[merger]} (points)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.3, 1.0), ncols=2)
        return figure


def _name(key: Key) -> str:
    upstream, method, setting = key
    if method == "merged":
        return SHORT[upstream]
    if method == "featcal":
        return f"FeatCal, {SHORT[setting] if setting in INGREDIENTS else SETTING_LABELS[setting]}"
    if method == SHIFT:
        return f"{SHORT[method]}, {'train' if setting.endswith('_train') else 'unlabelled'}"
    return f"{SHORT[method]}, {SHORT[setting]}" if setting else SHORT[method]


def shares(suite: str) -> PageOutput:
    """Show the share of the gap that is recovered by number of tasks, here and in the paper's tables."""
    rows = []
    for merger in ("average", "task_arithmetic"):
        for method, setting in _series(suite):
            cells = [
                _percent(_of_pool(Evidence(suite, role, pool), merger, method, setting))
                for role in (REAL, IMAGES)
                for pool in POOLS
            ]
            printed = method != SHIFT and setting == studied_setting(suite)
            cells += [
                _percent(
                    paper_recovered(number, merger, corrected=True, method=method)
                    if printed
                    else None
                )
                for number in ("table01", "table08", "table10")
            ]
            if set(cells) != {"–"}:
                name = (NAMES | {SHIFT: "Mean shift"})[method]
                small = (
                    "FeatCal’s samples" if setting.endswith("_train") else SETTING_LABELS[setting]
                )
                rows.append(("", [f"{name}<small>{UPSTREAMS[merger]}, {small}</small>", *cells]))
    sources = ("real encoder", "drawn images", "the paper")
    head = ["From", *(f"{source}, {pool} tasks" for source in sources for pool in POOLS)]
    caption = "Share of the gap between merger and experts that is recovered (%); the paper’s from its averages, corrected"
    return PageOutput(table(head, rows, caption, "fc-long"))


def _series(suite: str) -> Iterator[tuple[str, str]]:
    main = studied_setting(suite)
    yield from (("featcal", setting) for setting in settings_shown(suite))
    for method in ("surgery", "prob_surgery", SHIFT):
        yield from ((method, main), (method, f"{main}_train"))


def _of_pool(ours: Evidence, merger: str, method: str, setting: str) -> float | None:
    keys = ((merger, "merged", ""), (merger, method, setting), ("", "expert", ""))
    return share(*(one and one.mean for one in (average(ours, key) for key in keys)))


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def by_number(suite: str) -> PageOutput:
    """Draw the share of the gap on drawn parts of the pool of eight, by number of tasks."""
    return shown(_by_number(suite), "shares by number of tasks")


def _by_number(suite: str) -> Figure | None:
    main, found = studied_setting(suite), []
    for role, source, dashes in ((REAL, "real encoder", "-"), (IMAGES, "drawn images", "--")):
        study = select(
            Evidence(suite, role, "8").table("task_counts"), {"upstream": "task_arithmetic"}
        )
        experts = select(Evidence(suite, role, "8").table("task_counts"), {"method": "expert"})
        for method, marker in (("featcal", "^"), ("prob_surgery", "D"), (SHIFT, "o")):
            points = []
            for count in sorted(set(study["tasks"])):
                rows = (
                    select(study, {"method": "merged"}),
                    select(study, {"method": method, "setting": main}),
                    experts,
                )
                means = [select(own, {"tasks": count})["value"].mean() for own in rows]
                points.append((count, share(*(None if math.isnan(m) else float(m) for m in means))))
            known = [(count, value) for count, value in points if value is not None]
            if known:
                found.append((known, dashes, marker, f"{SHORT.get(method, 'FeatCal')}, {source}"))
    if not found:
        return None
    with one_panel(4.0) as (figure, axes):
        for known, dashes, marker, words in found:
            colour = {"^": "#0072B2", "D": "#D55E00", "o": "#009E73"}[marker]
            axes.plot(
                *zip(*known, strict=True), ls=dashes, marker=marker, color=colour, label=words
            )
        axes.set(xlabel="tasks merged", ylabel="share of the gap (%)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=2, fontsize="small")
        return figure


def drift_parts(suite: str) -> PageOutput:
    """Split the squared drift of final features into each task's mean and the rest."""
    rows = []
    for role, source in ((REAL, "real encoder"), (IMAGES, "drawn images")):
        study = Evidence(suite, role, "8").table("task_counts")
        whole = select(study, {"upstream": "task_arithmetic", "tasks": study["tasks"].max()})
        for method in ("merged", "featcal", SHIFT, "surgery", "prob_surgery"):
            setting = "" if method == "merged" else studied_setting(suite)
            own = select(whole, {"method": method, "setting": setting})
            if len(own):
                drift, mean = own["drift"].mean(), own["mean_drift"].mean()
                name = (NAMES | {"merged": "Task arithmetic", SHIFT: "Mean shift"})[method]
                cells = [
                    f"{name}<small>{source}</small>",
                    f"{drift:.3f}",
                    f"{mean:.3f}",
                    f"{drift - mean:.3f}",
                ]
                rows.append(("fc-merger" if method == "merged" else "", cells))
    if not rows:
        return PageOutput(note("○ not run: no study of drawn parts."))
    head = ["", "Squared drift", "Each task’s mean", "The rest"]
    return PageOutput(
        table(head, rows, "Squared drift of final features, 8 tasks, mean over tasks")
    )


def by_offset(suite: str) -> PageOutput:
    """Draw the average score of every method by the size of the offset in the inputs."""
    return shown(_by_offset(suite), "offset in the inputs")


def _by_offset(suite: str) -> Figure | None:
    study, main = Evidence(suite, REAL, "8").table("offset"), studied_setting(suite)
    if study.empty:
        return None
    lines = {
        ("expert", ""): ("#555555", "x", "experts"), ("merged", ""): (INK, "s", "task arithmetic"),
        ("featcal", "paper"): ("#0072B2", "^", "FeatCal, printed settings"),
        ("featcal", main): ("#56B4E9", "v", "FeatCal, tuned settings"),
        ("surgery", main): ("#CC79A7", "o", "Surgery"), ("prob_surgery", main): ("#D55E00", "D", "ProbSurgery"),
        (SHIFT, main): ("#009E73", "*", "mean shift"),
    }  # fmt: skip
    strengths = sorted(set(study["strength"]), key=float)
    with one_panel(4.0) as (figure, axes):
        for (method, setting), (colour, marker, words) in lines.items():
            own = select(study, {"method": method, "setting": setting})
            means = [select(own, {"strength": strength})["value"].mean() for strength in strengths]
            axes.plot(
                [float(s) for s in strengths], means, marker=marker, color=colour, label=words
            )
        axes.set(xlabel="size of the offset", ylabel="average accuracy (%)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=3, fontsize="small")
        return figure


def ranking(suite: str) -> PageOutput:
    """Rank the sixteen rows of the paper's table here and there; ranks are compared, values are not."""
    rows = []
    names = [(m, method) for m in UPSTREAMS for method in ("merged", *NAMES)]
    columns = []
    for role in SIZES:
        ours = Evidence(suite, role, "8")
        settings = ["" if method == "merged" else studied_setting(suite) for _, method in names]
        found = [
            average(ours, (*name, setting)) for name, setting in zip(names, settings, strict=True)
        ]
        columns += [_ranks([one.mean if one else None for one in found])]
        columns += (
            [_ranks([paper_value(TABLES[role], *name) for name in names])] if role != REAL else []
        )
    for name, *cells in zip(names, *columns, strict=True):
        rows.append(("fc-merger" if name[1] == "merged" else "", [escape(row_name(*name)), *cells]))
    head = ["", "Real encoder", "Smaller model", "Paper, Table 1", "Larger model", "Paper, Table 7"]
    return PageOutput(table(head, rows, "Rank among the rows of the paper’s table; 1 is best"))


def _ranks(values: list[float | None]) -> list[str]:
    """Return ranks, 1 for the highest; values equal to one decimal share a rank."""
    known = [round(value, 1) for value in values if value is not None]
    return [
        "–" if v is None else str(1 + sum(other > round(v, 1) for other in known)) for v in values
    ]
