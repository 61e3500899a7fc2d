"""The field as a picture: accuracy against the seconds that a merger takes, as it is and with
FeatCal behind it.
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reproduction.report.evidence import Evidence
from reproduction.report.field import average, evidence, mergers, page, seconds
from reproduction.report.field_facts import METHODS, NOTHING, TRAIN, UNLABELLED
from reproduction.report.figures import named, one_panel
from reproduction.report.html import PageOutput
from reproduction.report.page import drawn


def panel(role: str, suite: str) -> PageOutput:
    """Accuracy against the seconds that a merger takes, by what it looks at; hollow: with FeatCal
    behind it.
    """
    return drawn(_panel(evidence(role, suite)), "study of the field", page(role, suite).label)


COLOURS = {NOTHING: "#0072B2", TRAIN: "#D55E00", UNLABELLED: "#009E73"}  # Okabe and Ito
MARKERS = {NOTHING: "o", TRAIN: "s", UNLABELLED: "D"}


def _panel(ours: Evidence) -> Figure | None:
    names = [m for m in mergers(ours) if seconds(ours, m, "merged") is not None]
    if not names:
        return None
    with one_panel(6.0) as (figure, axes):
        axes.set_xscale("log")  # before names look for free places
        _points(axes, ours, names)
        axes.set(
            xlabel="seconds for merging, and for FeatCal where it is behind",
            ylabel="average accuracy (%)",
        )
        axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=2)
        return figure


def _points(axes: Axes, ours: Evidence, names: list[str]) -> None:
    places: dict[str, tuple[float, float]] = {}
    behind: list[tuple[float, float]] = []
    for sees in COLOURS:
        own = [m for m in names if METHODS[m].sees == sees]
        for method, look, words in (
            ("merged", COLOURS[sees], sees),
            ("featcal", "none", f"{sees}, with FeatCal"),
        ):
            points = []
            for merger in own:
                value, took = average(ours, merger, method), seconds(ours, merger, "merged") or 0.0
                more = (seconds(ours, merger, "featcal") or 0.0) if method == "featcal" else 0.0
                if value:
                    points.append((max(took + more, 0.01), value.mean))
                    if method == "merged":
                        places[METHODS[merger].name] = points[-1]
                    else:
                        behind.append(points[-1])
            if points:
                x, y = zip(*points, strict=True)
                axes.scatter(
                    x,
                    y,
                    s=55,
                    marker=MARKERS[sees],
                    facecolors=look,
                    edgecolors=COLOURS[sees],
                    label=f"looks at {words}",
                )
    axes.margins(0.08)
    named(axes, places, behind)
