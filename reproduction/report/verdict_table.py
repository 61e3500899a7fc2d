"""Verdicts as they stand on pages: chips, how many there are of each, and claims in a table with
what was measured.
"""

import math
from collections.abc import Callable
from html import escape

from reproduction.report import tables
from reproduction.report.claims import DIGITS, Claim
from reproduction.report.html import chip, fold, table
from reproduction.report.printed import in_doubt, paper_says
from reproduction.report.verdicts import WORDS, Verdict, sources


def counts(found: list[Verdict]) -> str:
    """Chips with how many verdicts there are of each kind."""
    number = {word: sum(v.word == word for v in found) for word in WORDS}
    return " ".join(
        f'<span class="fc-count">{chip(word)} {count}</span>'
        for word, count in number.items()
        if count
    )


def verdict_chip(verdict: Verdict) -> str:
    """A verdict as a chip; beside it which way an unsure one points, or that a side was drawn with
    one seed only.
    """
    if verdict.word == "one run":
        return chip(verdict.word, "as claimed" if verdict.met else "not as claimed")
    return chip(verdict.word, "one seed" if verdict.one_run and verdict.word != "not run" else "")


def verdict_table(
    chosen: list[Claim],
    suite: str,
    caption: str,
    kind: str = "fc-claims",
    place: Callable[[str], str] | None = None,
) -> str:
    """Claims with the paper's own numbers, and by source the verdict, what was measured, and the
    verdict at other settings.

    A source in which none of them has a counterpart has no column.   place: says where in the paper
    a claim stands.
    """
    pools = {part.pool for claim in chosen for part in (claim.parts.values() or [claim])} or {"8"}
    columns, head = [], ["Claim", "The paper’s numbers"]
    words: list[list[str]] = [[] for _ in chosen]  # of each claim, what the sources say of it
    for source in sources(suite):
        shown = tables.settings_shown(source.suite)
        settings = [
            s
            for s in shown
            if all(s in tables.settings_shown(source.suite, pool) for pool in pools)
        ]
        found = [source.judged(chosen, setting) for setting in settings]
        if any(found[0]):
            columns.append(
                [
                    _cell(claim, verdicts, settings[1:])
                    for claim, *verdicts in zip(chosen, *found, strict=True)
                ]
            )
            words = [
                [*own, *([v.word] if v else [])] for own, v in zip(words, found[0], strict=True)
            ]
            head.append(f"{source.title}, {tables.setting_label(settings[0])}")
    rows = []
    for claim, said, *cells in zip(chosen, words, *columns, strict=True):
        doubts = "".join(f"<p>{escape(reason)}</p>" for reason in in_doubt(claim))
        printed = escape(paper_says(claim)) + (f" {fold('in doubt', doubts)}" if doubts else "")
        where = f"{place(claim.place)} · " if place else ""
        name = " ".join(f"fc-is-{word.replace(' ', '-')}" for word in dict.fromkeys(said))
        rows.append(
            (
                name,
                [
                    f"{escape(claim.sentence)}<small>{where}{escape(claim.source)}</small>",
                    printed or "–",
                    *cells,
                ],
            )
        )
    return table(head, rows, caption, kind)


def _cell(claim: Claim, found: list[Verdict | None], others: list[str]) -> str:
    """The verdict of one source with its numbers, on fewer experiments where it has no more, and
    the verdicts elsewhere.
    """
    first, *rest = found
    if first is None:
        return '<span class="fc-none">no counterpart in texts</span>'
    said = [
        f"{tables.setting_label(s)}: {verdict_chip(v)}"
        for s, v in zip(others, rest, strict=True)
        if v
    ]
    also = (
        "".join(f"<small>{one}</small>" for one in said)
        if first.word != "not run" and claim.has_settings
        else ""
    )
    fewer = dict.fromkeys(f"{part.pool} tasks" for part in first.claim.parts.values())
    only = (
        f"<small>here: {', '.join(fewer)}</small>"
        if len(first.claim.parts) < len(claim.parts)
        else ""
    )
    return f"{verdict_chip(first)}<br>{measured(first)}{only}{also}"


def measured(verdict: Verdict) -> str:
    """The numbers behind a verdict: both sides, the margin, two standard errors."""
    if verdict.word == "not run":
        return ""
    margin = ""
    if not math.isnan(verdict.margin):
        digits = DIGITS.get(verdict.claim.measure, 3)
        pairing = f", {verdict.pairing}" if verdict.pairing else ""
        within = f"<small>2 SE {verdict.noise:.{digits}f}{pairing}</small>" if verdict.noise else ""
        within = "<small>one run, no error known</small>" if verdict.word == "one run" else within
        margin = f"<small>margin {verdict.margin:+.{digits}f}</small>{within}"
    return escape(verdict.detail) + margin
