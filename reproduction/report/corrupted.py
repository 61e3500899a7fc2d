"""Table 6 and Figure 4: what damaged calibration images cost each method, scored on clean test
images.
"""

import io
from collections.abc import Iterator
from html import escape

from matplotlib.figure import Figure

from reproduction.report.claims import main_setting
from reproduction.report.damage import KINDS, UPSTREAM, found, kinds
from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import CURVES, INK, WIDTH, drawing, one_panel
from reproduction.report.html import PageOutput, fold, note, table
from reproduction.report.page import Page
from reproduction.report.paper import AVERAGE, paper_table
from reproduction.report.statistics import Estimate, estimate
from reproduction.report.studies import samples
from reproduction.report.tables import (
    METHODS,
    SETTING_LABELS,
    UPSTREAMS,
    Cell,
    Row,
    accuracy_table,
    number,
    settings_shown,
    with_best,
)


def averages(page: Page) -> PageOutput:
    """The table in the paper's order: every number with its change against the same method from
    clean images.
    """
    ours = page.evidence
    if ours.table("corrupted").empty:
        return PageOutput(
            note(
                f"○ not run: no damaged calibration {page.inputs} in the results of the {page.label}."
            )
        )
    values = {
        m: {k: found(ours, m, k) for k in (*kinds(ours), AVERAGE)} for m in ("merged", *METHODS)
    }
    cells = {m: {k: Cell(e.mean) for k, e in row.items() if e} for m, row in values.items()}
    caption = f"Average top-1 accuracy (%) on clean test {page.inputs}, by what calibrates — {page.label}. Arrows: against clean."
    return PageOutput(_table(cells, caption, kinds(ours)) + page.against_printed()) + numbers(page)


def numbers(page: Page) -> PageOutput:
    """In words, from how many inputs the damaged and the clean models were made, where those are
    not as many; else nothing.
    """
    clean, damaged = samples(page), samples(page, "corrupted")
    if None in (clean, damaged) or clean == damaged:
        return PageOutput()
    told = f"Damaged: {damaged} {page.inputs} of each task; clean: {clean}. What lies between the two is not damage alone: "
    return PageOutput(
        note(f"{told}a method that needs many {page.inputs} loses by having fewer, too.")
    )


def paper(suite: str) -> PageOutput:
    """The paper's Table 6, folded away."""
    printed = paper_table("table06").set_index("method")
    cells = {
        method: {
            k: Cell(float(printed[k][name])) for k in (*KINDS, AVERAGE) if str(printed[k][name])
        }
        for method, name in {"merged": UPSTREAM, **{m: m for m in METHODS}}.items()
    }
    caption = "The paper’s Table 6, as printed: real CLIP models on real data"
    return PageOutput(fold("The paper’s own values", _table(cells, caption, KINDS)))


def _table(cells: dict[str, dict[str, Cell]], caption: str, titles: dict[str, str]) -> str:
    """Rows of one merger and three methods with changes against clean images, best of every column
    in bold.
    """
    rows = []
    for method, name in {"merged": UPSTREAMS[UPSTREAM], **METHODS}.items():
        own = {
            kind: cell
            for kind, cell in cells[method].items()
            if (method, kind) != ("merged", AVERAGE)
        }
        changed = set(own) - {"clean", AVERAGE} if "clean" in own else ()
        own |= {
            kind: Cell(own[kind].value, change=own[kind].value - own["clean"].value)
            for kind in changed
        }
        rows.append(Row(name, "merger" if method == "merged" else "calibrated", UPSTREAM, own))
    heads = [*titles.values(), "Average"]
    return accuracy_table(with_best(rows), [*titles, AVERAGE], heads, caption, average=False)[0]


def firmer(page: Page) -> PageOutput:
    """FeatCal at the suite's and at the paper's settings, with what each kind of damage costs
    it.
    """
    ours, rows = page.evidence, []
    for setting in settings_shown(page.suite):
        clean = found(ours, "featcal", "clean", setting)
        means = {kind: found(ours, "featcal", kind, setting) for kind in kinds(ours)}
        cells = [_lost(mean, clean) for mean in means.values()]
        rows.append(("", [f"FeatCal, {SETTING_LABELS[setting]}", *cells]))
    caption = f"FeatCal by settings, average top-1 accuracy (%); arrows: against clean {page.inputs} — {page.label}"
    return PageOutput(table(["", *kinds(ours).values()], rows, caption, "fc-accuracy"))


def _lost(mean: Estimate | None, clean: Estimate | None) -> str:
    if mean is None:
        return '<span class="fc-none">not run</span>'
    change = mean.mean - clean.mean if clean and mean != clean else None
    return number(Cell(mean.mean, change=change), [])


def tasks(page: Page) -> PageOutput:
    """Every task's accuracy, one click away."""
    ours, rows = page.evidence, []
    for method, name in METHODS.items():
        for kind, title in kinds(ours).items():
            own = select(
                ours.table("corrupted"),
                {"method": method, "corruption": kind, "setting": main_setting(page.suite)},
            )
            means = {task: estimate(select(own, {"task": task})) for task in ours.tasks} | {
                AVERAGE: estimate(own)
            }
            rows.append(
                Row(
                    f"{name}: {title}",
                    "calibrated",
                    UPSTREAM,
                    {t: Cell(e.mean) for t, e in means.items() if e},
                )
            )
    caption = f"Top-1 accuracy (%) on clean test {page.inputs} — {page.label}"
    return PageOutput(
        fold(
            "Every task",
            accuracy_table(rows, ours.tasks, [ours.title(t) for t in ours.tasks], caption)[0],
        )
    )


def strengths(page: Page) -> PageOutput:
    """How strong each corruption is on the suite's images."""
    told = page.evidence.settings("corrupted").get("strengths", {})
    if not told:
        return PageOutput(note("○ not run: no settings file yet."))
    rows = [
        ("", [kinds(page.evidence).get(kind, kind), escape(words)]) for kind, words in told.items()
    ]
    return PageOutput(
        table(
            ["Corruption", "Strength"],
            rows,
            f"Damage done to calibration images — {page.label}",
            "fc-words",
        )
    )


def cost(page: Page) -> PageOutput:
    """Dots of the average accuracy by method, one line per kind of calibration images."""
    return page.drawn(_cost(page.evidence), f"accuracies from damaged {page.inputs}")


def _cost(ours: Evidence) -> Figure | None:
    merged = found(ours, "merged", "clean")
    if merged is None:
        return None
    with one_panel(3.4) as (figure, axes):
        for method in METHODS:
            there = [
                (row, e.mean)
                for row, kind in enumerate(kinds(ours))
                if (e := found(ours, method, kind))
            ]
            look = CURVES[method] | {"edgecolor": "white", "lw": 0.8, "s": 130, "zorder": 3}
            axes.scatter([mean for _, mean in there], [row for row, _ in there], **look)
        axes.axvline(merged.mean, color=INK, ls="--", lw=1.4, label="merger alone")
        axes.set_yticks(range(len(kinds(ours))), list(kinds(ours).values()))
        axes.invert_yaxis()
        axes.margins(y=0.2)
        axes.set(xlabel="average top-1 accuracy (%), clean test inputs")
        axes.legend(
            loc="lower center",
            bbox_to_anchor=(0.4, 1.0),
            ncols=2,
            handletextpad=0.4,
            columnspacing=1.2,
        )
        return figure


def examples(page: Page) -> PageOutput:
    """Calibration images clean and under each corruption, every pixel as a square."""
    return page.drawn(_examples(page.evidence), "example images")


def _examples(ours: Evidence) -> Figure | None:
    shown = ours.table("corrupted.examples")
    if shown.empty:
        return None
    rows, columns = int(shown["row"].max()) + 1, int(shown["column"].max()) + 1
    with drawing():
        figure = Figure(figsize=(WIDTH, WIDTH * rows / columns))
        grid = figure.subplots(
            rows, columns, squeeze=False, gridspec_kw={"wspace": 0.04, "hspace": 0.04}
        )
        for place, picture in zip(shown.itertuples(), _cut(ours, rows, columns), strict=True):
            axes = grid[place.row][place.column]
            axes.imshow(picture, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.grid(visible=False)
            if place.row == 0:
                axes.set_title(
                    KINDS[place.corruption].replace("Gaussian noise", "Gaussian"), fontsize=13
                )
            if place.column == 0:
                axes.set_ylabel(ours.title(place.task))
        return figure


def _cut(ours: Evidence, rows: int, columns: int) -> Iterator[object]:
    """The pictures of the sheet, row by row."""
    from PIL import Image

    data = ours.path("corrupted.examples").with_suffix(".png").read_bytes()
    sheet = Image.open(io.BytesIO(data)).convert("RGB")
    wide, high = sheet.width // columns, sheet.height // rows
    for row in range(rows):
        for column in range(columns):
            yield sheet.crop((wide * column, high * row, wide * (column + 1), high * (row + 1)))
