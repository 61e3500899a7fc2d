"""Shares of the gap by number of tasks, drawn: a row per method and a column per merger, ours and the paper's."""

from typing import Any

from matplotlib.figure import Figure

from reproduction.report.markup import PageOutput
from reproduction.report.pages import Page
from reproduction.report.tables import UPSTREAMS
from reproduction.report.task_counts import MERGERS, PAPER, POOLS, STUDY, TRAINED, Share, series, shares
from reproduction.report.why_adapters import NAMES, ran

MARKS: dict[str, dict[str, Any]] = {  # of Okabe and Ito; told apart in grey by marker and line
    STUDY: {"color": "#0072B2", "marker": "o"}, POOLS: {"color": "#0072B2", "marker": "o", "markerfacecolor": "white"},
    PAPER: {"color": "#444444", "marker": "X", "ls": (0, (1, 2))},
}  # fmt: skip


def panels(page: Page) -> PageOutput:
    """The shares drawn: a row per method, a column per merger."""
    return page.drawn(_panels(page), "shares of the gap by number of tasks")


def _panels(page: Page) -> Figure | None:
    from reproduction.report.figures import WIDTH, drawing

    found = shares(page) if ran(page) else []
    if not found:
        return None
    methods = ("featcal", *TRAINED, "mean_shift")
    with drawing():
        figure = Figure(figsize=(WIDTH, 9.6))
        grid = figure.subplots(len(methods), len(MERGERS), sharex=True, sharey=True, squeeze=False)
        for line, method in zip(grid, methods, strict=True):
            for axes, upstream in zip(line, MERGERS, strict=True):
                for number, setting in enumerate([s for m, s in series(page) if m == method]):
                    own = [s for s in found if (s.upstream, s.method, s.setting) == (upstream, method, setting)]
                    _curve(axes, own, "-" if number == 0 else "--")
                _points(axes, [s for s in found if (s.upstream, s.method, s.source) == (upstream, method, PAPER)], PAPER)
                axes.set_title(f"{NAMES[method]},\n{UPSTREAMS[upstream]}", fontsize=12)
                axes.axhline(0, color="#333333", lw=1)
        counts = sorted({one.tasks for one in found})
        for axes in grid[-1]:
            axes.set(xscale="log", xlabel="tasks")
            axes.set_xticks(counts, list(map(str, counts)))
            axes.minorticks_off()
        for axes in grid[:, 0]:
            axes.set_ylabel("share (%)")
        figure.tight_layout()
        return figure


def _curve(axes: Any, own: list[Share], dashes: str) -> None:
    """One setting of ours through drawn parts and larger pools; bars reach from the least part to the most."""
    axes.plot([s.tasks for s in own], [s.share for s in own], dashes, color=MARKS[STUDY]["color"], lw=1.8)
    for source in (STUDY, POOLS):
        _points(axes, [s for s in own if s.source == source], source)


def _points(axes: Any, those: list[Share], source: str) -> None:
    if those:
        bars = [[s.share - s.least for s in those], [s.most - s.share for s in those]]
        look = {"ls": "", "markersize": 7, "elinewidth": 1.0, "zorder": 3} | MARKS[source]
        axes.errorbar([s.tasks for s in those], [s.share for s in those], yerr=bars, **look)
