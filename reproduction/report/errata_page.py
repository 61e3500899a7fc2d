"""The page of known differences and errata: cells of the paper in doubt with reason and evidence, and how suites differ.

The evidence is computed in printed_errors.py; the lists stand in errata.yaml, passages.yaml and differences.yaml.
"""

from collections import Counter
from html import escape

from reproduction.report import pages
from reproduction.report.errata import Erratum, errata, passages
from reproduction.report.markup import PageOutput, fold, table
from reproduction.report.overview import place_link
from reproduction.report.printed_errors import column_title, evidence_of, printed_row, row_name

MEANING = {
    "average": "the printed mean is not the mean of its row",
    "rotated": "values stand under the wrong tasks",
    "reference": "a published checkpoint, or another table of the paper, has another value",
    "foreign": "the row looks like another method’s",
    "unattainable": "no number of right answers gives the value",
    "contradiction": "two places of the paper disagree",
    "change": "the printed change against the merger is not the difference of the two printed values",
}


def kinds(suite: str) -> PageOutput:
    """What is meant by each kind of doubt, and how many rows of the paper are in it."""
    count = Counter(entry.kind for entry in errata())
    rows = [("", [escape(kind), escape(meaning), str(count[kind])]) for kind, meaning in MEANING.items() if count[kind]]
    rows.append(("fc-total", ["all", "", str(sum(count.values()))]))
    return PageOutput(table(["Kind", "What it means", "Rows"], rows, "Kinds of doubt — the paper’s tables", "fc-words"))


def cells(suite: str) -> PageOutput:
    """Every row of the paper with cells in doubt: as printed, what would fit, why, and what the tables themselves say."""
    rows = []
    for entry in sorted(errata(), key=lambda e: e.table):
        place = f"{place_link(entry.table)}<small>{escape(_row_of(entry))}</small>"
        evidence = "".join(f"<small>{escape(words)}</small>" for words in evidence_of(entry))
        rows.append(("", [place, entry.kind, _values(entry), escape(entry.reason) + evidence]))
    head = ["Row", "Kind", "Cells: printed, what would fit", "Why, and what the tables say"]
    return PageOutput(table(head, rows, "Cells that cannot be right — the paper’s tables", "fc-words"))


def contradicted(suite: str) -> PageOutput:
    """Every sentence or formula of the paper that another place of it, or a fact, contradicts."""
    rows = [("", [escape(entry.where), escape(entry.says), escape(entry.but)]) for entry in passages()]
    caption = "Sentences and formulas that cannot be right — the paper’s text"
    return PageOutput(table(["Where", "What it says", "What contradicts it"], rows, caption, "fc-words"))


def _row_of(entry: Erratum) -> str:
    return " · ".join(part for part in (row_name(*entry.row), entry.model) if part)


def _values(entry: Erratum) -> str:
    """The cells one per line: printed, and behind an arrow what fits where that can be told."""
    row = printed_row(entry)
    lines = []
    for cell in entry.cells:
        fits = f" → {_shown(entry.corrected[cell])}" if cell in entry.corrected else ""
        printed = " and ".join(_shown(float(value)) for value in row[row.index == cell])  # two where a table has two models
        lines.append(f'<span class="fc-whole">{escape(column_title(cell))} {printed}{fits}</span>')
    return "<br>".join(lines)


def _shown(value: float) -> str:
    """As the paper prints values, with the second decimal where there is one."""
    return f"{value:.1f}" if round(value, 1) == value else f"{value:g}"


def differences(suite: str) -> PageOutput:
    """What differs from the paper in this suite, of image models and of language models; the real encoder's first."""
    return pages.differences("real") + _differences(suite)


def _differences(suite: str) -> PageOutput:
    listed = {"differences": "Known differences, image models", "language": "Known differences, language models"}
    told = [name for name in listed if name in pages.suites().get(suite, {})]
    return PageOutput("".join(pages.differences(suite, about, listed[about]).html for about in told))


def other_suites(suite: str) -> PageOutput:
    """The same of every other suite, folded away."""
    others = [name for name in pages.suites() if name not in (suite, "real", "smoke")]
    return PageOutput("".join(fold(f"The {pages.label(name)}", _differences(name).html) for name in others))


def provenance(suite: str) -> PageOutput:
    """Where the lists stand, and what makes this page."""
    names = ("differences", "errata", "passages")
    lists = ", ".join(f"<code>reproduction/report/{name}.yaml</code>" for name in names)
    rows = [("", ["Lists", lists]), ("", ["The paper’s values", "<code>reproduction/report/paper/</code>"])]
    return PageOutput(table(["", ""], rows + pages.commands("differences"), f"Provenance — {pages.label(suite)}", "fc-words"))
