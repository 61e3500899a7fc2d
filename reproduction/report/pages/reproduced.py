"""How the suite `paper`, which runs the paper's own checkpoints, compares with every printed value.

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
# Table 12 repeats this experiment of Table 1 under three seeds, so its printed deviation says how
# far one run of the paper's own may lie off.
REPEATED, REPEATED_SAMPLES = ("clip_b32", "8", "task_arithmetic"), 256
MODEL = ("upstream", "method", "setting")  # the columns that name a printed row


@dataclass(frozen=True)
class Compared:
    """One printed cell and our value for it, in percent."""

    row: str
    column: str
    ours: Estimate
    printed: float
    corrected: float | None = None  # what fits in place of a cell that cannot be right
    spread: float | None = None  # the paper's own deviation, over so many seeds
    seeds: int = 1
    doubt: str = ""  # why the printed cell may be wrong

    def reproduced(self, value: float) -> bool:
        """Return True if ours differs from `value` by no more than is allowed."""
        allowed = tolerance(self.ours, self.spread, self.seeds)
        return abs(self.ours.mean - value) <= allowed + 1e-9

    @property
    def as_printed(self) -> bool:
        return self.reproduced(self.printed)

    @property
    def as_corrected(self) -> bool:
        """Return True if reproduced in the corrected form, or as printed where there is none."""
        return self.reproduced(self.printed if self.corrected is None else self.corrected)


def against_printed(ours: Evidence | None, number: str, suite: str = "") -> str:
    """Return the comparison with a printed table as HTML; empty in suites other than `paper`."""
    if (ours.suite if ours else suite) != SUITE or not number:
        return ""
    return shown(list(compared(ours, number)), number)


def compared(ours: Evidence | None, number: str) -> Iterator[Compared]:
    """Yield every cell of a printed table for which there are results.

    ours: of one role and pool; None for Table 2, whose columns are averages of other experiments.
    """
    model = paper.PAPER_MODELS[ours.role] if ours else ""
    printed = paper.paper_table(number, model)
    fixed = paper.corrected_table(number, model)["value"]
    keys = dict.fromkeys(zip(*(printed[name] for name in MODEL), strict=True)) if ours else {}
    models = {key: tables.by_task(ours, _key(*key)) for key in keys}
    for (_, cell), better in zip(printed.iterrows(), fixed, strict=True):
        upstream, method, task = (str(cell[name]) for name in ("upstream", "method", "task"))
        name, spread = tables.row_name(upstream, method), None
        if ours is None:
            value = tables.average(Evidence(SUITE, *paper.EXTENDED[task]), _key(upstream, method))
        else:
            value = models[upstream, method, cell["setting"]].get(task)
            spread = _printed_spread(ours, upstream, method) if task == paper.AVERAGE else None
            name = f"{cell['setting'].capitalize()} expert" if cell["setting"] else name
        if value is not None:
            corrected = None if better == cell["value"] else float(better)
            doubt = paper.reason(number, upstream, method, task, model)
            yield Compared(name, task, value, float(cell["value"]), corrected, spread, 1, doubt)


def tolerance(ours: Estimate, spread: float | None = None, seeds: int = 1) -> float:
    """Return half a unit of the last printed digit plus two standard errors, in points.

    The variance is ours (test images and, of S seeds, s²/S) and the paper's: its σ²/seeds where it
    prints a deviation, else that of one run of ours, s².
    """
    theirs = spread if spread is not None else ours.spread or 0.0
    return ROUNDING + 2 * (ours.variance + theirs**2 / seeds) ** 0.5


def _key(upstream: str, method: str, expert: str = "") -> tables.Key:
    if method == "expert":
        return upstream, method, expert
    return tables.model_key(upstream, method, SETTING)


def _printed_spread(ours: Evidence, upstream: str, method: str) -> float | None:
    """Return the paper's deviation over seeds, for the one experiment that it repeats."""
    if (ours.role, ours.pool, upstream) != REPEATED:
        return None
    wanted = {"method": method, "samples_per_task": REPEATED_SAMPLES}
    own = select(paper.paper_table("table12"), wanted)
    return float(own["std"].iloc[0]) if len(own) else None


def shown(found: Sequence[Compared], number: str) -> str:
    """Return the count of reproduced cells, and one click away a table of all of them."""
    name = f"Table {int(number[-2:])}"
    if not found:
        return note(f"○ not run: nothing to compare with the paper’s {name}.")
    heads = list(dict.fromkeys(one.column for one in found))
    cells = {(one.row, one.column): _cell(one) for one in found}
    rows = dict.fromkeys(one.row for one in found)
    body = [[escape(row), *(cells.get((row, head), "–") for head in heads)] for row in rows]
    titles = ["Average" if h == paper.AVERAGE else escape(paper.title_of(h) or h) for h in heads]
    caption = (
        f"{name}: ours; printed, corrected: the paper’s value and the difference. ✓ within half a"
        " unit of the last printed digit and two standard errors of both."
    )
    html = table(["Model", *titles], body, caption, "fc-accuracy")
    printed = sum(one.as_printed for one in found)
    fixed = sum(one.as_corrected and not one.as_printed for one in found)
    said = f"{printed} of {len(found)} values reproduced as printed, {fixed} as corrected"
    return note(f"{name}: {said}") + fold(f"Value by value, {name}", html)


def _cell(one: Compared) -> str:
    """Return ✓ or ✗ with our value; below it what it is compared with."""
    lines = [f"<small>printed {one.printed:.1f}, {one.ours.mean - one.printed:+.1f}</small>"]
    if one.corrected is not None:
        lines.append(f"<small>corrected {one.corrected:.1f}</small>")
    elif one.doubt:
        lines.append(f'<small title="{escape(one.doubt)}">in doubt</small>')
    return f"{'✓' if one.as_corrected else '✗'}&nbsp;{one.ours.mean:.1f}{''.join(lines)}"
