"""Matrices as formulas, for the page that works the method through by hand. On a narrow screen they
stand below each other.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from reproduction.report.html import PageOutput, link, table


def matrices(named: Mapping[str, ArrayLike], digits: int = 2) -> PageOutput:
    """Every matrix, vector (as a row) or number beside its name, which is LaTeX; rounded."""
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
    """Rounded twice, so that a tie goes the same way on every machine; no negative zero."""
    return np.round(np.round(values, 10), digits) + 0.0


def _formula(values: np.ndarray, digits: int) -> str:
    """LaTeX of an array, with as many decimals as its longest number needs, at most `digits`."""
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
    """A small table: a name and its numbers in every row."""
    lines = [
        ("", [name, *(f"{value:.3f}" for value in _rounded(np.asarray(row), 3))])
        for name, row in rows.items()
    ]
    return PageOutput(table(head, lines, caption))


def origin() -> PageOutput:
    """Where the page's numbers come from."""
    rows = [
        ("", ["Source of this page", link("../notebooks/method.ipynb", "notebooks/method.ipynb")]),
        (
            "",
            ["Numbers", "computed in this notebook; the toy is invented, and belongs to no suite"],
        ),
        ("", ["This page again", "<code>dvc repro page_method</code>"]),
    ]
    return PageOutput(table(["", ""], rows, "Provenance", "fc-words"))
