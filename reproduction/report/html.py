"""HTML of the pages: tables, folds, chips; and the plain text a terminal shows instead.

Colours and sizes are in book/_static/featcal.css; every sign is readable without them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape, unescape
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from reproduction.report.statistics import Estimate, noise

STACKED = ("fc-claims", "fc-words")  # tables of words: a narrow screen shows a row as a card
SIGNS = {
    "holds": "✓",
    "does not hold": "✗",
    "within noise": "≈",
    "one run": "◇",
    "vacuous": "∅",
    "not run": "○",
}


class PageOutput:
    """The output of a notebook cell: one rich form, and a plain one for terminals."""

    def __init__(self, html: str = "", picture: dict[str, str] | None = None, text: str = ""):
        self.html, self.text = html, text or plain(html)
        self.bundle = picture or {"text/html": html}

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self.bundle | {"text/plain": self.text}

    def __add__(self, other: "PageOutput") -> "PageOutput":
        return PageOutput(self.html + other.html)


def plain(html: str) -> str:
    """Return the text of a piece of HTML: a line per row or block, two blanks between cells."""
    lines = re.sub(r"</(tr|p|li|summary|div)>", "\n", html)
    cells = re.sub(r"</t[dh]>|<small", r"  \g<0>", lines)
    words = unescape(re.sub(r"<[^>]+>", "", cells))
    return "\n".join(line.strip() for line in words.splitlines() if line.strip())


def table(
    head: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], caption: str, kind: str = ""
) -> str:
    """Return a scrolling table; a row is (class, cells) in HTML, its first cell a heading."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    names = [escape(plain(cell)) for cell in head[1:]] if kind.startswith(STACKED) else []
    body = "".join(
        f'<tr class="{name}"><th scope="row">{cells[0]}</th>{_cells(cells[1:], names)}</tr>'
        for name, cells in rows
    )
    # the caption stands outside the scrolling part: it stays in sight, and wraps to the page
    # instead of the table
    return (
        f'<div class="fc-box"><p class="fc-caption">{caption}</p>'
        f'<div class="fc-scroll" tabindex="0" role="region" aria-label="{escape(plain(caption))}"><table class="fc {kind}">'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div></div>"
    )


def _cells(cells: Sequence[str], names: Sequence[str]) -> str:
    """Return the cells of a row, each with its column's name where rows are stacked."""
    if any(names):
        return "".join(
            f'<td data-name="{name}">{cell}</td>' for name, cell in zip(names, cells, strict=True)
        )
    return "".join(cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in cells)


def fold(summary: str, body: str) -> str:
    """Return something one click away."""
    return f'<details class="fc-fold"><summary>{summary}</summary>{body}</details>'


def note(text: str, kind: str = "") -> str:
    """Return a short paragraph; text is HTML."""
    return f'<p class="fc-note {kind}">{text}</p>'


def chip(word: str, mark: str = "") -> str:
    """Return a verdict as a word with a sign and a colour, and a small word next to it."""
    small = f' <small class="fc-run">{mark}</small>' if mark else ""
    return f'<span class="fc-chip {word.replace(" ", "-")}">{SIGNS[word]} {word}</span>{small}'


def link(href: str, text: str) -> str:
    """Return a link, text as code."""
    return f'<a href="{escape(href)}"><code>{escape(text)}</code></a>'


def compact(value: float) -> str:
    """Return a setting as one reads it: 0.05, 256, and 10⁻⁶ for what would be 1e-06."""
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


def estimated(value: Estimate | None) -> str:
    """Return a mean with its spread over seeds, or a dash."""
    if value is None:
        return "–"
    spread = f" <small>sd {value.spread:.1f}</small>" if value.spread is not None else ""
    return f"{value.mean:.1f}{spread}"


def standing(left: Estimate, right: Estimate) -> str:
    """Return left minus right, and the word for it with two standard errors of room."""
    margin, room = left.mean - right.mean, noise(left, right)
    word = "above" if margin > room else "below" if margin < -room else "within 2 SE"
    return f"{margin:+.1f} <small>{word}</small>"


def margin(left: Estimate | None, right: Estimate | None) -> str:
    """Return the same where one of the two may not have been run."""
    return standing(left, right) if left and right else '<span class="fc-none">not run</span>'


def matrices(named: Mapping[str, ArrayLike], digits: int = 2) -> PageOutput:
    """Return every matrix, vector (as a row) or number as a formula; names are LaTeX."""
    formulas = [
        f"${name} = {_formula(np.asarray(values, dtype=float), digits)}$"
        for name, values in named.items()
    ]
    lines = [
        f"{name} = {_rounded(np.asarray(values, dtype=float), digits).tolist()}"
        for name, values in named.items()
    ]
    return PageOutput(picture={"text/markdown": " ".join(formulas)}, text="\n".join(lines))


def _rounded(values: np.ndarray, digits: int) -> np.ndarray:
    """Round twice, so that a tie goes the same way on every machine; no negative zero."""
    return np.round(np.round(values, 10), digits) + 0.0


def _formula(values: np.ndarray, digits: int) -> str:
    """Return LaTeX of an array with as many decimals as its longest number needs."""
    values = _rounded(values, digits)
    digits = next(
        fewer
        for fewer in range(digits + 1)
        if np.allclose(values, np.round(values, fewer), rtol=0, atol=1e-9)
    )
    shown = [[f"{value:.{digits}f}" for value in row] for row in np.atleast_2d(values)]
    if values.ndim == 0:
        return shown[0][0]
    body = r" \\ ".join(" & ".join(row) for row in shown)
    return rf"\begin{{bmatrix}} {body} \end{{bmatrix}}"


def numbers(head: Sequence[str], rows: Mapping[str, Sequence[float]], caption: str) -> PageOutput:
    """Return a small table: a name and its numbers in every row."""
    lines = [
        ("", [name, *(f"{value:.3f}" for value in _rounded(np.asarray(row), 3))])
        for name, row in rows.items()
    ]
    return PageOutput(table(head, lines, caption))
