"""Figure 6: final features of every task in a plane of its own, which expert, merged and calibrated
model share.
"""

from matplotlib.figure import Figure

from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import NAMES, PROJECTED, WIDTH, drawing, mean_cosines, plane
from reproduction.report.html import PageOutput
from reproduction.report.page import Page

COLUMNS = 2  # panels side by side; more cannot be read at 390 pixels


def planes(evidence: Evidence) -> Figure | None:
    """A panel per task with the mean cosine to the expert before and after; None where nothing was
    measured.
    """
    points, cosine = evidence.table("projection"), mean_cosines(evidence)
    tasks = [task for task in evidence.tasks if task in set(points["task"])]
    if not tasks:
        return None
    with drawing():
        lines = -(-len(tasks) // COLUMNS)
        figure = Figure(figsize=(WIDTH, 2.75 * lines + 0.5), layout="constrained")
        panels = figure.subplots(lines, COLUMNS, squeeze=False).flatten()
        for axes, task in zip(panels, tasks, strict=False):
            plane(axes, select(points, {"task": task}), NAMES)
            both = [f"{cosine[m, task]:.2f}" for m in ("merged", "featcal") if (m, task) in cosine]
            axes.set_title(f"{evidence.title(task)}\n{' → '.join(both)}", fontsize=13)
            axes.set(xticks=[], yticks=[])  # arbitrary units, and of each panel its own
        for axes in panels[len(tasks) :]:
            axes.set_axis_off()
        handles, _ = panels[0].get_legend_handles_labels()
        figure.legend(
            handles,
            [NAMES[m] for m in PROJECTED],
            loc="outside upper center",
            ncols=3,
            handletextpad=0.2,
        )
        return figure


def figure(page: Page) -> PageOutput:
    """Figure 6, or a note that it was not run."""
    return page.drawn(planes(page.evidence), "planes")
