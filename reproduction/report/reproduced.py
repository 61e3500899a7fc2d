"""What pages of the suite `paper` say of every printed value: reproduced, or off by how much. Other suites say nothing."""

from collections.abc import Sequence
from html import escape

from reproduction.report import tables
from reproduction.report.compared import SUITE, Compared, average, budgets, cell_of, compared, damaged
from reproduction.report.errata import corrected_table, reason
from reproduction.report.evidence import Evidence
from reproduction.report.markup import fold, note, table
from reproduction.report.values import AVERAGE, EXTENDED, PRINTED, TEXT_PRINTED, paper_table, place_name, player, title_of

TOLERANCE = (
    "Allowed: half a unit of the last printed digit and two standard errors, of test images and of seeds (the paper’s own where "
    "it prints them). Both saw the same test images, so this is generous; where nothing is known of the draw’s part it is strict."
)

STUDIED = {"table06": damaged, "table12": budgets}


def against_printed(page: str, suite: str) -> str:
    """HTML for the page of an accuracy table, about each of its experiments; nothing in suites other than `paper`."""
    if suite != SUITE:
        return ""
    return "".join(shown(found, f"Table {int(page[-2:])}{words}") for words, found in _parts(page, suite))


def counted(page: str, suite: str) -> str:
    """One sentence for a page's head; nothing in suites other than `paper`, and where there is nothing to compare."""
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
            merger = tables.UPSTREAMS.get(upstream, "")
            row = tables.REFERENCES.get(method) or f"{merger} {tables.METHODS.get(method, '')}".strip()
            doubt = reason("table02", upstream, method, column)
            found.append(cell_of(row, column, value, float(cell["value"]), float(better), doubt=doubt))
    return found


def shown(found: Sequence[Compared], name: str) -> str:
    """A table of comparisons, rows and columns as they come, below the count."""
    if not found:
        return note(f"○ not run: nothing to hold against the paper’s {name}.")
    heads = list(dict.fromkeys(one.column for one in found))
    cells = {(one.row, one.column): _cell(one) for one in found}
    body = [("", [escape(row), *(cells.get((row, head), "–") for head in heads)]) for row in dict.fromkeys(o.row for o in found)]
    titles = ["Model", *("Average" if head == AVERAGE else escape(title_of(head) or head) for head in heads)]
    caption = f"Our value, the printed one, and the difference with what is allowed — {name}"
    return note(f"{_count(found)} {TOLERANCE}") + fold(f"Value by value, {name}", table(titles, body, caption, "fc-accuracy"))


def _count(found: Sequence[Compared]) -> str:
    """How many values are reproduced, as printed and where the print is wrong in corrected form, and the largest miss."""
    printed = sum(one.as_printed for one in found)
    mended = sum(one.corrected is not None and one.as_corrected and not one.as_printed for one in found)
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
