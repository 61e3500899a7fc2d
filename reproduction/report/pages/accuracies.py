"""Tables 1, 2 and 7 to 11: accuracies of image models, and of the encoder in their place."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product

import pandas as pd
from matplotlib.figure import Figure

from reproduction.report import tables
from reproduction.report.claims import studied_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import CURVES, DASHES, WIDTH, drawing, shown
from reproduction.report.html import PageOutput, listed
from reproduction.report.pages.reproduced import against_printed
from reproduction.report.paper import (
    AVERAGE,
    EXTENDED,
    IMAGES,
    PRINTED,
    REAL,
    TASKS,
    corrected_table,
    model_name,
    model_title,
    paper_row,
    paper_table,
)
from reproduction.report.statistics import lead

LEGEND = (
    "Arrows: against the merger. sd: over seeds, where there are several. Bold: best of a block."
)
EXTENDED_MERGERS = ("task_arithmetic", "wudi")  # of Table 2
POOLS = ("8", "14", "20")
SIZES = {REAL: "MiniLM, texts", IMAGES: "in the role of B/32", "clip_l14": "in the role of L/14"}


def answer(number: str, *experiments: Evidence) -> PageOutput:
    """Return FeatCal minus its merger and minus the better adapter, printed and measured."""
    head = ["FeatCal after", "The paper: − merger", "− better adapter"]
    for ours in experiments:
        head += [f"{model_title(ours.role, ours.suite)}: − merger", "− better adapter"]
    rows = []
    for upstream, label, first, setting in _lines(experiments):
        cells = [printed_gain(number, upstream, own) for own in (("merged",), tables.ADAPTERS)]
        cells = cells if first else ["", ""]
        for ours in experiments:
            cells += tables.gains(ours, upstream, setting)
        rows.append(("fc-merger" if first else "fc-calibrated", [label, *cells]))
    caption = (
        "Differences of the average accuracy, points. Above, below: by more than two standard"
        " errors, samples paired. Better adapter: the higher average of Surgery and ProbSurgery."
    )
    return listed(head, rows, caption, "fc-long")


def _lines(experiments: Iterable[Evidence]) -> Iterator[tuple[str, str, bool, str]]:
    """Yield merger, label, whether it is the merger's first line, and setting, for every setting run."""
    run = {s for ours in experiments for s in tables.settings_shown(ours.suite, ours.pool)}
    for (upstream, name), setting in product(tables.UPSTREAMS.items(), sorted(run)):
        label = f"{name} <small>{tables.SETTING_LABELS[setting]}</small>"
        yield upstream, label, setting == min(run), setting


def printed_gain(number: str, upstream: str, others: Sequence[str], model: str = "") -> str:
    """Return FeatCal minus the best of others, printed; with corrected cells where that changes it."""

    def gain(read: Callable[..., pd.DataFrame]) -> float:
        rows = (paper_row(number, upstream, m, model, read=read) for m in ("featcal", *others))
        ours, *theirs = (float(row[AVERAGE]) for row in rows)
        return ours - max(theirs)

    said, mended = (f"{gain(read):+.1f}" for read in (paper_table, corrected_table))
    return said if said == mended else f"{said} <small>{mended} corrected</small>"


def measured(ours: Evidence) -> PageOutput:
    """Return the accuracy table of one experiment in the paper's order of rows."""
    caption = f"Top-1 accuracy (%) on test {ours.inputs} — {model_name(ours.role, ours.suite)}.{tables.settings_note(ours)} {LEGEND}"
    titles = {task: ours.title(task) for task in ours.tasks}
    html, _ = tables.accuracy_table(tables.accuracy_rows(ours), titles, caption)
    number = PRINTED.get((ours.role, ours.pool), "")
    return PageOutput(html + against_printed(ours, number))


def printed(number: str) -> PageOutput:
    """Return the paper's printed table, one click away, with the cells in doubt marked."""
    columns, rows = tables.paper_rows(number)
    caption = f"The paper’s Table {int(number[-2:])}, as printed: CLIP models on image data sets"
    titles = {column: TASKS.get(column, column) for column in columns}
    found = tables.accuracy_table(rows, titles, caption, average=number != "table02")
    return PageOutput(tables.printed_fold(*found))


def recovered(number: str, *experiments: Evidence) -> PageOutput:
    """Return the share of the way from each merger to the experts that FeatCal goes."""
    rows = []
    for upstream, label, first, setting in _lines(experiments):
        cells = [share_of(ours, upstream, setting) for ours in experiments]
        rows.append([label, printed_share(number, upstream) if first else "", *cells])
    head = ["FeatCal after", "The paper", *(model_name(o.role, o.suite) for o in experiments)]
    caption = "Share of the gap between merger and experts that FeatCal recovers (%)"
    return listed(head, rows, caption)


def share_of(ours: Evidence, upstream: str, setting: str) -> str:
    """Return the measured share of one merger at one setting."""
    went = tables.recovered_share(ours, upstream, "featcal", setting)
    return '<span class="fc-none">not run</span>' if went is None else f"{went:.0f}"


def printed_share(number: str, upstream: str, model: str = "") -> str:
    """Return the paper's share; with corrected cells where that changes it."""
    shares = (tables.paper_recovered(number, upstream, mended, model) for mended in (False, True))
    said, mended = ("–" if one is None else f"{one:.0f}" for one in shares)
    return said if said == mended else f"{said} <small>{mended} corrected</small>"


def columns_of(suite: str, role: str) -> dict[str, Evidence]:
    """Return the experiments behind the columns of Table 2, by their printed heading."""
    if role == REAL:
        return {f"{pool} tasks": Evidence(suite, REAL, pool) for pool in POOLS}
    return {column: Evidence(suite, *place) for column, place in EXTENDED.items()}


def extended_answer(suite: str) -> PageOutput:
    """Return FeatCal minus the better adapter for every column of Table 2, printed and measured."""
    main, rows = studied_setting(suite), []
    columns = columns_of(suite, IMAGES)
    texts = {name: Evidence(suite, REAL, EXTENDED[name][1]) for name in columns if "B/32" in name}
    places = {"synthetic models" if suite == "mini" else "here": columns}
    places[model_name(REAL, suite)] = texts
    for upstream in EXTENDED_MERGERS:
        printed = [paper_row("table02", upstream, m) for m in ("featcal", *tables.ADAPTERS)]
        featcal, *adapters = printed
        best = [featcal[c] - max(adapter[c] for adapter in adapters) for c in columns]
        name = tables.UPSTREAMS[upstream]
        first = [f"{name} <small>the paper</small>", *(f"{gain:+.1f}" for gain in best)]
        rows.append(("fc-merger", first))
        for words, own in places.items():
            cells = [tables.gains(own[c], upstream, main)[1] if c in own else "–" for c in columns]
            rows.append(("fc-calibrated", [f"{name} <small>{words}</small>", *cells]))
    caption = (
        "FeatCal minus the better adapter, average accuracy, points,"
        f" {tables.SETTING_LABELS[main]}. Above, below: by more than two standard errors."
    )
    return listed(["After", *columns], rows, caption, "fc-long")


def extended(suite: str, role: str) -> PageOutput:
    """Return Table 2: averages at the tuned settings, a column per experiment."""
    main, columns = studied_setting(suite), columns_of(suite, role)

    def look(upstream: str, method: str, setting: str) -> tables.Cells:
        key = tables.model_key(upstream, method, setting)
        return tables.cells_of({name: tables.average(ours, key) for name, ours in columns.items()})

    rows = tables.rows_in_order(look, tables.references_of("table02"), EXTENDED_MERGERS, (main,))
    kind = "synthetic, in the roles of both CLIP models" if suite == "mini" else "CLIP models"
    name = model_name(role, suite) if role == REAL else kind
    caption = f"Average top-1 accuracy (%), {tables.SETTING_LABELS[main]} — {name}. {LEGEND}"
    html, _ = tables.accuracy_table(rows, {name: name for name in columns}, caption, average=False)
    return PageOutput(html + (against_printed(None, "table02", suite) if role != REAL else ""))


def by_tasks(suite: str) -> pd.DataFrame:
    """Return the gain of each method over its merger, and two standard errors of it."""
    main, found = studied_setting(suite), []
    for role, pool in (*((REAL, pool) for pool in POOLS), *PRINTED):
        ours = Evidence(suite, role, pool)
        for upstream, method in product(EXTENDED_MERGERS, tables.METHODS):
            merged = tables.average(ours, (upstream, "merged", ""))
            one = tables.average(ours, (upstream, method, main))
            if merged and one:
                found.append((role, int(pool), upstream, method, *lead(one, merged)))
    return pd.DataFrame(found, columns=["role", "tasks", "upstream", "method", "gain", "room"])


def gains_by_tasks(suite: str) -> PageOutput:
    """Draw gains by number of tasks, a panel per merger and model; bars: two standard errors."""
    what, rows = "averages to compare", by_tasks(suite)
    if rows.empty:
        return shown(None, what)
    with drawing():
        figure = Figure(figsize=(WIDTH, 6.2))
        sizes = {role: size for role, size in SIZES.items() if role in set(rows["role"])}
        shape = {"sharex": True, "sharey": "row", "squeeze": False}
        panels = figure.subplots(len(EXTENDED_MERGERS), len(sizes), **shape)
        places = product(EXTENDED_MERGERS, sizes.items())
        for axes, (upstream, (role, size)) in zip(panels.flat, places, strict=True):
            own = select(rows, {"role": role, "upstream": upstream})
            for method, dashes in DASHES.items():
                curve = select(own, {"method": method}).sort_values("tasks")
                look = CURVES[method] | {"linestyle": dashes, "lw": 2, "markersize": 7}
                bars = {"yerr": curve["room"], "capsize": 3}
                axes.errorbar(curve["tasks"], curve["gain"], **bars, **look)
            axes.axhline(0, color="#333333", lw=1)
            axes.set_title(f"{tables.UPSTREAMS[upstream]},\n{size}", fontsize=11)
            axes.set_xticks(list(map(int, POOLS)))
        for axes in panels[:, 0]:
            axes.set_ylabel("gain (points)")
        for axes in panels[-1]:
            axes.set_xlabel("tasks")
        handles = panels[0, 0].get_legend_handles_labels()
        figure.legend(*handles, loc="upper center", ncols=3, bbox_to_anchor=(0.5, 1.06))
        figure.tight_layout()
        return shown(figure, what)
