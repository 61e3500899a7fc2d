"""Show verdicts on pages: chips, their counts, and claims in a table with what was measured."""

import math
from html import escape

from reproduction.report import tables
from reproduction.report.claims import DIGITS, GROUPS, Claim, claims
from reproduction.report.html import PageOutput, chip, table
from reproduction.report.printed import in_doubt, paper_says
from reproduction.report.verdicts import WORDS, Verdict, sources

PAGES = ("table", "figure", "theory")  # kinds of places that have a page each
DOUBT = '<a href="differences.html">in doubt</a>'


def counts(found: list[Verdict]) -> str:
    """Return chips with the number of verdicts of each kind."""
    number = {word: sum(v.word == word for v in found) for word in WORDS}
    return " ".join(
        f'<span class="fc-count">{chip(word)} {count}</span>'
        for word, count in number.items()
        if count
    )


def tally(suite: str) -> PageOutput:
    """Count verdicts by source: of the headline claims by group, of the theorems, and of all claims."""
    headline = [claim for claim in claims() if claim.headline]
    chosen = {group: [claim for claim in claims() if claim.group == group] for group in GROUPS}
    chosen |= {
        f"headline claims, {len(headline)}": headline,
        f"all claims, {len(claims())}": list(claims()),
    }
    rows = []
    for name, own in chosen.items():
        cells = [counts([v for v in source.judged(own) if v]) or "–" for source in sources(suite)]
        rows.append(("fc-total" if "claims, " in name else "", [name, *cells]))
    head = ["Claims", *(source.title for source in sources(suite))]
    return PageOutput(table(head, rows, "Verdicts counted", "fc-words"))


def board(suite: str) -> PageOutput:
    """List all claims in the order of claims.yaml, ready for the filter of book/_static/filter.js."""
    return PageOutput(
        verdict_table(list(claims()), suite, "All claims", "fc-claims fc-filtered", True)
    )


def place_link(place: str) -> str:
    """Name a place of the paper, such as "Table 1", with a link to its page where it has one."""
    kind = place.rstrip("0123456789")
    name = " ".join([kind.title(), *(str(int(n)) for n in [place[len(kind) :]] if n)])
    return f'<a href="{place}.html">{name}</a>' if kind in PAGES else name


def verdict_table(
    chosen: list[Claim], suite: str, caption: str, kind: str = "fc-claims", places: bool = False
) -> str:
    """List claims with the paper's numbers and, by source, the verdict and what was measured.

    A source in which no claim has a counterpart has no column.   places: link each claim to its page, and show
    of a claim about several how many hold.
    """
    pools = {part.pool for claim in chosen for part in (claim.parts.values() or [claim])} or {"8"}
    columns, head = [], ["Claim", "The paper’s numbers"]
    words: list[list[str]] = [[] for _ in chosen]
    for source in sources(suite):
        shown = tables.settings_shown(source.suite)
        main, *others = [
            s
            for s in shown
            if all(s in tables.settings_shown(source.suite, pool) for pool in pools)
        ]
        found = source.judged(chosen, main)
        also = [source.judged(chosen, setting) for setting in others]
        if any(found):
            columns.append(
                [_cell(c, v, list(zip(others, more, strict=True)), places)
                 for c, v, *more in zip(chosen, found, *also, strict=True)]
            )  # fmt: skip
            words = [[*own, *([v.word] if v else [])] for own, v in zip(words, found, strict=True)]
            head.append(f"{source.title}, {tables.setting_label(main)}")
    rows = []
    for claim, said, *cells in zip(chosen, words, *columns, strict=True):
        where = f"{place_link(claim.place)} · " if places else ""
        sentence = f"{escape(claim.sentence)}<small>{where}{escape(claim.source)}</small>"
        printed = escape(paper_says(claim)) + (f" ({DOUBT})" if in_doubt(claim) else "")
        name = " ".join(f"fc-is-{word.replace(' ', '-')}" for word in dict.fromkeys(said))
        rows.append((name, [sentence, printed or "–", *cells]))
    return table(head, rows, caption, kind)


def _cell(
    claim: Claim, found: Verdict | None, others: list[tuple[str, Verdict | None]], short: bool
) -> str:
    """Show the verdict of one source, on which pools if on fewer, and the verdict at other settings."""
    if found is None:
        return '<span class="fc-none">–</span>'
    fewer = dict.fromkeys(f"{part.pool} tasks" for part in found.claim.parts.values())
    only = (
        f"<small>here: {', '.join(fewer)}</small>"
        if len(found.claim.parts) < len(claim.parts)
        else ""
    )
    also = ""
    if found.word != "not run" and claim.has_settings:
        also = "".join(
            f"<small>{tables.setting_label(s)}: {verdict_chip(v)}</small>" for s, v in others if v
        )
    return f"{verdict_chip(found)}<br>{measured(found, short)}{only}{also}"


def verdict_chip(verdict: Verdict) -> str:
    """Return a verdict as a chip; of a single run which way it points, or that one side has one seed."""
    if verdict.word == "one run":
        return chip(verdict.word, "as claimed" if verdict.met else "not as claimed")
    return chip(verdict.word, "one seed" if verdict.one_run and verdict.word != "not run" else "")


def measured(verdict: Verdict, short: bool = False) -> str:
    """Return the numbers behind a verdict: both sides, the margin, two standard errors."""
    if verdict.word == "not run":
        return ""
    detail, _, rest = escape(verdict.detail).partition(";")
    if short and rest or math.isnan(verdict.margin):
        return detail
    digits = DIGITS.get(verdict.claim.measure, 3)
    noise = f" ± {verdict.noise:.{digits}f}" if verdict.noise else ""
    pairing = f" {verdict.pairing}" if verdict.pairing else ""
    detail = f"{detail};{rest}" if rest else detail
    return f"{detail}<small>{verdict.margin:+.{digits}f}{noise}{pairing}</small>"
