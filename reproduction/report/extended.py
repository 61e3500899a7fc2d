"""Table 2: the averages of the five roles and pools beside the first table's, put together from
their own result files.
"""

import pandas as pd
from matplotlib.figure import Figure

from reproduction.report import tables
from reproduction.report.accuracies import LEGEND, folded_table
from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import CURVES, WIDTH, drawing
from reproduction.report.html import PageOutput
from reproduction.report.page import Page
from reproduction.report.paper import EXTENDED, PRINTED, REAL, SIZES, place_name
from reproduction.report.statistics import noise
from reproduction.report.tables import accuracy_table

UPSTREAMS = ("task_arithmetic", "wudi")
POOLS = ("8", "14", "20")
DASHES = {"featcal": "-", "surgery": "--", "prob_surgery": ":"}


def columns_of(page: Page) -> dict[str, tuple[str, str]]:
    """Columns of the page's table: role and pool by name; of the real encoder all of its pools."""
    return {pool: (REAL, pool) for pool in POOLS} if page.role == REAL else EXTENDED


def rows(page: Page) -> list[tables.Row]:
    """The rows of Table 2, every cell a mean over tasks (and seeds) at the suite's main
    settings.
    """
    main, columns = tables.settings_shown(page.suite)[0], columns_of(page)

    def look(upstream: str, method: str) -> tuple[dict[str, tables.Cell], bool]:
        key = tables.model_key(upstream, method, main)
        return tables.cells_of(
            {
                name: tables.average(Evidence(page.suite, *place), key)
                for name, place in columns.items()
            }
        )

    return tables.rows_in_order(look, tables.references_of("table02"), UPSTREAMS)


def averages(page: Page) -> PageOutput:
    """Table 2 in the paper's order of rows and columns."""
    at = tables.SETTING_LABELS[tables.settings_shown(page.suite)[0]]
    caption = (
        f"Average top-1 accuracy (%) on test {page.inputs}, at the {at} — {page.label}. {LEGEND}"
    )
    caption += " One run: in at least one column."
    columns = columns_of(page)
    titles = [place_name(*place) for place in columns.values()]
    html = accuracy_table(rows(page), list(columns), titles, caption, average=False)[0]
    return PageOutput(html + page.against_printed())


def printed() -> PageOutput:
    """The paper's Table 2, folded away, with the cells in doubt marked."""
    columns, found = tables.paper_rows("table02")
    caption = "The paper’s Table 2, as printed: real CLIP models on real data"
    return PageOutput(
        folded_table(*accuracy_table(found, columns, columns, caption, average=False))
    )


def gains(page: Page) -> PageOutput:
    """The gain of everything that calibrates by number of tasks, drawn; or a note that it was not
    run.
    """
    return page.drawn(drawn(page), "averages to compare")


def by_tasks(page: Page) -> pd.DataFrame:
    """Gain of each method over its merger at the suite's main settings, and two standard errors of
    it; a row per experiment.
    """
    main, found = tables.settings_shown(page.suite)[0], []
    for role, pool in (*((REAL, pool) for pool in POOLS), *PRINTED):
        evidence = Evidence(page.suite, role, pool)
        for upstream in UPSTREAMS:
            merged = tables.average(evidence, (upstream, "merged", ""))
            for method in DASHES:
                ours = tables.average(evidence, (upstream, method, main))
                if merged is not None and ours is not None:
                    row = {"role": role, "tasks": int(pool), "upstream": upstream, "method": method}
                    found.append(
                        row | {"gain": ours.mean - merged.mean, "room": noise(ours, merged)}
                    )
    return pd.DataFrame(found, columns=["role", "tasks", "upstream", "method", "gain", "room"])


def drawn(page: Page) -> Figure | None:
    """A panel per merger and size; bars reach two standard errors up and down. None where nothing
    was run.
    """
    rows = by_tasks(page)
    if rows.empty:
        return None
    with drawing():
        figure = Figure(figsize=(WIDTH, 6.2))
        sizes = {role: size for role, size in SIZES.items() if role in set(rows["role"])}
        panels = figure.subplots(
            len(UPSTREAMS), len(sizes), sharex=True, sharey="row", squeeze=False
        )
        for line, upstream in zip(panels, UPSTREAMS, strict=True):
            for axes, (role, size) in zip(line, sizes.items(), strict=True):
                own = select(rows, {"role": role, "upstream": upstream})
                for method, dashes in DASHES.items():
                    curve = select(own, {"method": method}).sort_values("tasks")
                    style = CURVES[method] | {
                        "linestyle": dashes,
                        "lw": 2,
                        "markersize": 7,
                        "capsize": 3,
                    }
                    axes.errorbar(curve["tasks"], curve["gain"], yerr=curve["room"], **style)
                axes.axhline(0, color="#333333", lw=1)
                axes.set_title(
                    f"{tables.UPSTREAMS[upstream]},\n{size}", fontsize=13 if len(sizes) < 3 else 11
                )
                axes.set_xticks(list(map(int, POOLS)))
        for axes in panels[:, 0]:
            axes.set_ylabel("gain (points)")
        for axes in panels[-1]:
            axes.set_xlabel("tasks")
        figure.legend(
            *panels[0, 0].get_legend_handles_labels(),
            loc="upper center",
            ncols=3,
            bbox_to_anchor=(0.5, 1.06),
        )
        figure.tight_layout()
        return figure
