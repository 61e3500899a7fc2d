"""Build the page on the whole field: every merger from the same experts, alone and with what repairs it.

Task arithmetic in the tangent space has experts of its own: a control at the end of a table, which counts nowhere else.
"""

from dataclasses import dataclass
from html import escape
from itertools import product
from typing import Any

from reproduction.report.evidence import Evidence
from reproduction.report.figures import named, one_panel, shown
from reproduction.report.html import PageOutput, compact, estimated, listed
from reproduction.report.paper import packaged
from reproduction.report.statistics import Estimate, estimate, highest, lead

BEHIND = {
    "featcal": "with FeatCal", "featcal_auto": "with FeatCal's default", "surgery": "with Surgery",
    "prob_surgery": "with ProbSurgery", "repair": "with REPAIR", "svc": "with SVC",
}  # fmt: skip
INFERRED = ("surgery_inferred", "prob_surgery_inferred")  # in summaries, next to BEHIND
TRAINED = ("prodistill", "surgery_v2", "interv_merge")  # after some mergers
NOTHING, TRAIN, UNLABELLED = "nothing", "training samples", "unlabelled samples"
TANGENT = "tangent"


@dataclass(frozen=True)
class Known:
    """A method as its source describes it: name, what it looks at, marks."""

    name: str
    sees: str = NOTHING
    marks: str = ""


METHODS = {name: Known(**facts) for name, facts in packaged("field.yaml")["methods"].items()}
ROLES = {
    "vit_s": "real images, ViT-S/14",
    "minilm": "real texts, MiniLM",
    "clip_b32": "synthetic images",
}
COLOURS = {NOTHING: "#0072B2", TRAIN: "#D55E00", UNLABELLED: "#009E73"}  # Okabe and Ito
MARKERS = {NOTHING: "o", TRAIN: "s", UNLABELLED: "D"}


Averages = dict[tuple[str, str], Estimate]  # by merger and what follows it, or "merged"


def averages(ours: Evidence) -> Averages:
    """Return the means over tasks of all mergers, alone and with something after them."""
    groups = ours.table("field").groupby(["upstream", "method"], sort=False)
    return {key: one for key, rows in groups if (one := estimate(rows))}


def mergers(found: Averages, method: str = "featcal") -> list[str]:
    """Return the mergers with scores, best with FeatCal first."""
    names = [name for name in dict.fromkeys(name for name, _ in found) if name != TANGENT]
    means = {name: one.mean for name in names if (one := found.get((name, method)))}
    return sorted(names, key=lambda name: -means.get(name, 0.0))


def seconds(ours: Evidence, merger: str, part: str) -> float | None:
    """Return the seconds of merging, of choosing a scale, or of what follows; None where not run."""
    found = ours.record("field").get("cost", {}).get(merger, {})
    shared = found.get("features", 0.0) if part in ("surgery", "prob_surgery") else 0.0
    return float(found[part]) + shared if part in found else None


def summary(suite: str) -> PageOutput:
    """Count what follows a merger: how many it raises and lowers by more than two standard errors."""
    rows = []
    found = {role: averages(Evidence(suite, role, "8")) for role in ROLES}
    for (role, name), way in product(ROLES.items(), (*BEHIND, *INFERRED)):
        own = found[role]
        pairs = [(own.get((m, way)), own.get((m, "merged"))) for m in mergers(own)]
        known = [(after, before) for after, before in pairs if after and before]
        if known:
            leads = [lead(*pair) for pair in known]
            raised, lowered = (sum(sign * gap > room for gap, room in leads) for sign in (1, -1))
            cells = [f"{raised} of {len(known)}", str(lowered)]
            cells.append(f"{min(leads)[0]:+.1f} to {max(leads)[0]:+.1f}")
            cells.append(estimated(highest(after for after, _ in known)))
            rows.append([f"{METHODS[way].name}<small>{name}</small>", *cells])
    head = ["After a merger", "Raises", "Lowers", "Change (points)", "Best with it (%)"]
    caption = "Effect on mergers of 8 tasks"
    return listed(head, rows, caption, "fc-words", "no study of the field")


def values(role: str, suite: str) -> PageOutput:
    """List every merger with its marks, seconds and scale, its average, and the averages of what follows it."""
    ours, rows = Evidence(suite, role, "8"), []
    found = averages(ours)
    run = {method for _, method in found}
    ways = [way for way in BEHIND if way in run]
    for merger in [*mergers(found), *([TANGENT] if (TANGENT, "merged") in found else [])]:
        known, took = METHODS[merger], seconds(ours, merger, "merged")
        cost = "–" if took is None else f"{took:.1f}<small>{_scale(ours, merger)}</small>"
        cells = [estimated(found.get((merger, way))) for way in ("merged", *ways)]
        rows.append([f"{escape(known.name)} {_marks(ours, merger)}", known.sees, cost, *cells])
    head = ["Merger", "It looks at", "Seconds", "Alone", *(BEHIND[way] for way in ways)]
    samples = ours.settings("field").get("study", {}).get("samples")
    caption = (
        f"Average accuracy (%), 8 tasks, {ROLES[role]}; {samples} training samples of each task"
    )
    return listed(head, rows, caption, "fc-long", f"no study of the field with {ROLES[role]}")


def _scale(ours: Evidence, merger: str) -> str:
    """Return the value that validation samples chose, whether at an end of its range, and its seconds."""
    facts = ours.settings("field")
    rows = facts.get("tried", {}).get(merger, [])
    if not rows:
        return ""
    key = "eta" if "eta" in rows[0] else "scale"
    tried, chosen = [row[key] for row in rows], facts["chosen"][merger][key]
    edge = ", end of range" if chosen in (min(tried), max(tried)) else ""
    took = seconds(ours, merger, "choosing")
    spent = "" if took is None else f", {took:.0f} s"
    return f"{'η' if key == 'eta' else key} {compact(chosen)} of {len(tried)}{edge}{spent}"


def _marks(ours: Evidence, merger: str) -> str:
    """Return the marks of a merger, V only where its scale was chosen, and the paper's reference number."""
    tried = ours.settings("field").get("tried", {})
    kept = "".join(mark for mark in METHODS[merger].marks if mark != "V" or merger in tried)
    references = enumerate(packaged("field.yaml")["references"], start=1)
    cited = (f" [{number}]" for number, names in references if merger in names)
    return "".join([f"<sup>{kept}</sup>" if kept else "", *cited])


def trained(suite: str) -> PageOutput:
    """List what trains for minutes after a merger, next to FeatCal after the same mergers."""
    rows = []
    for role, name in ROLES.items():
        ours = Evidence(suite, role, "8")
        study = ours.settings("field").get("study", {})
        known = averages(ours)
        for merger in mergers(known):
            first = f"{escape(METHODS[merger].name)}<small>{name}</small>"
            ways = ("merged", "featcal", *INFERRED, *TRAINED)
            found = {way: one for way in ways if (one := known.get((merger, way)))}
            for way, one in found.items() if found.keys() & set(TRAINED) else ():
                steps, spent = _training(study, way), seconds(ours, merger, way)
                words = "nothing" if way == "merged" else METHODS[way].name
                cost = "–" if spent is None or way == "merged" else f"{spent:.0f}"
                rows.append([first, words, steps, cost, estimated(one)])
    head = ["Merger", "With", "Steps", "Seconds", "Average (%)"]
    caption = "What trains after a merger, 8 tasks"
    return listed(head, rows, caption, "fc-words", "nothing that trains for minutes")


def _training(study: dict[str, Any], way: str) -> str:
    """Return how many steps or epochs a method trains for; a dash where it does not."""
    if way == "prodistill":
        return f"{study['epochs']} epochs"
    own = study.get("comparison", {}).get(way, study.get(way)) if way != "featcal" else None
    return f"{own['steps']:,}" if isinstance(own, dict) else "–"


def legend() -> PageOutput:
    """Explain the marks, and list what each thing after a merger looks at."""
    rows = [[mark, escape(text)] for mark, text in packaged("field.yaml")["marks"].items()]
    for name in (*BEHIND, *INFERRED, *TRAINED):
        known = METHODS[name]
        rows.append([escape(known.name), f"looks at {known.sees} <sup>{known.marks}</sup>"])
    return listed(["Mark or method", "Meaning"], rows, "What a method asks for", "fc-words")


def language(suite: str) -> PageOutput:
    """List mergers of a language model, which nothing follows, best first, and every η that was tried."""
    ours, rows = Evidence(suite, "flan_t5_base", "glue"), []
    found = averages(ours)
    for merger in mergers(found, "merged"):
        name = escape(METHODS[merger].name)
        first = f"{name} {_marks(ours, merger)}<small>{_scale(ours, merger)}</small>"
        rows.append([first, estimated(found[merger, "merged"])])
        for one in ours.settings("field").get("tried", {}).get(merger, []):
            words = f"{name}, η = {one['eta']:,.0f}<small>validation texts</small>"
            rows.append([words, f"{one['value']:.1f}"])
    caption = "Average score (%), 8 text tasks, synthetic model in the role of FLAN-T5-base; mergers alone"
    missing = "no study of the field with a language model"
    return listed(["Merger", "Alone"], rows, caption, "fc-words", missing)


def panel(role: str, suite: str) -> PageOutput:
    """Draw accuracy against seconds by what a merger looks at; hollow marks have FeatCal after it."""
    what, ours = "study of the field", Evidence(suite, role, "8")
    found = averages(ours)
    costs = {m: took for m in mergers(found) if (took := seconds(ours, m, "merged")) is not None}
    if not costs:
        return shown(None, what)
    with one_panel(6.0) as (figure, axes):
        axes.set_xscale("log")  # before names look for free places
        places: dict[str, tuple[float, float]] = {}
        after: list[tuple[float, float]] = []
        for (sees, colour), method in product(COLOURS.items(), ("merged", "featcal")):
            points, alone = [], method == "merged"
            for merger in (m for m in costs if METHODS[m].sees == sees):
                more = 0.0 if alone else seconds(ours, merger, method) or 0.0
                if value := found.get((merger, method)):
                    points.append((max(costs[merger] + more, 0.01), value.mean))
                    if alone:
                        places[METHODS[merger].name] = points[-1]
            after += [] if alone else points
            if points:
                words = f"looks at {sees}" + ("" if alone else ", with FeatCal")
                look = {"marker": MARKERS[sees], "edgecolors": colour, "label": words, "s": 55}
                x, y = zip(*points, strict=True)
                axes.scatter(x, y, facecolors=colour if alone else "none", **look)
        axes.margins(0.08)
        axes.set(xlabel="seconds of merging, and of FeatCal", ylabel="average accuracy (%)")
        named(axes, places, after)
        axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=2)
        return shown(figure, what)
