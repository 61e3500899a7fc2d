"""Every claim with its verdict in one list, grouped as the paper is, ready to be filtered on the page.

The filter itself is book/_static/filter.js; a row says of itself what its verdict is, and without scripts all rows are shown.
"""

from html import escape

from reproduction.report.claims import claims, main_setting
from reproduction.report.markup import PageOutput, table
from reproduction.report.overview import place_link
from reproduction.report.printed import paper_says
from reproduction.report.show import commands, label
from reproduction.report.verdict_table import counts, measured, verdict_chip
from reproduction.report.verdicts import judged


def tally(suite: str) -> PageOutput:
    """How many claims there are of each verdict."""
    found = judged(claims(), suite, main_setting(suite))
    return PageOutput(
        f'<div class="fc-card"><p><strong>{len(found)} claims, {label(suite)}.</strong></p><p>{counts(found)}</p></div>'
    )


def board(suite: str) -> PageOutput:
    """All claims in the order of claims.yaml: sentence and source, verdict, the paper's numbers, what was measured here."""
    rows = []
    for verdict in judged(claims(), suite, main_setting(suite)):
        claim = verdict.claim
        words = f"{escape(claim.sentence)}<small>{place_link(claim.place)} · {escape(claim.source)}</small>"
        cells = [words, verdict_chip(verdict), escape(paper_says(claim)) or "–", measured(verdict)]
        rows.append((f"fc-is-{verdict.word.replace(' ', '-')}", cells))
    head = ["Claim", "Verdict", "The paper’s numbers", "Measured here"]
    return PageOutput(table(head, rows, f"All claims — {label(suite)}", "fc-claims fc-filtered"))


def provenance(suite: str) -> PageOutput:
    """What makes this page; the files behind a claim stand on its own page."""
    return PageOutput(table(["", ""], commands("scoreboard"), f"Provenance — {label(suite)}", "fc-words"))
