"""What pages of the suite `paper` say of every printed value: reproduced, or off by how much, and
by how much it may be.

Other suites have other models and data and are held against the paper by claim (verdicts.py), never
by value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import pandas as pd

from reproduction.report import tables
from reproduction.report.damage import KINDS, UPSTREAM, found
from reproduction.report.evidence import Evidence, select
from reproduction.report.html import fold, note, table
from reproduction.report.paper import (
    AVERAGE,
    EXTENDED,
    PAPER_MODELS,
    PRINTED,
    TEXT_PRINTED,
    corrected_table,
    paper_table,
    place_name,
    player,
    reason,
    title_of,
)
from reproduction.report.statistics import Estimate, estimate

TOLERANCE = (
    "Allowed: half a unit of the last printed digit and two standard errors, of test images and of seeds (the paper’s own where "
    "it prints them). Both saw the same test images, so this is generous; where nothing is known of the draw’s part it is strict."
)

SUITE, SETTING = "paper", "paper"
ROUNDING = 0.05  # half a unit of the last printed digit, in points
# Table 12 repeats this experiment of Table 1 under three seeds: how far one run of the paper's own
# may lie off.
REPEATED, REPEATED_SAMPLES = ("clip_b32", "8", "task_arithmetic"), 256
_MODEL = ("upstream", "method", "setting")  # the columns of a printed row


@dataclass(frozen=True)
class Compared:
    """One printed cell and our value for it, in percent.

    printed: as it stands there.   corrected: what fits in its place, None where the printed one
    stands.
    allowed: the largest difference that counts as reproduced.   doubt: why the printed cell may be
    wrong; empty where it may not.
    """

    row: str
    column: str
    ours: float
    printed: float
    allowed: float
    corrected: float | None = None
    doubt: str = ""

    def reproduced(self, value: float) -> bool:
        """Whether ours differs from `value` by no more than is allowed."""
        return abs(self.ours - value) <= self.allowed + 1e-9

    @property
    def as_printed(self) -> bool:
        return self.reproduced(self.printed)

    @property
    def as_corrected(self) -> bool:
        """Reproduced in the corrected form where there is one, else as printed."""
        return self.reproduced(self.printed if self.corrected is None else self.corrected)


def compared(ours: Evidence, number: str) -> list[Compared]:
    """Every cell of a printed table about one role and pool for which there are results, row by
    row.
    """
    model = PAPER_MODELS[ours.role]
    printed, mended = paper_table(number, model), corrected_table(number, model)["value"]
    models = {
        key: measured(ours, *key)
        for key in dict.fromkeys(zip(*(printed[name] for name in _MODEL), strict=True))
    }
    cells = []
    for (_, cell), better in zip(printed.iterrows(), mended, strict=True):
        upstream, method, task = (str(cell[name]) for name in ("upstream", "method", "task"))
        value = models[upstream, method, cell["setting"]].get(task)
        if value is not None:
            spread = _printed_spread(ours, upstream, method) if task == AVERAGE else None
            doubt = reason(number, upstream, method, task, model)
            name = (
                f"{cell['setting'].capitalize()} expert"
                if cell["setting"]
                else tables.row_name(upstream, method)
            )
            cells.append(
                cell_of(name, task, value, float(cell["value"]), float(better), spread, doubt)
            )
    return cells


def cell_of(
    row: str,
    column: str,
    ours: Estimate,
    printed: float,
    better: float,
    spread: float | None = None,
    doubt: str = "",
) -> Compared:
    """One comparison.   better: the corrected value.   spread: standard deviation of the paper's
    value where it prints one.
    """
    allowed = tolerance(ours, spread)
    return Compared(
        row, column, ours.mean, printed, allowed, None if better == printed else better, doubt
    )


def tolerance(ours: Estimate, spread: float | None = None, seeds: int = 1) -> float:
    """Half a unit of the last printed digit plus two standard errors, in points.

    The variance is ours (test images and, of S seeds, s²/S) and that of the paper's value: its own
    σ²/seeds where it prints a deviation, else one run of ours, s². Where neither is known, a draw
    adds nothing: the tolerance is then too small rather than too large. The part of the test images
    makes it generous: both see the same ones.
    """
    theirs = spread if spread is not None else ours.spread or 0.0
    return ROUNDING + 2 * (ours.variance + theirs**2 / seeds) ** 0.5


def measured(
    ours: Evidence, upstream: str, method: str, expert: str = ""
) -> Mapping[str, Estimate]:
    """Our estimates of one model by task, and on average.   expert: the domain of an expert that
    has rows of its own.
    """
    if method == "expert" and not expert and ours.pool == "mergebench":
        return _highest(ours.table("scores"))
    return tables.by_task(ours, _key(upstream, method, expert))


def average(ours: Evidence, upstream: str, method: str) -> Estimate | None:
    """Our estimate of one model's average."""
    return tables.average(ours, _key(upstream, method))


def _key(upstream: str, method: str, expert: str = "") -> tables.Key:
    return (
        (upstream, method, expert)
        if method == "expert"
        else tables.model_key(upstream, method, SETTING)
    )


def _highest(scores: pd.DataFrame) -> dict[str, Estimate]:
    """What the paper calls Fine-tuned of its Llamas: of every test the highest of base and experts,
    and the mean of those.
    """
    models = scores[scores["method"].isin(("base", "expert"))]
    found = {}
    for task, rows in models.groupby("task", sort=False):
        values = [estimate(own) for _, own in rows.groupby(["method", "setting"])]
        found[str(task)] = max((value for value in values if value), key=lambda value: value.mean)
    if found:
        mean = sum(value.mean for value in found.values()) / len(found)
        found[AVERAGE] = Estimate(
            mean, None, 0, told=sum(value.variance for value in found.values()) / len(found) ** 2
        )
    return found


def budgets(ours: Evidence) -> list[Compared]:
    """Table 12: averages over three seeds by images per task, whose deviations the paper prints."""
    cells = []
    for _, cell in paper_table("table12").iterrows():
        key = {
            "upstream": "task_arithmetic",
            "method": cell["method"],
            "setting": SETTING,
            "samples": cell["samples_per_task"],
        }
        value = estimate(select(ours.table("samples"), key))
        if value is not None:
            allowed = tolerance(value, float(cell["std"]), seeds=3)
            row, column = tables.METHODS[cell["method"]], f"n = {cell['samples_per_task']}"
            cells.append(Compared(row, column, value.mean, float(cell["mean"]), allowed))
    return cells


def damaged(ours: Evidence) -> list[Compared]:
    """Table 6: averages by what is done to the calibration images, and the mean of a row."""
    cells = []
    for _, printed in paper_table("table06").iterrows():
        method = "merged" if printed["method"] == UPSTREAM else str(printed["method"])
        for column in (*KINDS, AVERAGE):
            value = found(ours, method, column)
            if value is not None and str(printed[column]):
                name = (tables.METHODS | {"merged": tables.UPSTREAMS[UPSTREAM]})[method]
                head = KINDS.get(column, column)
                cells.append(
                    Compared(name, head, value.mean, float(printed[column]), tolerance(value))
                )
    return cells


def _printed_spread(ours: Evidence, upstream: str, method: str) -> float | None:
    """Deviation over the paper's own seeds of an average, of the one experiment that it repeats."""
    if (ours.role, ours.pool, upstream) != REPEATED:
        return None
    frame = select(paper_table("table12"), {"method": method})
    own = frame[frame["samples_per_task"] == REPEATED_SAMPLES] if len(frame) else frame
    return float(own["std"].iloc[0]) if len(own) else None


STUDIED = {"table06": damaged, "table12": budgets}


def against_printed(page: str, suite: str) -> str:
    """HTML for the page of an accuracy table, about each of its experiments; nothing in suites
    other than `paper`.
    """
    if suite != SUITE:
        return ""
    return "".join(
        shown(found, f"Table {int(page[-2:])}{words}") for words, found in _parts(page, suite)
    )


def counted(page: str, suite: str) -> str:
    """One sentence for a page's head; nothing in suites other than `paper`, and where there is
    nothing to compare.
    """
    found = [one for _, part in _parts(page, suite) for one in part] if suite == SUITE else []
    return f"<p>{_count(found)}</p>" if found else ""


def elsewhere(suite: str) -> str:
    """The heading of the paper's own numbers beside ours."""
    return "In the paper" if suite == SUITE else "In the paper (other models and data)"


def _parts(page: str, suite: str) -> list[tuple[str, list[Compared]]]:
    """What a page compares: words for its heading, and the cells."""
    if page == "table02":
        return [("", columns(suite))]
    if page in STUDIED:
        return [("", STUDIED[page](Evidence(suite, "clip_b32", "8")))]
    listed = PRINTED | TEXT_PRINTED
    number = "table04" if page == "table14" else page  # which has the same models
    found = []
    for role, pool in (place for place, known in listed.items() if known == number):
        name = place_name(role, pool) if pool.isdigit() else player(role, suite)
        found.append((f", {name}", compared(Evidence(suite, role, pool), page)))
    return found


def columns(suite: str) -> list[Compared]:
    """Table 2, whose columns are averages of other experiments."""
    found = []
    mended = corrected_table("table02")["value"]
    places = {column: Evidence(suite, *place) for column, place in EXTENDED.items()}
    for (_, cell), better in zip(paper_table("table02").iterrows(), mended, strict=True):
        upstream, method, column = cell["upstream"], cell["method"], cell["task"]
        value = average(places[column], upstream, method)
        if value is not None:
            row, doubt = (
                tables.row_name(upstream, method),
                reason("table02", upstream, method, column),
            )
            found.append(
                cell_of(row, column, value, float(cell["value"]), float(better), doubt=doubt)
            )
    return found


def shown(found: Sequence[Compared], name: str) -> str:
    """A table of comparisons, rows and columns as they come, below the count."""
    if not found:
        return note(f"○ not run: nothing to hold against the paper’s {name}.")
    heads = list(dict.fromkeys(one.column for one in found))
    cells = {(one.row, one.column): _cell(one) for one in found}
    body = [
        ("", [escape(row), *(cells.get((row, head), "–") for head in heads)])
        for row in dict.fromkeys(o.row for o in found)
    ]
    titles = [
        "Model",
        *("Average" if head == AVERAGE else escape(title_of(head) or head) for head in heads),
    ]
    caption = f"Our value, the printed one, and the difference with what is allowed — {name}"
    return note(f"{_count(found)} {TOLERANCE}") + fold(
        f"Value by value, {name}", table(titles, body, caption, "fc-accuracy")
    )


def _count(found: Sequence[Compared]) -> str:
    """How many values are reproduced, as printed and where the print is wrong in corrected form,
    and the largest miss.
    """
    printed = sum(one.as_printed for one in found)
    mended = sum(
        one.corrected is not None and one.as_corrected and not one.as_printed for one in found
    )
    text = f"Against the paper’s own values: {printed} of {len(found)} reproduced as printed"
    if mended:
        text += f", {mended} more in the corrected form of a doubtful cell"
    missed = [one for one in found if not one.as_printed and not one.as_corrected]
    if not missed:
        return f"{text}."
    worst = max(missed, key=lambda one: abs(_difference(one)) - one.allowed)
    where = f"{worst.row}, {'average' if worst.column == AVERAGE else title_of(worst.column) or worst.column}"
    return f"{text}; furthest off: {escape(where)}, {_difference(worst):+.1f} where {worst.allowed:.1f} is allowed."


def _difference(one: Compared) -> float:
    """Ours minus the paper's, in its corrected form where it has one."""
    return one.ours - (one.printed if one.corrected is None else one.corrected)


def _cell(one: Compared) -> str:
    """✓ or ✗ with our value; below it what it is compared with."""
    lines = [_against(one, one.printed, "printed")]
    if one.corrected is not None:
        lines.append(_against(one, one.corrected, "corrected"))
    elif one.doubt:
        lines.append(f'<small title="{escape(one.doubt)}">in doubt</small>')
    return f"{'✓' if one.as_corrected else '✗'}&nbsp;{one.ours:.1f}" + "".join(lines)


def _against(one: Compared, value: float, word: str) -> str:
    said = "reproduced" if one.reproduced(value) else f"differs by {one.ours - value:+.1f}"
    return f"<small>{word} {value:.1f}: {said}, allowed&nbsp;{one.allowed:.1f}</small>"
