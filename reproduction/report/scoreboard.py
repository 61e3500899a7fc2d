"""Every claim with its verdict in one list, grouped as the paper is, ready to be filtered on the
page.

The filter itself is book/_static/filter.js; a row says of itself what its verdict is, and without
scripts all rows are shown.
"""

from reproduction.report.claims import claims
from reproduction.report.html import PageOutput
from reproduction.report.overview import place_link
from reproduction.report.page import label
from reproduction.report.verdict_table import counts, verdict_table
from reproduction.report.verdicts import sources


def tally(suite: str) -> PageOutput:
    """How many claims there are of each verdict."""
    lines = [f"<p><strong>{len(claims())} claims.</strong></p>"]
    for source in sources(suite):
        found = [verdict for verdict in source.judged(claims()) if verdict]
        lines.append(
            f"<p><strong>{source.title}, {len(found)} of them:</strong> {counts(found)}</p>"
        )
    return PageOutput(f'<div class="fc-card">{"".join(lines)}</div>')


def board(suite: str) -> PageOutput:
    """All claims in the order of claims.yaml: sentence and source, the paper's numbers, and what
    every source says.
    """
    return PageOutput(
        verdict_table(
            list(claims()),
            suite,
            f"All claims — {label(suite)}",
            "fc-claims fc-filtered",
            place_link,
        )
    )
