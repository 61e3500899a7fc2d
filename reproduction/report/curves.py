"""Loss curves of what was trained: AdaMerging's coefficients, and the adapters. Drawn like the other figures."""

from matplotlib.figure import Figure

from reproduction.report.claims import main_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import one_panel

STYLES = {"surgery": ("Surgery", "#009E73", "-"), "prob_surgery": ("ProbSurgery", "#CC79A7", "--")}  # Okabe and Ito


def adamerging(evidence: Evidence) -> Figure | None:
    """Entropy of the answers, summed over tasks, by step."""
    rows = select(evidence.table("curves"), {"upstream": "adamerging", "method": "merged"})
    if rows.empty:
        return None
    with one_panel(3.0) as (figure, axes):
        axes.plot(rows["step"], rows["loss"], color="#D55E00", marker="o", markersize=4, lw=2)
        axes.set(xlabel="step", ylabel="entropy, all tasks (nats)")
        return figure


def adapters(evidence: Evidence, upstream: str = "task_arithmetic") -> Figure | None:
    """Loss of Surgery and ProbSurgery as a share of its start, mean over tasks and seeds; the two losses have no common unit."""
    found = select(evidence.table("curves"), {"upstream": upstream, "setting": main_setting(evidence.suite)})
    found = found[found["method"].isin(STYLES)]
    if found.empty:
        return None
    with one_panel(3.0) as (figure, axes):
        for method, (name, colour, dashes) in STYLES.items():
            curve = found[found["method"] == method].groupby("step")["loss"].mean()
            if len(curve):
                axes.plot(curve.index, curve / curve.iloc[0], dashes, color=colour, lw=2, label=name)
        axes.set(xlabel="step", ylabel="loss, share of its start")
        axes.set_ylim(0, None)
        axes.legend()
        return figure


PANELS = {"adamerging": adamerging, "adapters": adapters}
