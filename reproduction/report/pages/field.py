"""Build the page on the whole field: every merger from the same experts, alone and with what repairs it.

Task arithmetic in the tangent space has experts of its own: a control at the end of a table, which counts nowhere else.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from matplotlib.figure import Figure

from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import named, one_panel, shown
from reproduction.report.html import PageOutput, compact, estimated, note, table
from reproduction.report.paper import packaged
from reproduction.report.statistics import Estimate, estimate, noise

BEHIND = {
    "featcal": "with FeatCal", "featcal_best": "with FeatCal extended", "surgery": "with Surgery",
    "prob_surgery": "with ProbSurgery", "repair": "with REPAIR", "svc": "with SVC",
}  # fmt: skip
INFERRED = ("surgery_inferred", "prob_surgery_inferred")  # in summaries, next to BEHIND
TRAINED = {
    "prodistill": "with ProDistill",
    "surgery_v2": "with SurgeryV2",
    "interv_merge": "with IntervMerge",
}  # behind some
NOTHING, TRAIN, UNLABELLED = "nothing", "training samples", "unlabelled samples"
TANGENT = "tangent"


@dataclass(frozen=True)
class Known:
    """A method as its source describes it: name, what it looks at, marks."""

    name: str
    sees: str = NOTHING
    marks: str = ""


METHODS = {name: Known(**facts) for name, facts in packaged("field.yaml")["methods"].items()}
ROLES = {"minilm": "real texts, MiniLM", "clip_b32": "synthetic images"}
COLOURS = {NOTHING: "#0072B2", TRAIN: "#D55E00", UNLABELLED: "#009E73"}  # Okabe and Ito
MARKERS = {NOTHING: "o", TRAIN: "s", UNLABELLED: "D"}


def average(ours: Evidence, merger: str, method: str) -> Estimate | None:
    """Return the mean over tasks of a merger alone ("merged") or with something after it."""
    return estimate(select(ours.table("field"), {"upstream": merger, "method": method}))


def mergers(ours: Evidence) -> list[str]:
    """Return the mergers with scores, best with FeatCal first."""
    names = [str(name) for name in ours.table("field")["upstream"].unique() if name != TANGENT]
    found = {name: average(ours, name, "featcal") for name in names}
    return sorted(names, key=lambda name: -(one.mean if (one := found[name]) else 0.0))


def seconds(ours: Evidence, merger: str, part: str) -> float | None:
    """Return the seconds of merging, of choosing a scale, or of what follows; None where not run."""
    found = ours.record("field").get("cost", {}).get(merger, {})
    shared = found.get("features", 0.0) if part in ("surgery", "prob_surgery") else 0.0
    return float(found[part]) + shared if part in found else None


def summary(suite: str) -> PageOutput:
    """Count what follows a merger: how many it raises and lowers by more than two standard errors."""
    rows = []
    for role, name in ROLES.items():
        ours = Evidence(suite, role, "8")
        for way in (*BEHIND, *INFERRED):
            pairs = [
                (average(ours, merger, "merged"), average(ours, merger, way))
                for merger in mergers(ours)
            ]
            known = [(before, after) for before, after in pairs if before and after]
            if known:
                gains = [
                    (after.mean - before.mean, noise(after, before)) for before, after in known
                ]
                raised, lowered = (
                    sum(sign * gain > room for gain, room in gains) for sign in (1, -1)
                )
                best = max((after for _, after in known), key=lambda one: one.mean)
                span = f"{min(gain for gain, _ in gains):+.1f} to {max(gain for gain, _ in gains):+.1f}"
                cells = [f"{raised} of {len(known)}", str(lowered), span, estimated(best)]
                rows.append(("", [f"{METHODS[way].name}<small>{name}</small>", *cells]))
    if not rows:
        return PageOutput(note("○ not run: no study of the field."))
    head = ["After a merger", "Raises", "Lowers", "Change (points)", "Best with it (%)"]
    return PageOutput(
        table(head, rows, "What it adds to the mergers of the tables below; 8 tasks", "fc-words")
    )


def values(role: str, suite: str) -> PageOutput:
    """List every merger with its marks, seconds and scale, its average, and the averages of what follows it."""
    ours, rows = Evidence(suite, role, "8"), []
    for merger in [*mergers(ours), *([TANGENT] if average(ours, TANGENT, "merged") else [])]:
        known, took = METHODS[merger], seconds(ours, merger, "merged")
        cost = "–" if took is None else f"{took:.1f}<small>{_scale(ours, merger)}</small>"
        cells = [estimated(average(ours, merger, way)) for way in ("merged", *BEHIND)]
        rows.append(
            ("", [f"{escape(known.name)} {_marks(ours, merger)}", known.sees, cost, *cells])
        )
    if not rows:
        return PageOutput(note(f"○ not run: no study of the field with {ROLES[role]}."))
    head = ["Merger", "It looks at", "Seconds", "Alone", *BEHIND.values()]
    samples = ours.settings("field")["study"]["samples"]
    caption = (
        f"Average accuracy (%), 8 tasks, {ROLES[role]}; {samples} training samples of each task"
    )
    return PageOutput(table(head, rows, caption, "fc-long"))


def _scale(ours: Evidence, merger: str) -> str:
    """Return the value that validation samples chose, whether at an end of its range, and its seconds."""
    facts = ours.settings("field")
    rows = facts.get("tried", {}).get(merger, [])
    if not rows:
        return ""
    key = "eta" if "eta" in rows[0] else "scale"
    tried, chosen = [row[key] for row in rows], facts["chosen"][merger][key]
    edge = ", an end" if chosen in (min(tried), max(tried)) else ""
    took = seconds(ours, merger, "choosing")
    return f"{'η' if key == 'eta' else key} {compact(chosen)} of {len(tried)}{edge}" + (
        "" if took is None else f", {took:.0f} s"
    )


def _marks(ours: Evidence, merger: str) -> str:
    """Return the marks of a merger, V only where its scale was chosen, and the paper's reference number."""
    tried = ours.settings("field").get("tried", {})
    kept = "".join(mark for mark in METHODS[merger].marks if mark != "V" or merger in tried)
    number = [
        str(n)
        for n, names in enumerate(packaged("field.yaml")["references"], start=1)
        if merger in names
    ]
    return "".join([f"<sup>{kept}</sup>" if kept else "", *(f" [{n}]" for n in number)])


def trained(suite: str) -> PageOutput:
    """List what trains for minutes after a merger, next to FeatCal after the same mergers."""
    rows = [row for role in ROLES for row in _trained(Evidence(suite, role, "8"), ROLES[role])]
    if not rows:
        return PageOutput(note("○ not run: nothing that trains for minutes."))
    head = ["Merger", "With", "Steps", "Seconds", "Average (%)"]
    return PageOutput(table(head, rows, "What trains after a merger, 8 tasks", "fc-words"))


def _trained(ours: Evidence, name: str) -> Iterator[tuple[str, list[str]]]:
    study = ours.settings("field").get("study", {})
    for merger in mergers(ours):
        if any(average(ours, merger, method) for method in TRAINED):
            for method in ("merged", *BEHIND, *INFERRED, *TRAINED):
                value, took = average(ours, merger, method), seconds(ours, merger, method)
                own = (
                    study.get("rivals", {}).get(method, study.get(method))
                    if method != "featcal"
                    else None
                )
                steps = f"{own['steps']:,}" if isinstance(own, dict) else "–"
                steps = f"{study['epochs']} epochs" if method == "prodistill" else steps
                words = "nothing" if method == "merged" else METHODS[method].name
                spent = "–" if took is None or method == "merged" else f"{took:.0f}"
                if value:
                    first = f"{escape(METHODS[merger].name)}<small>{name}</small>"
                    yield "", [first, words, steps, spent, estimated(value)]


def legend() -> PageOutput:
    """Explain the marks, and list what each thing after a merger looks at."""
    rows = [("", [mark, escape(text)]) for mark, text in packaged("field.yaml")["marks"].items()]
    for name in (*BEHIND, *INFERRED, *TRAINED):
        known = METHODS[name]
        rows.append(("", [escape(known.name), f"looks at {known.sees} <sup>{known.marks}</sup>"]))
    return PageOutput(
        table(["Mark or method", "Meaning"], rows, "What a method asks for", "fc-words")
    )


def printed() -> PageOutput:
    """List averages that other authors printed for CLIP ViT-B/32 on the paper's eight tasks."""
    rows = [
        ("", [escape(name), f"{value:.1f}", escape(place)])
        for name, value, place in packaged("field.yaml")["printed"]
    ]
    caption = "Printed elsewhere: CLIP ViT-B/32, 8 tasks, FusionBench’s checkpoints"
    return PageOutput(table(["Method", "Average (%)", "Where"], rows, caption, "fc-words"))


def panel(role: str, suite: str) -> PageOutput:
    """Draw accuracy against seconds by what a merger looks at; hollow marks have FeatCal after it."""
    return shown(_panel(Evidence(suite, role, "8")), "study of the field")


def _panel(ours: Evidence) -> Figure | None:
    names = [m for m in mergers(ours) if seconds(ours, m, "merged") is not None]
    if not names:
        return None
    with one_panel(6.0) as (figure, axes):
        axes.set_xscale("log")  # before names look for free places
        places: dict[str, tuple[float, float]] = {}
        after: list[tuple[float, float]] = []
        for sees, colour in COLOURS.items():
            for method, face in (("merged", colour), ("featcal", "none")):
                points = []
                for merger in (m for m in names if METHODS[m].sees == sees):
                    value, took = (
                        average(ours, merger, method),
                        seconds(ours, merger, "merged") or 0.0,
                    )
                    more = seconds(ours, merger, "featcal") or 0.0 if method == "featcal" else 0.0
                    if value:
                        points.append((max(took + more, 0.01), value.mean))
                        if method == "merged":
                            places[METHODS[merger].name] = points[-1]
                        else:
                            after.append(points[-1])
                if points:
                    words = f"looks at {sees}" + (", with FeatCal" if method == "featcal" else "")
                    look = {"marker": MARKERS[sees], "facecolors": face, "edgecolors": colour}
                    axes.scatter(*zip(*points, strict=True), s=55, label=words, **look)
        axes.margins(0.08)
        axes.set(xlabel="seconds of merging, and of FeatCal", ylabel="average accuracy (%)")
        named(axes, places, after)
        axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=2)
        return figure
