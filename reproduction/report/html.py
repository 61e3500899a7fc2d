"""HTML of the pages: tables, folds, chips; and the plain text a terminal shows instead."""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape, unescape
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from reproduction.report.statistics import Estimate, lead

TableRow = list[str] | tuple[str, list[str]]  # cells; or how the row looks, and its cells
STACKED = ("fc-claims", "fc-words")  # tables of words: a narrow screen shows a row as a card
NOT_RUN = '<span class="fc-none">not run</span>'
SIGNS = {
    "holds": "✓", "does not hold": "✗", "within noise": "≈", "one run": "◇", "vacuous": "∅", "not run": "○",
}  # fmt: skip


class PageOutput:
    """The output of a notebook cell: one rich form, and a plain one for terminals."""

    def __init__(self, html: str = "", picture: dict[str, str] | None = None, text: str = ""):
        self.html, self.text = html, text or plain(html)
        self.bundle = picture or {"text/html": html}

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self.bundle | {"text/plain": self.text}


def plain(html: str) -> str:
    """Return the text of a piece of HTML: a line per row or block, two blanks between cells."""
    lines = re.sub(r"</(tr|p|li|summary|div)>", "\n", html)
    cells = re.sub(r"</t[dh]>|<small", r"  \g<0>", lines)
    text = unescape(re.sub(r"<[^>]+>", "", cells))
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def table(head: Sequence[str], rows: Iterable[TableRow], caption: str, kind: str = "") -> str:
    """Return a table in HTML that scrolls below its caption; a row begins with its heading."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    names = [escape(plain(cell)) for cell in head[1:]] if kind.startswith(STACKED) else []
    body = "".join(_row(row, names) for row in rows)
    return (
        f'<div class="fc-box"><p class="fc-caption">{caption}</p>'
        f'<div class="fc-scroll" tabindex="0" role="region" aria-label="{escape(plain(caption))}"><table class="fc {kind}">'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div></div>"
    )


def _row(row: TableRow, names: Sequence[str]) -> str:
    """Return a row; its cells have the names of their columns where rows are stacked."""
    look, (first, *cells) = row if isinstance(row, tuple) else ("", row)
    attributes = [f' data-name="{name}"' for name in names] if any(names) else [""] * len(cells)
    pairs = zip(attributes, cells, strict=True)
    tds = (cell if cell.startswith("<td") else f"<td{name}>{cell}</td>" for name, cell in pairs)
    return f'<tr class="{look}"><th scope="row">{first}</th>{"".join(tds)}</tr>'


def tabulate(
    head: Sequence[str], rows: Sequence[TableRow], caption: str, kind: str = "", missing: str = ""
) -> PageOutput:
    """Return a table of a page, or a note that names what was not run if there is no row."""
    if not rows:
        return PageOutput(note(f"○ not run: {missing}."))
    return PageOutput(table(head, rows, caption, kind))


def fold(summary: str, body: str) -> str:
    """Return a summary that opens its body on a click."""
    return f'<details class="fc-fold"><summary>{summary}</summary>{body}</details>'


def folded(html: str) -> PageOutput:
    """Return a table of the paper in a fold."""
    return PageOutput(fold("The paper’s own values", html))


def note(text: str) -> str:
    """Return a short paragraph; text is HTML."""
    return f'<p class="fc-note ">{text}</p>'


def chip(word: str, mark: str = "", short: bool = False) -> str:
    """Return a verdict as a sign and a word in its colour, and a small word next to it.

    short: the sign alone, which screen readers read as the word.
    """
    look, shown = f'class="fc-chip {word.replace(" ", "-")}"', f"{SIGNS[word]} {word}"
    if short:
        look, shown = f'{look} role="img" aria-label="{word}"', SIGNS[word]
    small = f' <small class="fc-run">{mark}</small>' if mark else ""
    return f"<span {look}>{shown}</span>{small}"


def link(href: str, text: str) -> str:
    """Return a link, text as code."""
    return f'<a href="{escape(href)}"><code>{escape(text)}</code></a>'


def compact(value: float) -> str:
    """Return a setting as people write it: 0.05, 256, and 10⁻⁶ in place of 1e-06."""
    mantissa, _, exponent = f"{value:g}".partition("e")
    if not exponent:
        return mantissa
    power = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if mantissa == "1" else f"{mantissa}·{power}"


def arrow(change: float) -> str:
    """Return a change with a sign that needs no colour: ↑4.2, ↓0.8, =."""
    shown = f"{abs(change):.1f}"
    if shown == "0.0":
        return '<span class="fc-same">=</span>'
    return f'<span class="{"fc-up" if change > 0 else "fc-down"}">{"↑" if change > 0 else "↓"}{shown}</span>'


def mean_cell(value: Estimate | None) -> str:
    return f"{value.mean:.1f}" if value else "–"


def estimate_cell(value: Estimate | None) -> str:
    """Return a mean with its spread over seeds, if they differ, or a dash."""
    spread = f" <small>sd {value.spread:.1f}</small>" if value and value.spread else ""
    return mean_cell(value) + spread


def margin(left: Estimate | None, right: Estimate | None) -> str:
    """Return left minus right, and the word for it with two standard errors of room."""
    if left is None or right is None:
        return NOT_RUN
    gap, room = lead(left, right)
    word = "above" if gap > room else "below" if gap < -room else "tie"
    return f"{gap:+z.1f} <small>{word}</small>"


def change(left: Estimate | None, right: Estimate | None) -> str:
    """Return left minus right ± two standard errors, or a dash."""
    if left is None or right is None:
        return "–"
    gap, room = lead(left, right)
    text = f"{gap:+z.1f} ± {room:.1f}"
    return "no change" if text == "+0.0 ± 0.0" else text


def matrices(by_name: Mapping[str, ArrayLike], digits: int = 2) -> PageOutput:
    """Return every matrix, vector (as a row) or number as a formula; names are LaTeX."""
    arrays = {name: _rounded(values, digits) for name, values in by_name.items()}
    formulas = [f"${name} = {_formula(values, digits)}$" for name, values in arrays.items()]
    lines = [f"{name} = {values.tolist()}" for name, values in arrays.items()]
    return PageOutput(picture={"text/markdown": " ".join(formulas)}, text="\n".join(lines))


def _rounded(values: ArrayLike, digits: int) -> np.ndarray:
    """Round twice, so that a tie goes the same way on every machine; no negative zero."""
    return np.round(np.round(np.asarray(values, dtype=float), 10), digits) + 0.0


def _formula(values: np.ndarray, digits: int) -> str:
    """Return LaTeX of an array with as many decimals as its longest number needs."""
    enough = (np.allclose(values, np.round(values, n), rtol=0, atol=1e-9) for n in range(digits))
    digits = next((n for n, fits in enumerate(enough) if fits), digits)
    shown = [[f"{value:.{digits}f}" for value in row] for row in np.atleast_2d(values)]
    if values.ndim == 0:
        return shown[0][0]
    body = r" \\ ".join(" & ".join(row) for row in shown)
    return rf"\begin{{bmatrix}} {body} \end{{bmatrix}}"


def value_table(head: Sequence[str], values: Mapping[str, ArrayLike], caption: str) -> PageOutput:
    """Return a small table with a name and its values in every row."""
    rows = [[name, *(f"{v:.3f}" for v in _rounded(row, 3))] for name, row in values.items()]
    return tabulate(head, rows, caption)
