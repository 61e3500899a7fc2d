"""Compare results of the suite `paper`, which runs the paper's checkpoints, with printed values.

Other suites have other models and data; they are compared by claim, never by value.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from reproduction.report import paper, tables
from reproduction.report.evidence import Evidence, select
from reproduction.report.html import fold, note, table
from reproduction.report.statistics import Estimate

SUITE, SETTING = "paper", "paper"
ROUNDING = 0.05  # half a unit of the last printed digit, in points
# Table 12 repeats this experiment of Table 1 with three seeds, so its printed deviation is the
# error of one run of the paper.
REPEATED, REPEATED_SAMPLES = ("clip_b32", "8", "task_arithmetic"), 256


@dataclass(frozen=True)
class Compared:
    """One printed cell and our value for it, in percent."""

    row: str
    column: str
    measured: Estimate
    printed: float
    corrected: float | None = None  # replaces a cell that cannot be right
    spread: float | None = None  # the paper's own deviation
    seeds: int = 1  # that the deviation is over
    doubt: str = ""  # why the printed cell may be wrong

    def reproduced(self, value: float) -> bool:
        """Return True if our value differs from `value` by at most the tolerance."""
        allowed = tolerance(self.measured, self.spread, self.seeds)
        return abs(self.measured.mean - value) <= allowed + 1e-9

    @property
    def as_printed(self) -> bool:
        return self.reproduced(self.printed)

    @property
    def as_corrected(self) -> bool:
        """Return True if the corrected value is reproduced, or else the printed one."""
        return self.reproduced(self.printed if self.corrected is None else self.corrected)


def against_printed(data: Evidence | None, number: str, suite: str = "") -> str:
    """Return the comparison with a printed table as HTML; empty in suites other than `paper`."""
    if (data.suite if data else suite) != SUITE or not number:
        return ""
    return comparison_html(list(compared(data, number)), number)


def compared(data: Evidence | None, number: str) -> Iterator[Compared]:
    """Yield every cell of a printed table for which there are results.

    data: of one role and pool; None for Table 2, whose columns are averages of other experiments.
    """
    model = paper.PAPER_MODELS[data.role] if data else ""
    printed = paper.paper_table(number, model)
    fixed = paper.corrected_table(number, model)["value"]
    keys = zip(*(printed[name] for name in tables.COLUMNS), strict=True) if data else ()
    models = {key: tables.by_task(data, _key(*key)) for key in dict.fromkeys(keys)}
    for (_, cell), corrected_value in zip(printed.iterrows(), fixed, strict=True):
        upstream, method, task = (str(cell[name]) for name in ("upstream", "method", "task"))
        name, spread = tables.row_name(upstream, method), None
        if data is None:
            value = tables.average(Evidence(SUITE, *paper.EXTENDED[task]), _key(upstream, method))
        else:
            value = models[upstream, method, cell["setting"]].get(task)
            spread = _printed_spread(data, upstream, method) if task == paper.AVERAGE else None
            name = f"{cell['setting'].capitalize()} expert" if cell["setting"] else name
        if value is not None:
            corrected = None if corrected_value == cell["value"] else float(corrected_value)
            doubt = paper.reason(number, upstream, method, task, model)
            yield Compared(name, task, value, float(cell["value"]), corrected, spread, 1, doubt)


def tolerance(measured: Estimate, spread: float | None = None, seeds: int = 1) -> float:
    """Return half a unit of the last printed digit plus two standard errors, in points.

    The variance adds ours (test images and, of S seeds, s²/S) and the paper's: its σ²/seeds if it
    prints a deviation, else that of one run of ours, s².
    """
    paper_spread = spread if spread is not None else measured.spread or 0.0
    return ROUNDING + 2 * (measured.variance + paper_spread**2 / seeds) ** 0.5


def _key(upstream: str, method: str, expert: str = "") -> tables.Key:
    if method == "expert":
        return upstream, method, expert
    return tables.model_key(upstream, method, SETTING)


def _printed_spread(data: Evidence, upstream: str, method: str) -> float | None:
    """Return the paper's deviation over seeds, for the one experiment that it repeats."""
    if (data.role, data.pool, upstream) != REPEATED:
        return None
    columns = {"method": method, "samples_per_task": REPEATED_SAMPLES}
    printed = select(paper.paper_table("table12"), columns)
    return float(printed["std"].iloc[0]) if len(printed) else None


def comparison_html(cells: Sequence[Compared], number: str) -> str:
    """Return the count of reproduced cells, and a folded table of all of them."""
    name = paper.table_name(number)
    if not cells:
        return note(f"○ not run: nothing to compare with the paper’s {name}.")
    heads = list(dict.fromkeys(cell.column for cell in cells))
    texts = {(cell.row, cell.column): _cell(cell) for cell in cells}
    rows = dict.fromkeys(cell.row for cell in cells)
    body = [[escape(row), *(texts.get((row, head), "–") for head in heads)] for row in rows]
    titles = ["Average" if h == paper.AVERAGE else escape(paper.title_of(h) or h) for h in heads]
    caption = (
        f"{name}: ours; printed, corrected: the paper’s value and the difference. ✓ within half a"
        " unit of the last printed digit and two standard errors of both."
    )
    html = table(["Model", *titles], body, caption, "fc-accuracy")
    printed = sum(cell.as_printed for cell in cells)
    corrected = sum(cell.as_corrected and not cell.as_printed for cell in cells)
    counts = f"{printed} of {len(cells)} values reproduced as printed, {corrected} as corrected"
    return note(f"{name}: {counts}") + fold(f"Value by value, {name}", html)


def _cell(cell: Compared) -> str:
    """Return ✓ or ✗ with our value, and the printed and corrected values below it."""
    lines = [f"<small>printed {cell.printed:.1f}, {cell.measured.mean - cell.printed:+.1f}</small>"]
    if cell.corrected is not None:
        lines.append(f"<small>corrected {cell.corrected:.1f}</small>")
    elif cell.doubt:
        lines.append(f'<small title="{escape(cell.doubt)}">in doubt</small>')
    return f"{'✓' if cell.as_corrected else '✗'}&nbsp;{cell.measured.mean:.1f}{''.join(lines)}"
