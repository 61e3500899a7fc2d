"""Build the page on the whole field: every merger from the same experts, alone and repaired.

Task arithmetic in the tangent space has its own experts: a control, listed last and not counted.
"""

from dataclasses import dataclass
from html import escape
from itertools import product
from typing import Any

from reproduction.report.evidence import Evidence
from reproduction.report.figures import figure_output, label_marks, one_panel
from reproduction.report.html import PageOutput, compact, estimate_cell, tabulate
from reproduction.report.paper import packaged
from reproduction.report.statistics import Estimate, estimate, highest, lead

AFTER = {
    "featcal": "with FeatCal", "featcal_auto": "with FeatCal's default", "surgery": "with Surgery",
    "prob_surgery": "with ProbSurgery", "repair": "with REPAIR", "svc": "with SVC",
}  # fmt: skip
INFERRED = ("surgery_inferred", "prob_surgery_inferred")  # in summaries, next to AFTER
TRAINED = ("prodistill", "surgery_v2", "interv_merge")  # after some mergers
NOTHING, TRAIN, UNLABELLED = "nothing", "training samples", "unlabelled samples"
TANGENT = "tangent"


@dataclass(frozen=True)
class MethodFacts:
    """A method as its source describes it: name, data it uses, marks."""

    name: str
    sees: str = NOTHING
    marks: str = ""


METHODS = {name: MethodFacts(**facts) for name, facts in packaged("field.yaml")["methods"].items()}
ROLES = {
    "vit_s": "real images, ViT-S/14",
    "minilm": "real texts, MiniLM",
    "clip_b32": "synthetic images",
}
COLOURS = {NOTHING: "#0072B2", TRAIN: "#D55E00", UNLABELLED: "#009E73"}  # Okabe and Ito
MARKERS = {NOTHING: "o", TRAIN: "s", UNLABELLED: "D"}


Averages = dict[tuple[str, str], Estimate]  # by merger and the method after it, or "merged"


def averages(data: Evidence) -> Averages:
    """Return the means over tasks of all mergers, alone and with each method after them."""
    groups = data.table("field").groupby(["upstream", "method"], sort=False)
    return {key: mean for key, rows in groups if (mean := estimate(rows))}


def mergers(means: Averages, method: str = "featcal") -> list[str]:
    """Return the mergers with scores, best with FeatCal first."""
    names = [name for name in dict.fromkeys(name for name, _ in means) if name != TANGENT]
    with_method = {name: mean.mean for name in names if (mean := means.get((name, method)))}
    return sorted(names, key=lambda name: -with_method.get(name, 0.0))


def seconds(data: Evidence, merger: str, part: str) -> float | None:
    """Return the seconds of merging, choosing a scale, or a later method; None if not run."""
    merger_cost = data.record("field").get("cost", {}).get(merger, {})
    shared = merger_cost.get("features", 0.0) if part in ("surgery", "prob_surgery") else 0.0
    return float(merger_cost[part]) + shared if part in merger_cost else None


def summary(suite: str) -> PageOutput:
    """Count the mergers that each method raises and lowers by more than two standard errors."""
    rows = []
    by_role = {role: averages(Evidence(suite, role, "8")) for role in ROLES}
    for (role, name), method in product(ROLES.items(), (*AFTER, *INFERRED)):
        means = by_role[role]
        pairs = [(means.get((m, method)), means.get((m, "merged"))) for m in mergers(means)]
        pairs_run = [(after, before) for after, before in pairs if after and before]
        if pairs_run:
            gaps = [lead(*pair) for pair in pairs_run]
            raised, lowered = (sum(sign * gap > room for gap, room in gaps) for sign in (1, -1))
            cells = [f"{raised} of {len(pairs_run)}", str(lowered)]
            cells.append(f"{min(gaps)[0]:+.1f} to {max(gaps)[0]:+.1f}")
            cells.append(estimate_cell(highest(after for after, _ in pairs_run)))
            rows.append([f"{METHODS[method].name}<small>{name}</small>", *cells])
    head = ["After a merger", "Raises", "Lowers", "Change (points)", "Best with it (%)"]
    caption = "Effect on mergers of 8 tasks"
    return tabulate(head, rows, caption, "fc-words", "no study of the field")


def values(role: str, suite: str) -> PageOutput:
    """List every merger with marks, seconds, scale, its average, and averages with each method."""
    data, rows = Evidence(suite, role, "8"), []
    means = averages(data)
    methods = {method for _, method in means}
    columns = [method for method in AFTER if method in methods]
    for merger in [*mergers(means), *([TANGENT] if (TANGENT, "merged") in means else [])]:
        facts, took = METHODS[merger], seconds(data, merger, "merged")
        cost = "–" if took is None else f"{took:.1f}<small>{_scale(data, merger)}</small>"
        cells = [estimate_cell(means.get((merger, method))) for method in ("merged", *columns)]
        rows.append([f"{escape(facts.name)} {_marks(data, merger)}", facts.sees, cost, *cells])
    head = ["Merger", "It looks at", "Seconds", "Alone", *(AFTER[method] for method in columns)]
    samples = data.settings("field").get("study", {}).get("samples")
    caption = (
        f"Average accuracy (%), 8 tasks, {ROLES[role]}; {samples} training samples of each task"
    )
    return tabulate(head, rows, caption, "fc-long", f"no study of the field with {ROLES[role]}")


def _scale(data: Evidence, merger: str) -> str:
    """Return the chosen scale, a note if it is at an end of its range, and the seconds it took."""
    facts = data.settings("field")
    rows = facts.get("tried", {}).get(merger, [])
    if not rows:
        return ""
    key = "eta" if "eta" in rows[0] else "scale"
    tried, chosen = [row[key] for row in rows], facts["chosen"][merger][key]
    edge = ", end of range" if chosen in (min(tried), max(tried)) else ""
    choosing = seconds(data, merger, "choosing")
    text = "" if choosing is None else f", {choosing:.0f} s"
    return f"{'η' if key == 'eta' else key} {compact(chosen)} of {len(tried)}{edge}{text}"


def _marks(data: Evidence, merger: str) -> str:
    """Return a merger's marks, V only if its scale was chosen, and the paper's reference number."""
    tried = data.settings("field").get("tried", {})
    kept = "".join(mark for mark in METHODS[merger].marks if mark != "V" or merger in tried)
    references = enumerate(packaged("field.yaml")["references"], start=1)
    cited = (f" [{number}]" for number, names in references if merger in names)
    return "".join([f"<sup>{kept}</sup>" if kept else "", *cited])


def trained(suite: str) -> PageOutput:
    """List methods that train for minutes after a merger, and FeatCal after the same mergers."""
    rows = []
    for role, name in ROLES.items():
        data = Evidence(suite, role, "8")
        study = data.settings("field").get("study", {})
        means = averages(data)
        for merger in mergers(means):
            first = f"{escape(METHODS[merger].name)}<small>{name}</small>"
            methods = ("merged", "featcal", *INFERRED, *TRAINED)
            scored = {method: mean for method in methods if (mean := means.get((merger, method)))}
            for method, mean in scored.items() if scored.keys() & set(TRAINED) else ():
                steps, took = _training(study, method), seconds(data, merger, method)
                label = "nothing" if method == "merged" else METHODS[method].name
                cost = "–" if took is None or method == "merged" else f"{took:.0f}"
                rows.append([first, label, steps, cost, estimate_cell(mean)])
    head = ["Merger", "With", "Steps", "Seconds", "Average (%)"]
    caption = "What trains after a merger, 8 tasks"
    return tabulate(head, rows, caption, "fc-words", "nothing that trains for minutes")


def _training(study: dict[str, Any], method: str) -> str:
    """Return how many steps or epochs a method trains for; a dash where it does not."""
    if method == "prodistill":
        return f"{study['epochs']} epochs"
    settings = study.get("comparison", {}).get(method, study.get(method))
    trains = isinstance(settings, dict) and method != "featcal"
    return f"{settings['steps']:,}" if trains else "–"


def legend() -> PageOutput:
    """Explain the marks, and list the data that each method after a merger uses."""
    rows = [[mark, escape(text)] for mark, text in packaged("field.yaml")["marks"].items()]
    for name in (*AFTER, *INFERRED, *TRAINED):
        facts = METHODS[name]
        rows.append([escape(facts.name), f"looks at {facts.sees} <sup>{facts.marks}</sup>"])
    return tabulate(["Mark or method", "Meaning"], rows, "What a method asks for", "fc-words")


def language(suite: str) -> PageOutput:
    """List mergers of a language model, best first, and every η that was tried."""
    data, rows = Evidence(suite, "flan_t5_base", "glue"), []
    means = averages(data)
    for merger in mergers(means, "merged"):
        name = escape(METHODS[merger].name)
        first = f"{name} {_marks(data, merger)}<small>{_scale(data, merger)}</small>"
        rows.append([first, estimate_cell(means[merger, "merged"])])
        for trial in data.settings("field").get("tried", {}).get(merger, []):
            label = f"{name}, η = {trial['eta']:,.0f}<small>validation texts</small>"
            rows.append([label, f"{trial['value']:.1f}"])
    caption = "Average score (%), 8 text tasks, synthetic model in the role of FLAN-T5-base; mergers alone"
    missing = "no study of the field with a language model"
    return tabulate(["Merger", "Alone"], rows, caption, "fc-words", missing)


def panel(role: str, suite: str) -> PageOutput:
    """Draw accuracy against seconds by the data a merger uses; hollow marks include FeatCal."""
    title, data = "study of the field", Evidence(suite, role, "8")
    means = averages(data)
    costs = {merger: seconds(data, merger, "merged") for merger in mergers(means)}
    costs = {merger: took for merger, took in costs.items() if took is not None}
    if not costs:
        return figure_output(None, title)
    with one_panel(6.0) as (figure, axes):
        axes.set_xscale("log")  # before labels are positioned
        label_positions: dict[str, tuple[float, float]] = {}
        after: list[tuple[float, float]] = []
        for (sees, colour), method in product(COLOURS.items(), ("merged", "featcal")):
            points, alone = [], method == "merged"
            for merger in (m for m in costs if METHODS[m].sees == sees):
                extra_seconds = 0.0 if alone else seconds(data, merger, method) or 0.0
                if value := means.get((merger, method)):
                    points.append((max(costs[merger] + extra_seconds, 0.01), value.mean))
                    if alone:
                        label_positions[METHODS[merger].name] = points[-1]
            after += [] if alone else points
            if points:
                label = f"looks at {sees}" + ("" if alone else ", with FeatCal")
                style = {"marker": MARKERS[sees], "edgecolors": colour, "label": label, "s": 55}
                x, y = zip(*points, strict=True)
                axes.scatter(x, y, facecolors=colour if alone else "none", **style)
        axes.margins(0.08)
        axes.set(xlabel="seconds of merging, and of FeatCal", ylabel="average accuracy (%)")
        label_marks(axes, label_positions, after)
        axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=2)
        return figure_output(figure, title)
