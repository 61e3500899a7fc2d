"""No number of ours is typed into prose: what was measured stands in outputs of code, never in text.

The rule: outside of code, formulas, links and quotations, a page's own text holds no decimal number, and no whole number with a
unit of measurement (a percentage, points, seconds, bytes). Exceptions are listed, each with what it is.
"""

import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TEXTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "book").glob("*.md")),
    *sorted((ROOT / "book/reference").glob("*.md")),
]
NOT_PROSE = re.compile(
    r"^```.*?^```|^---$.*?^---$|<!--.*?-->|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]+\$|“[^”]{0,200}”|\"[^\"]{0,200}\"|\]\([^)\n]*\)",
    re.DOTALL | re.MULTILINE,
)
MEASURED = re.compile(r"\d+\.\d+(?:\.\d+)*|\d+ ?(?:%|per ?cent\b|points?\b|seconds?\b|s\b|ms\b|minutes?\b|[KMG]i?B\b)")
ALLOWED = {
    "README.md": {
        "2605.13030": "the preprint",
        "3.11": "a version",
        "2.13.0": "a version",
        "0.28.0": "a version",
        "3 GB": "disk needed",
        "10 GB": "disk needed",
    },
    "CHANGELOG.md": {"0.1.0": "a version"},
    "references.md": {"2.0": "of a licence"},
}


def prose(path: Path) -> str:
    """The text of a page without what is not its own words."""
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        text = "\n\n".join(cell.source for cell in nbformat.reads(text, as_version=4).cells if cell.cell_type == "markdown")
    return NOT_PROSE.sub(" ", text)


@pytest.mark.parametrize("path", [*TEXTS, *NOTEBOOKS], ids=lambda path: path.name)
def test_prose_holds_no_number_that_could_be_measured(path):
    found = [number for number in MEASURED.findall(prose(path)) if number not in ALLOWED.get(path.name, {})]
    assert not found, f"{path.name}: print these from results, or list them with what they are"


@pytest.mark.parametrize("text", ["reaches 85.5 here", "60 % of the gap", "in 53 s", "about 12 points", "takes 900 MiB"])
def test_the_rule_sees_a_score(text):
    assert MEASURED.search(NOT_PROSE.sub(" ", text))


@pytest.mark.parametrize(
    "text", ["`--ridge 0.05`", "Table 12 and 3 seeds", "[a](b-0.5.md)", "$x^{0.5}$", "“85.5” is the paper's"]
)
def test_the_rule_leaves_code_and_counts_alone(text):
    assert not MEASURED.search(NOT_PROSE.sub(" ", text))
