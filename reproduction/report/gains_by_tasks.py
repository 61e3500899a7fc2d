"""What calibration gains over its merger by number of tasks, for both sizes: the drawing beside Table 2."""

import pandas as pd
from matplotlib.figure import Figure

from reproduction.report.estimate import estimate, noise
from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import COLOURS, WIDTH, drawing
from reproduction.report.pages import Page
from reproduction.report.tables import UPSTREAMS, model_key, settings_shown
from reproduction.report.values import PRINTED, REAL, SIZES

POOLS = ("8", "14", "20")
BLOCKS = ("task_arithmetic", "wudi")
STYLES = {  # name, colour of Okabe and Ito, line, marker: told apart in grey too
    "featcal": ("FeatCal", COLOURS["featcal"], "-", "^"), "surgery": ("Surgery", "#009E73", "--", "o"),
    "prob_surgery": ("ProbSurgery", "#CC79A7", ":", "s"),
}  # fmt: skip


def by_tasks(page: Page) -> pd.DataFrame:
    """Gain of each method over its merger at the suite's main settings, and two standard errors of it; a row per experiment."""
    main, found = settings_shown(page.suite)[0], []
    for role, pool in (*((REAL, pool) for pool in POOLS), *PRINTED):
        scores = Evidence(page.suite, role, pool).table("scores")
        for upstream in BLOCKS:
            merged = estimate(select(scores, model_key(upstream, "merged", "")))
            for method in STYLES:
                ours = estimate(select(scores, model_key(upstream, method, main)))
                if merged is not None and ours is not None:
                    row = {"role": role, "tasks": int(pool), "upstream": upstream, "method": method}
                    found.append(row | {"gain": ours.mean - merged.mean, "room": noise(ours, merged)})
    return pd.DataFrame(found, columns=["role", "tasks", "upstream", "method", "gain", "room"])


def drawn(page: Page) -> Figure | None:
    """A panel per merger and size; bars reach two standard errors up and down. None where nothing was run."""
    rows = by_tasks(page)
    if rows.empty:
        return None
    with drawing():
        figure = Figure(figsize=(WIDTH, 6.2))
        sizes = {role: size for role, size in SIZES.items() if role in set(rows["role"])}
        panels = figure.subplots(len(BLOCKS), len(sizes), sharex=True, sharey="row", squeeze=False)
        for line, upstream in zip(panels, BLOCKS, strict=True):
            for axes, (role, size) in zip(line, sizes.items(), strict=True):
                own = select(rows, {"role": role, "upstream": upstream})
                for method, (name, colour, dashes, marker) in STYLES.items():
                    curve = select(own, {"method": method}).sort_values("tasks")
                    style = {"linestyle": dashes, "marker": marker, "color": colour, "lw": 2, "markersize": 7, "capsize": 3}
                    axes.errorbar(curve["tasks"], curve["gain"], yerr=curve["room"], label=name, **style)
                axes.axhline(0, color="#333333", lw=1)
                axes.set_title(f"{UPSTREAMS[upstream]},\n{size}", fontsize=13 if len(sizes) < 3 else 11)
                axes.set_xticks(list(map(int, POOLS)))
        for axes in panels[:, 0]:
            axes.set_ylabel("gain (points)")
        for axes in panels[-1]:
            axes.set_xlabel("tasks")
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="upper center", ncols=3, bbox_to_anchor=(0.5, 1.06))
        figure.tight_layout()
        return figure
