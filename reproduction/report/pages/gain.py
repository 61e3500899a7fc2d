"""Build the page on the parts of the gain: controls, shares of the gap, drift."""

from html import escape
from itertools import product
from typing import Any

from reproduction.report import tables
from reproduction.report.claims import studied_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import INK, figure_output, one_panel, stacked
from reproduction.report.html import PageOutput, margin, tabulate
from reproduction.report.pages.sweeps import MODELS
from reproduction.report.paper import IMAGES, REAL, SIZES, VISION
from reproduction.report.statistics import lead

CONTROLLED = ("task_arithmetic", "wudi")  # mergers that have every control
INGREDIENTS = (
    "without_bias", "without_norm", "without_task_weights", "without_forward_order", "without_interpolation",
    "without_extrapolation",
)  # fmt: skip
ADAPTER_SETTINGS = ("suite", "suite_train", "suite_scored", "paper", "paper_train")
MERGERS_BY_ROLE = {  # mergers that the questions are asked of, by role
    VISION: ("task_arithmetic", "tsv_merge"), REAL: CONTROLLED, IMAGES: CONTROLLED,
}  # fmt: skip
LABELS = {
    "anchor": "anchor alone", "rescaled": "merger at best scale", "regmean": "RegMean, same samples",
    "regmean_plus_plus": "RegMean++, same samples", "without_bias": "biases unchanged", "without_norm": "norms unchanged",
    "without_task_weights": "tasks not weighted", "without_forward_order": "merger’s features",
    "without_interpolation": "α = 1", "without_extrapolation": "ρ = 1",
    "suite": "in proportion, unlabelled", "suite_train": "in proportion, train",
    "suite_scored": "in proportion, scored", "paper": "published size, unlabelled",
    "paper_train": "published size, train",
}  # fmt: skip
NAMES = tables.NAMES | {tables.SHIFT: "mean shift"}
MODEL_LOOKS: dict[str, dict[str, Any]] = {
    REAL: {"color": "#009E73", "marker": "D"}, IMAGES: {"color": "#0072B2", "marker": "o"},
    "clip_l14": {"color": "#D55E00", "marker": "s", "markerfacecolor": "white"},
}  # fmt: skip  # Okabe and Ito
STUDIED = (REAL, IMAGES)  # roles in the studies of the number of tasks and of interventions
OFFSET_LOOKS = {  # by method and setting: colour, marker, words
    ("expert", ""): ("#555555", "x", "experts"), ("merged", ""): (INK, "s", "task arithmetic"),
    ("featcal", "paper"): ("#0072B2", "^", "FeatCal, printed settings"),
    ("featcal", "suite"): ("#56B4E9", "v", "FeatCal, tuned settings"),
    ("surgery", "suite"): ("#CC79A7", "o", "Surgery"), ("prob_surgery", "suite"): ("#D55E00", "D", "ProbSurgery"),
    (tables.SHIFT, "suite"): ("#009E73", "*", "mean shift"),
}  # fmt: skip
OFFSET_NAMES = {
    REAL: "size of the vector added to all texts of a task",
    IMAGES: "scale of what is added to all images of a task",
}
COUNT_LOOKS = {
    "featcal": ("#0072B2", "^"),
    "prob_surgery": ("#D55E00", "D"),
    tables.SHIFT: ("#009E73", "o"),
}


def controls_of(suite: str, upstream: str) -> dict[tables.Key, str]:
    """Return the names of the rows compared with one merger, by key; FeatCal comes first."""
    main = studied_setting(suite)
    rows = {}
    for setting in tables.settings_shown(suite):
        rows[upstream, "featcal", setting] = f"FeatCal, {tables.SETTING_LABELS[setting]}"
    if upstream in CONTROLLED:
        rows |= {(upstream, name, ""): LABELS[name] for name in ("anchor", "rescaled")}
        rows |= {(name, "merged", ""): LABELS[name] for name in ("regmean", "regmean_plus_plus")}
        rows |= {(upstream, "featcal", name): f"FeatCal, {LABELS[name]}" for name in INGREDIENTS}
    for setting, samples in ((main, "unlabelled"), (f"{main}_train", "train")):
        rows[upstream, tables.SHIFT, setting] = f"{NAMES[tables.SHIFT]}, {samples}"
    for method, setting in product(tables.ADAPTERS, ADAPTER_SETTINGS):
        rows[upstream, method, setting] = f"{NAMES[method]}, {LABELS[setting]}"
    return rows


def questions(suite: str) -> PageOutput:
    """List the margins between pairs of rows, by model and merger."""
    columns = [(role, merger) for role, mergers in MERGERS_BY_ROLE.items() for merger in mergers]
    cells: dict[str, list[str]] = {}
    for role, merger in columns:
        data = Evidence(suite, role, "8")
        for question, pair in _pairs(data, merger).items():
            averages = (tables.average(data, key) for key in pair)
            cells.setdefault(question, []).append(margin(*averages))
    rows = [[escape(question), *margins] for question, margins in cells.items()]
    head = (f"{tables.MERGERS[merger]}, {MODELS[role]}" for role, merger in columns)
    caption = "Margins of the average (points); tie: at most two standard errors"
    return tabulate(["First minus second", *head], rows, caption, "fc-long")


def _pairs(data: Evidence, merger: str) -> dict[str, tuple[tables.Key, tables.Key]]:
    """Return the two rows that answer each question about one merger."""
    main = tables.settings_of(data)[-1]
    merged, featcal, train = (merger, "merged", ""), (merger, "featcal", main), f"{main}_train"
    without_extrapolation = (merger, "featcal", "without_extrapolation")
    mean_shift = (merger, tables.SHIFT, train)
    return {
        "FeatCal, its anchor alone": (featcal, (merger, "anchor", "")),
        "FeatCal, the merger at its best scale": (featcal, (merger, "rescaled", "")),
        "FeatCal, FeatCal with ρ = 1": (featcal, without_extrapolation),
        "FeatCal, FeatCal on the merger’s features": (featcal, (merger, "featcal", "without_forward_order")),
        "FeatCal, FeatCal with α = 1": (featcal, (merger, "featcal", "without_interpolation")),
        "FeatCal, FeatCal without weights of tasks": (featcal, (merger, "featcal", "without_task_weights")),
        "FeatCal with ρ = 1, the merger": (without_extrapolation, merged),
        "FeatCal, RegMean on the same samples": (featcal, ("regmean", "merged", "")),
        "FeatCal, RegMean++ on the same samples": (featcal, ("regmean_plus_plus", "merged", "")),
        "FeatCal, mean shift on the same samples": (featcal, mean_shift),
        "Mean shift, the merger": (mean_shift, merged),
        "FeatCal, Surgery on the same samples": (featcal, (merger, "surgery", train)),
        "FeatCal, ProbSurgery on the same samples": (featcal, (merger, "prob_surgery", train)),
    }  # fmt: skip


def dots(merger: str, suite: str) -> PageOutput:
    """Draw the gain of every control over one merger, for every model, with two standard errors."""
    title, keys = f"gains over {tables.MERGERS[merger]}", controls_of(suite, merger)
    gains: dict[str, dict[tables.Key, tuple[float, float]]] = {}
    for role in SIZES:
        data = Evidence(suite, role, "8")
        merged = tables.average(data, (merger, "merged", ""))
        means = {key: tables.average(data, key) for key in keys}
        gains[role] = {key: lead(mean, merged) for key, mean in means.items() if mean and merged}
    run = [key for key in keys if any(key in by_key for by_key in gains.values())]
    if not run:
        return figure_output(None, title)
    with one_panel(0.36 * len(run) + 1.6) as (figure, axes):
        for index, (role, by_key) in enumerate(gains.items()):
            y = [row + 0.26 * index - 0.26 for row, key in enumerate(run) if key in by_key]
            points = [by_key[key] for key in run if key in by_key]
            style = {"ls": "", "elinewidth": 1.2, "markersize": 8, "label": SIZES[role]}
            if points:
                x, bars = zip(*points, strict=True)
                axes.errorbar(x, y, xerr=bars, **style, **MODEL_LOOKS[role])
        axes.axvline(0, color=INK, lw=1.2)
        axes.set_yticks(range(len(run)), [keys[key] for key in run], fontsize=11)
        axes.set_ylim(len(run) - 0.4, -0.6)
        axes.set(xlabel=f"gain over {tables.MERGERS[merger]} (points)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.3, 1.0), ncols=2)
        return figure_output(figure, title)


def shares(suite: str) -> PageOutput:
    """List the recovered share of the gap by number of tasks, here and in the paper's tables."""
    main, rows = studied_setting(suite), []
    series = [("featcal", setting) for setting in tables.settings_shown(suite)]
    series += product((*tables.ADAPTERS, tables.SHIFT), (main, f"{main}_train"))
    for merger, (method, setting) in product(("average", "task_arithmetic"), series):
        experiments = (
            Evidence(suite, *experiment) for experiment in product(STUDIED, tables.POOLS)
        )
        values = [tables.recovered_share(data, merger, method, setting) for data in experiments]
        printed = method != tables.SHIFT and setting == ("paper" if method == "featcal" else main)
        for number in ("table01", "table08", "table10"):
            paper_share = tables.paper_recovered(number, merger, corrected=True, method=method)
            values.append(paper_share if printed else None)
        if any(value is not None for value in values):
            name = (NAMES | {tables.SHIFT: "Mean shift"})[method]
            small = "unlabelled" if method != "featcal" else tables.SETTING_LABELS[setting]
            small = "FeatCal’s samples" if setting.endswith("_train") else small
            cells = ("–" if value is None else f"{value:.0f}" for value in values)
            rows.append([f"{name}<small>{tables.UPSTREAMS[merger]}, {small}</small>", *cells])
    columns = product((*(MODELS[role] for role in STUDIED), "the paper"), tables.POOLS)
    head = ["From", *(f"{source}, {pool} tasks" for source, pool in columns)]
    caption = "Share of the gap between merger and experts that is recovered (%); the paper’s from its averages, corrected"
    return tabulate(head, rows, caption, "fc-long")


def by_number(suite: str) -> PageOutput:
    """Draw the share of the gap on random subsets of the eight tasks, by number of tasks."""
    title, main, curves = "shares by number of tasks", studied_setting(suite), []
    for role, method in product(STUDIED, COUNT_LOOKS):
        keys = [("task_arithmetic", "merged", ""), ("task_arithmetic", method, main)]
        keys.append(("", "expert", ""))
        rows = [tables.rows_of(Evidence(suite, role, "8"), key, "task_counts") for key in keys]
        means = [scores.groupby("tasks")["value"].mean() for scores in rows]
        shares = {n: tables.gap_share(*(mean.get(n) for mean in means)) for n in means[1].index}
        curve = {n: mean for n, mean in shares.items() if mean is not None}
        if curve:
            label = f"{NAMES[method]}, {MODELS[role]}"
            curves.append((curve, role, method, label))
    if not curves:
        return figure_output(None, title)
    with one_panel(4.0) as (figure, axes):
        for curve, role, method, label in curves:
            colour, marker = COUNT_LOOKS[method]
            style = {"ls": "-" if role == REAL else "--", "marker": marker, "color": colour}
            axes.plot(list(curve), list(curve.values()), label=label, **style)
        axes.set(xlabel="tasks merged", ylabel="share of the gap (%)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=2, fontsize="small")
        return figure_output(figure, title)


def drift_parts(suite: str) -> PageOutput:
    """Split the squared drift of final features into each task's mean and the rest."""
    rows = []
    names = {"merged": "Task arithmetic", "featcal": "FeatCal", tables.SHIFT: "Mean shift"}
    names |= tables.NAMES
    for role, (method, name) in product(STUDIED, names.items()):
        key = tables.model_key("task_arithmetic", method, studied_setting(suite))
        method_rows = tables.rows_of(Evidence(suite, role, "8"), key, "task_counts")
        if len(method_rows):
            method_rows = method_rows[method_rows["tasks"] == method_rows["tasks"].max()]
            drift, mean = method_rows["drift"].mean(), method_rows["mean_drift"].mean()
            cells = [f"{value:.3f}" for value in (drift, mean, drift - mean)]
            kind = "fc-merger" if method == "merged" else ""
            rows.append((kind, [f"{name}<small>{MODELS[role]}</small>", *cells]))
    head = ["", "Squared drift", "Each task’s mean", "The rest"]
    caption = "Squared drift of final features, 8 tasks, mean over tasks"
    return tabulate(head, rows, caption, missing="no study of drawn parts")


def by_offset(suite: str) -> PageOutput:
    """Draw every method's average score by the size of the offset that a task's inputs share."""
    title = "score by what a task's inputs share"
    files = zip(STUDIED, ("offset", "pattern"), strict=True)
    by_role = {role: Evidence(suite, role, "8").table(file) for role, file in files}
    by_role = {role: rows for role, rows in by_role.items() if len(rows)}
    if not by_role:
        return figure_output(None, title)
    with stacked(len(by_role), 3.4 * len(by_role) + 0.8) as (figure, panels):
        for axes, (role, rows) in zip(panels, by_role.items(), strict=True):
            strengths = sorted(set(rows["strength"]), key=float)
            for (method, setting), (colour, marker, label) in OFFSET_LOOKS.items():
                scores = select(rows, {"method": method, "setting": setting})
                means = [select(scores, {"strength": x})["value"].mean() for x in strengths]
                style = {"marker": marker, "color": colour, "label": label}
                axes.plot([float(strength) for strength in strengths], means, **style)
            axes.set(title=MODELS[role], xlabel=OFFSET_NAMES[role], ylabel="average accuracy (%)")
        lines, labels = panels[0].get_legend_handles_labels()
        figure.legend(lines, labels, loc="outside upper center", ncols=3, fontsize="small")
        return figure_output(figure, title)
