"""Verdicts as they stand on pages: chips, how many there are of each, and claims in a table with what was measured."""

import math
from html import escape

from reproduction.report import tables
from reproduction.report.claims import DIGITS, Claim
from reproduction.report.markup import chip, fold, table
from reproduction.report.printed import in_doubt, paper_says
from reproduction.report.verdicts import WORDS, Verdict, judged


def counts(found: list[Verdict]) -> str:
    """Chips with how many verdicts there are of each kind."""
    number = {word: sum(v.word == word for v in found) for word in WORDS}
    return " ".join(f'<span class="fc-count">{chip(word)} {count}</span>' for word, count in number.items() if count)


def verdict_chip(verdict: Verdict) -> str:
    """A verdict as a chip; beside it which way an unsure one points, or that a side was drawn with one seed only."""
    if verdict.word == "one run":
        return chip(verdict.word, "as claimed" if verdict.met else "not as claimed")
    return chip(verdict.word, "one seed" if verdict.one_run and verdict.word != "not run" else "")


def verdict_table(chosen: list[Claim], suite: str, caption: str) -> str:
    """Claims with the paper's own numbers, what was measured here, and the verdict at each setting that all of them have."""
    pools = {part.pool for claim in chosen for part in (claim.parts.values() or [claim])} or {"8"}
    first, *others = [s for s in tables.settings_shown(suite) if all(s in tables.settings_shown(suite, pool) for pool in pools)]
    head = ["Claim", f"Verdict, {tables.setting_label(first)}", "The paper’s numbers", "Measured here"]
    head += [f"Verdict, {tables.setting_label(s)}" for s in others]
    columns = [judged(chosen, suite, setting) for setting in (first, *others)]
    rows = []
    for claim, *found in zip(chosen, *columns, strict=True):
        doubts = "".join(f"<p>{escape(reason)}</p>" for reason in in_doubt(claim))
        printed = escape(paper_says(claim)) + (f" {fold('in doubt', doubts)}" if doubts else "")
        cells = [f"{escape(claim.sentence)}<small>{escape(claim.source)}</small>", verdict_chip(found[0]), printed]
        rows.append(("", [*cells, measured(found[0]), *map(verdict_chip, found[1:])]))
    return table(head, rows, caption, "fc-claims")


def measured(verdict: Verdict) -> str:
    """The numbers behind a verdict: both sides, the margin, two standard errors."""
    if verdict.word == "not run":
        return '<span class="fc-none">–</span>'
    margin = ""
    if not math.isnan(verdict.margin):
        digits = DIGITS.get(verdict.claim.measure, 3)
        pairing = f", {verdict.pairing}" if verdict.pairing else ""
        within = f"<small>2 SE {verdict.noise:.{digits}f}{pairing}</small>" if verdict.noise else ""
        within = "<small>one run, no error known</small>" if verdict.word == "one run" else within
        margin = f"<small>margin {verdict.margin:+.{digits}f}</small>{within}"
    return escape(verdict.detail) + margin
