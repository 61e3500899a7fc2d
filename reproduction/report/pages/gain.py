"""Build the page on what the gain is made of: controls, shares of the gap by number of tasks, drift."""

from html import escape
from itertools import product
from typing import Any

from reproduction.report.claims import studied_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import INK, one_panel, shown, stacked
from reproduction.report.html import PageOutput, listed, margin
from reproduction.report.pages.sweeps import SOURCES
from reproduction.report.paper import IMAGES, REAL, SIZES, VISION
from reproduction.report.statistics import lead
from reproduction.report.tables import (
    LARGER,
    MERGERS,
    NAMES,
    SETTING_LABELS,
    SHIFT,
    UPSTREAMS,
    Key,
    average,
    model_key,
    paper_recovered,
    recovered_share,
    rows_of,
    settings_of,
    settings_shown,
    share,
)

STUDIED = ("task_arithmetic", "wudi")  # mergers that have every control
INGREDIENTS = (
    "without_bias", "without_norm", "without_task_weights", "without_forward_order", "without_interpolation",
    "without_extrapolation",
)  # fmt: skip
ADAPTERS = ("suite", "suite_train", "suite_scored", "paper", "paper_train")  # settings
ASKED = {  # mergers that the questions are asked of, by role
    VISION: ("task_arithmetic", "tsv_merge"), REAL: STUDIED, IMAGES: STUDIED,
}  # fmt: skip
SHORT = {
    "anchor": "anchor alone", "rescaled": "merger at best scale", "regmean": "RegMean, same samples",
    "regmean_plus_plus": "RegMean++, same samples", "without_bias": "biases unchanged", "without_norm": "norms unchanged",
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
POOLS = ("8", *LARGER)
BOTH = (REAL, IMAGES)  # models of the studies of the number of tasks, and of the interventions
OFFSETS = {  # by method and setting: colour, marker, words
    ("expert", ""): ("#555555", "x", "experts"), ("merged", ""): (INK, "s", "task arithmetic"),
    ("featcal", "paper"): ("#0072B2", "^", "FeatCal, printed settings"),
    ("featcal", "suite"): ("#56B4E9", "v", "FeatCal, tuned settings"),
    ("surgery", "suite"): ("#CC79A7", "o", "Surgery"), ("prob_surgery", "suite"): ("#D55E00", "D", "ProbSurgery"),
    (SHIFT, "suite"): ("#009E73", "*", "mean shift"),
}  # fmt: skip
SHARED = {
    REAL: "size of the vector added to all texts of a task",
    IMAGES: "scale of what is added to all images of a task",
}
NUMBERED = {"featcal": ("#0072B2", "^"), "prob_surgery": ("#D55E00", "D"), SHIFT: ("#009E73", "o")}


def controls_of(suite: str, upstream: str) -> dict[Key, str]:
    """Return the rows next to one merger by what names them; FeatCal comes first."""
    main = studied_setting(suite)
    own = {setting: f"FeatCal, {SETTING_LABELS[setting]}" for setting in settings_shown(suite)}
    rows = {(upstream, "featcal", setting): name for setting, name in own.items()}
    if upstream in STUDIED:
        rows |= {(upstream, name, ""): SHORT[name] for name in ("anchor", "rescaled")}
        rows |= {(name, "merged", ""): SHORT[name] for name in ("regmean", "regmean_plus_plus")}
        rows |= {(upstream, "featcal", name): f"FeatCal, {SHORT[name]}" for name in INGREDIENTS}
    for setting, words in ((main, "unlabelled"), (f"{main}_train", "train")):
        rows[upstream, SHIFT, setting] = f"{SHORT[SHIFT]}, {words}"
    for method, setting in product(("surgery", "prob_surgery"), ADAPTERS):
        rows[upstream, method, setting] = f"{SHORT[method]}, {SHORT[setting]}"
    return rows


def questions(suite: str) -> PageOutput:
    """Show pairs of rows with their margins, per model and merger."""
    columns = [(role, merger) for role, mergers in ASKED.items() for merger in mergers]
    asked = [_pairs(Evidence(suite, role, "8")) for role, _ in columns]
    rows = []
    for same in zip(*asked, strict=True):
        cells = [escape(same[0][0])]
        for (role, merger), (_, *sides) in zip(columns, same, strict=True):
            keys = ((upstream or merger, *way) for upstream, *way in sides)
            cells.append(margin(*(average(Evidence(suite, role, "8"), key) for key in keys)))
        rows.append(cells)
    head = (f"{MERGERS[merger]}, {SOURCES[role]}" for role, merger in columns)
    caption = "Margins of the average (points); tie: at most two standard errors"
    return listed(["First minus second", *head], rows, caption, "fc-long")


def _pairs(ours: Evidence) -> list[tuple[str, Key, Key]]:
    """Return the questions with the two rows that answer them; an empty upstream is the block's merger."""
    main = settings_of(ours)[-1]
    featcal, same = ("", "featcal", main), f"{main}_train"
    return [
        ("FeatCal, its anchor alone", featcal, ("", "anchor", "")),
        ("FeatCal, the merger at its best scale", featcal, ("", "rescaled", "")),
        ("FeatCal, FeatCal with ρ = 1", featcal, ("", "featcal", "without_extrapolation")),
        ("FeatCal, FeatCal on the merger’s features", featcal, ("", "featcal", "without_forward_order")),
        ("FeatCal, FeatCal with α = 1", featcal, ("", "featcal", "without_interpolation")),
        ("FeatCal, FeatCal without weights of tasks", featcal, ("", "featcal", "without_task_weights")),
        ("FeatCal with ρ = 1, the merger", ("", "featcal", "without_extrapolation"), ("", "merged", "")),
        ("FeatCal, RegMean on the same samples", featcal, ("regmean", "merged", "")),
        ("FeatCal, RegMean++ on the same samples", featcal, ("regmean_plus_plus", "merged", "")),
        ("FeatCal, mean shift on the same samples", featcal, ("", SHIFT, same)),
        ("Mean shift, the merger", ("", SHIFT, same), ("", "merged", "")),
        ("FeatCal, Surgery on the same samples", featcal, ("", "surgery", same)),
        ("FeatCal, ProbSurgery on the same samples", featcal, ("", "prob_surgery", same)),
    ]  # fmt: skip


def dots(merger: str, suite: str) -> PageOutput:
    """Draw the gain of every control over one merger, for every model, with two standard errors."""
    what, keys = f"gains over {MERGERS[merger]}", controls_of(suite, merger)
    gains: dict[str, dict[Key, tuple[float, float]]] = {}
    for role in SIZES:
        ours = Evidence(suite, role, "8")
        start, found = average(ours, (merger, "merged", "")), {k: average(ours, k) for k in keys}
        gains[role] = {key: lead(one, start) for key, one in found.items() if one and start}
    drawn = [key for key in keys if any(key in own for own in gains.values())]
    if not drawn:
        return shown(None, what)
    with one_panel(0.36 * len(drawn) + 1.6) as (figure, axes):
        for place, (role, own) in enumerate(gains.items()):
            y = [row + 0.26 * place - 0.26 for row, key in enumerate(drawn) if key in own]
            found = [own[key] for key in drawn if key in own]
            look = {"ls": "", "elinewidth": 1.2, "markersize": 8, "label": SIZES[role]}
            if found:
                x, bars = zip(*found, strict=True)
                axes.errorbar(x, y, xerr=bars, **look, **LOOKS[role])
        axes.axvline(0, color=INK, lw=1.2)
        axes.set_yticks(range(len(drawn)), [keys[key] for key in drawn], fontsize=11)
        axes.set_ylim(len(drawn) - 0.4, -0.6)
        axes.set(xlabel=f"gain over {MERGERS[merger]} (points)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.3, 1.0), ncols=2)
        return shown(figure, what)


def shares(suite: str) -> PageOutput:
    """Show the share of the gap that is recovered by number of tasks, here and in the paper's tables."""
    main, rows = studied_setting(suite), []
    series = [("featcal", setting) for setting in settings_shown(suite)]
    series += product(("surgery", "prob_surgery", SHIFT), (main, f"{main}_train"))
    for merger, (method, setting) in product(("average", "task_arithmetic"), series):
        places = (Evidence(suite, *place) for place in product(BOTH, POOLS))
        found = [recovered_share(ours, merger, method, setting) for ours in places]
        printed = method != SHIFT and setting == ("paper" if method == "featcal" else main)
        for number in ("table01", "table08", "table10"):
            said = paper_recovered(number, merger, corrected=True, method=method)
            found.append(said if printed else None)
        if any(one is not None for one in found):
            name = (NAMES | {SHIFT: "Mean shift"})[method]
            small = "unlabelled" if method != "featcal" else SETTING_LABELS[setting]
            small = "FeatCal’s samples" if setting.endswith("_train") else small
            cells = ("–" if one is None else f"{one:.0f}" for one in found)
            rows.append([f"{name}<small>{UPSTREAMS[merger]}, {small}</small>", *cells])
    columns = product((*(SOURCES[role] for role in BOTH), "the paper"), POOLS)
    head = ["From", *(f"{source}, {pool} tasks" for source, pool in columns)]
    caption = "Share of the gap between merger and experts that is recovered (%); the paper’s from its averages, corrected"
    return listed(head, rows, caption, "fc-long")


def by_number(suite: str) -> PageOutput:
    """Draw the share of the gap on drawn parts of the pool of eight, by number of tasks."""
    what, main, found = "shares by number of tasks", studied_setting(suite), []
    for role, method in product(BOTH, NUMBERED):
        keys = [("task_arithmetic", "merged", ""), ("task_arithmetic", method, main)]
        keys.append(("", "expert", ""))
        rows = [rows_of(Evidence(suite, role, "8"), key, "task_counts") for key in keys]
        means = [own.groupby("tasks")["value"].mean() for own in rows]
        shares = {n: share(*(one.get(n) for one in means)) for n in means[1].index}
        known = {n: one for n, one in shares.items() if one is not None}
        if known:
            words = f"{SHORT.get(method, 'FeatCal')}, {SOURCES[role]}"
            found.append((known, role, method, words))
    if not found:
        return shown(None, what)
    with one_panel(4.0) as (figure, axes):
        for known, role, method, words in found:
            colour, marker = NUMBERED[method]
            look = {"ls": "-" if role == REAL else "--", "marker": marker, "color": colour}
            axes.plot(list(known), list(known.values()), label=words, **look)
        axes.set(xlabel="tasks merged", ylabel="share of the gap (%)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=2, fontsize="small")
        return shown(figure, what)


def drift_parts(suite: str) -> PageOutput:
    """Split the squared drift of final features into each task's mean and the rest."""
    rows = []
    names = {"merged": "Task arithmetic", "featcal": NAMES["featcal"], SHIFT: "Mean shift"} | NAMES
    for role, (method, name) in product(BOTH, names.items()):
        key = model_key("task_arithmetic", method, studied_setting(suite))
        own = rows_of(Evidence(suite, role, "8"), key, "task_counts")
        if len(own):
            own = own[own["tasks"] == own["tasks"].max()]
            drift, mean = own["drift"].mean(), own["mean_drift"].mean()
            cells = [f"{value:.3f}" for value in (drift, mean, drift - mean)]
            kind = "fc-merger" if method == "merged" else ""
            rows.append((kind, [f"{name}<small>{SOURCES[role]}</small>", *cells]))
    head = ["", "Squared drift", "Each task’s mean", "The rest"]
    caption = "Squared drift of final features, 8 tasks, mean over tasks"
    return listed(head, rows, caption, missing="no study of drawn parts")


def by_offset(suite: str) -> PageOutput:
    """Draw the average score of every method by the size of what all inputs of a task share."""
    what = "score by what a task's inputs share"
    files = zip(BOTH, ("offset", "pattern"), strict=True)
    known = {role: Evidence(suite, role, "8").table(file) for role, file in files}
    known = {role: rows for role, rows in known.items() if len(rows)}
    if not known:
        return shown(None, what)
    with stacked(len(known), 3.4 * len(known) + 0.8) as (figure, spots):
        for axes, (role, rows) in zip(spots, known.items(), strict=True):
            strengths = sorted(set(rows["strength"]), key=float)
            for (method, setting), (colour, marker, words) in OFFSETS.items():
                own = select(rows, {"method": method, "setting": setting})
                means = [select(own, {"strength": one})["value"].mean() for one in strengths]
                look = {"marker": marker, "color": colour, "label": words}
                axes.plot([float(one) for one in strengths], means, **look)
            axes.set(title=SOURCES[role], xlabel=SHARED[role], ylabel="average accuracy (%)")
        lines, words = spots[0].get_legend_handles_labels()
        figure.legend(lines, words, loc="outside upper center", ncols=3, fontsize="small")
        return shown(figure, what)
