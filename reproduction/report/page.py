"""Show the paper's claims on a page, and the line on where its numbers come from."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from itertools import compress
from typing import Any

import pandas as pd

from reproduction.report import paper
from reproduction.report.claims import DIGITS, GROUPS, SUMS, Claim, claims, in_words
from reproduction.report.evidence import MEASURED, read_json, results_folder
from reproduction.report.html import PageOutput, TableRow, chip, link, listed, note, plain, table
from reproduction.report.verdicts import DECIDED, WORDS, Verdict, Verdicts, judged

BOTH = "Printed settings; tuned: only FeatCal, on validation rows"
SHOWN = 3  # commits that provenance names
PAGES = ("table", "figure", "theory")  # kinds of places that have a page each
# places whose own pages list their claims, with what was measured
LISTED = ("figure", "theory", "table05", "table06", "table12", "table13", "table14")
ReadTable = Callable[..., pd.DataFrame]


def verdicts(place: str, suite: str) -> PageOutput:
    """Return the paper's claims about one of its tables or figures, with verdicts by source."""
    chosen = [claim for claim in claims() if claim.place == place]
    return PageOutput(verdict_table(chosen, judged(suite, chosen), "The paper’s claims"))


def provenance(page: str, suite: str, reads: Sequence[str]) -> PageOutput:
    """Return one line: result files, what the image model is, commit, machine, and the command that
    makes the page again.
    """
    root = results_folder(suite)
    named, roles, commits, machines = [], set(), set(), set()
    for read in reads:
        kind = read.partition("/")[0]
        file = f"{read}/{kind}.csv"
        there = (root / file).is_file()
        named.append(link(f"../results/{suite}/{file}", read) if there else f"<code>{read}</code>")
        for record in sorted((root / read).glob("**/run.json")):
            run = read_json(record)
            roles.add(record.parent.name.partition("-")[0])
            commits.add(str(run.get("commit", ""))[:8] + "+" * bool(run.get("dirty")))
            host = run.get("host", {})
            machines.update(host[part] for part in ("cpu", "gpu") if part in host)
    base = paper.VISION_BASE.get(suite) if paper.VISION in roles else None
    parts = [", ".join(named), *([base] if base else [])]
    several = len(commits) > SHOWN
    shown = sorted(one for one in commits if one.endswith("+") or not several)
    made = [f"{len(commits)} commits"] if several else []
    made += [f"commit {escape(', '.join(shown))}"] if shown else []
    parts += made or ["not run"]
    parts += [escape(", ".join(sorted(machines)))] if machines else []
    parts += [f"<code>dvc repro page@{page}</code>", link(f"../notebooks/{page}.ipynb", "source")]
    parts += ['<a href="differences.html">differences</a>']
    return PageOutput(note(" · ".join(parts)))


def counts(found: list[Verdict | None]) -> str:
    """Return chips with the number of verdicts of each kind."""
    number = Counter(verdict.word for verdict in found if verdict)
    run = (word for word in WORDS if number[word])
    chips = (f'<span class="fc-count">{chip(word)} {number[word]}</span>' for word in run)
    return " ".join(chips) or "–"


def tally(found: Verdicts) -> PageOutput:
    """Count verdicts on all claims by source: of headline claims by group, of theorems, and of all."""

    def cells(chosen: list[bool], shown: Callable[[list[Verdict | None]], str]) -> list[str]:
        own = ([[*compress(one, chosen)] for one in column] for column in found.values())
        return [_both([*map(shown, column)]) for column in own]

    headline, every = [claim.headline for claim in claims()], [True for _ in claims()]
    of = {group: [claim.group == group for claim in claims()] for group in GROUPS}
    rows: list[TableRow] = [[group, *cells(chosen, counts)] for group, chosen in of.items()]
    rows.append(("fc-total", [f"headline claims, {sum(headline)}", *cells(headline, counts)]))
    rows.append(("fc-total", [f"all claims, {len(every)}", *cells(every, counts)]))
    fragile = "decided by less than three standard errors"
    rows.append(("fc-total", [fragile, *cells(every, _fragile)]))
    head = ["Claims", *(source.title for source in found)]
    return listed(head, rows, f"Verdicts counted. {BOTH}.", "fc-words")


def _both(cells: list[str]) -> str:
    """Return what is shown at the printed settings, and small what differs at the tuned ones."""
    tuned = [f"<small>tuned: {cell}</small>" for cell in cells[1:] if cell != cells[0]]
    return "".join([cells[0], *tuned])


def _fragile(found: list[Verdict | None]) -> str:
    """Return how many decided verdicts would not be decided at three standard errors."""
    decided = [verdict for verdict in found if verdict and verdict.word in DECIDED]
    return f"{sum(verdict.fragile for verdict in decided)} of {len(decided)}"


def board(found: Verdicts) -> PageOutput:
    """List all claims in the order of claims.yaml, for the filter of book/_static/filter.js."""
    return PageOutput(verdict_table(claims(), found, "All claims", "fc-claims fc-filtered", True))


def place_link(place: str) -> str:
    """Name a place of the paper, such as "Table 1", with a link to its page where it has one."""
    kind = place.rstrip("0123456789")
    name = " ".join([kind.title(), *(str(int(n)) for n in [place[len(kind) :]] if n)])
    return f'<a href="{place}.html">{name}</a>' if kind in PAGES else name


def verdict_table(
    chosen: Sequence[Claim],
    found: Verdicts,
    caption: str,
    kind: str = "fc-claims",
    whole: bool = False,
) -> str:
    """List claims with the paper's numbers, and verdicts and what was measured by source, if any.

    The whole list leaves what was measured to the pages that list their own claims.
    """
    run = {source: column for source, column in found.items() if any(column[0])}
    head = ["Claim", "The paper’s numbers", *(source.title for source in run)]
    columns = [zip(*column, strict=True) for column in run.values()]
    rows = []
    for claim, *own in zip(chosen, *columns, strict=True):
        where = linked_source(claim) if whole else escape(claim.source)
        printed = escape(paper_says(claim)) + (f" ({paper.DOUBTS})" if in_doubt(claim) else "")
        words = dict.fromkeys(one[0].word for one in own if one[0])
        look = " ".join(f"fc-is-{word.replace(' ', '-')}" for word in words)
        cells = [_cell(claim, one, whole) for one in own]
        sentence = f"{escape(claim.sentence)}<small>{where}</small>"
        rows.append((look, [sentence, printed or "–", *cells]))
    return table(head, rows, f"{caption}. {BOTH}; ¹ one seed; ○ not run.", kind)


def linked_source(claim: Claim) -> str:
    """Return where the paper says a claim, with a link to the page of its table or figure."""
    named, source = place_link(claim.place), escape(claim.source)
    linked, times = re.subn(rf"\b{plain(named)}\b", named, source, count=1)
    return linked if times else named.replace(plain(named), source)


def _cell(claim: Claim, found: Sequence[Verdict | None], short: bool) -> str:
    """Show the verdict of one source at the printed settings, and small another at the tuned ones."""
    first, *others = found
    if first is None:
        return ""
    parts, whole = len(first.claim.parts), len(claim.parts)
    partly = 0 < parts < whole and first.word != "not run"
    only = f"<small>here: {parts} of {whole}</small>" if partly else ""
    shown = verdict_chip(first)
    if not (short and claim.place.startswith(LISTED)):
        shown += f"<br>{measured(first, short)}{only}"
    differ = [one for one in others if one and claim.has_settings and one.word != first.word]
    return shown + "".join(f"<small>tuned: {verdict_chip(one)}</small>" for one in differ)


def verdict_chip(verdict: Verdict) -> str:
    """Return a verdict as a chip, with its direction if measured once, or a mark for a single seed."""
    if verdict.word == "one run":
        return chip(verdict.word, "as claimed" if verdict.met else "not as claimed")
    if verdict.word == "not run":
        return chip(verdict.word, short=True)
    return chip(verdict.word) + '<sup title="one seed">¹</sup>' * verdict.one_run


def measured(verdict: Verdict, short: bool = False) -> str:
    """Return the values of both sides of a verdict, their margin, and two standard errors.

    short: the margin alone, or the bare counts of a claim about several.
    """
    detail, _, rest = escape(verdict.detail).partition(";")
    if short and verdict.word == "not run":
        return ""
    if short and rest:
        several = verdict.claim.over or verdict.claim.each
        return detail.replace(f" {verdict.claim.unit}", "") if several else detail
    if math.isnan(verdict.margin):
        return detail
    digits = DIGITS.get(verdict.claim.measure, 3)
    noise = f" ± {verdict.noise:.{digits}f}" if verdict.noise else ""
    pairing = f" {verdict.pairing}" if verdict.pairing else ""
    margin = f"<small>{verdict.margin:+.{digits}f}{noise}{pairing}</small>"
    if short:
        return margin
    if rest and not verdict.claim.file.endswith(MEASURED):  # their machine is named by the page
        detail += f";{rest}"
    return f"{detail}{margin}"


def is_printed(claim: Claim) -> bool:
    """Return True if printed tables of single models have a claim's numbers, so none are typed."""
    return claim.kind in SUMS and claim.file == "scores" and not claim.paper


def paper_says(claim: Claim) -> str:
    """Return the paper's numbers, typed where no table has them, and corrected ones that differ."""
    if not is_printed(claim):
        return claim.paper

    def words(read: ReadTable) -> str:
        if claim.over or claim.each:
            met = [paper_margin(part, read) > 0 for part in printed_parts(claim)]
            return f"{sum(met)} of {len(met)} {claim.unit}"
        return in_words(claim.kind, [_value(claim, side, read) for _, side in claim.terms])

    said, fixed = words(paper.paper_table), words(paper.corrected_table)
    return said if said == fixed else f"{said} as printed, {fixed} corrected"


def paper_margin(claim: Claim, read: ReadTable = paper.paper_table) -> float:
    """Return by how much the paper's averages meet a claim about single models."""
    return sum(weight * _value(claim, side, read) for weight, side in claim.terms) - claim.by


def printed_parts(claim: Claim) -> list[Claim]:
    """Return one claim about each experiment, model and task."""
    found = []
    for part in list(claim.parts.values()) or [claim]:
        if part.each:
            tasks = paper.paper_row(*_place(part, part.terms[0][1])[0]).index.drop(paper.AVERAGE)
            found += [part.of(task) for task in tasks if part.is_about(task)]
        else:
            found.append(part)
    return found


def in_doubt(claim: Claim) -> list[str]:
    """Return why printed cells behind a claim are in doubt, where no correction is known."""
    found: dict[str, None] = {}
    for one in printed_parts(claim) if is_printed(claim) else []:
        for _, side in one.terms:
            (number, *row, model, _), column = _place(one, side)
            for entry in paper.errata():
                # of a change the arrow is wrong, not the value
                doubted = set(entry.cells) - {*entry.corrected} if entry.kind != "change" else ()
                here = entry.table == number and entry.row == row and entry.model in ("", model)
                if here and column in doubted:
                    found[f"Table {int(number[-2:])}: {entry.reason}"] = None
    return list(found)


def _place(claim: Claim, side: dict[str, Any]) -> tuple[tuple[str, ...], str]:
    """Return the printed row of one side, as `paper_row` asks for it, and the column there."""
    place = (str(side.get("role", claim.role)), str(side.get("pool", claim.pool)))
    own = claim.table and place == (claim.role, claim.pool)
    number = claim.table if own else (paper.PRINTED | paper.TEXT_PRINTED)[place]
    upstream, method = str(side["upstream"]), str(side["method"])
    domain = str(side.get("setting", "")) if method == "expert" else ""  # an expert's own row
    column = str((claim.where | side).get("task", paper.AVERAGE))
    return (number, upstream, method, paper.PAPER_MODELS[place[0]], domain), column


def _value(claim: Claim, side: dict[str, Any], read: ReadTable) -> float:
    row, column = _place(claim, side)
    return float(paper.paper_row(*row, read=read)[column])
