"""Show the paper's claims on a page, and the line on where its numbers come from."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from itertools import compress
from typing import Any

import pandas as pd

from reproduction.report import paper
from reproduction.report.claims import DIGITS, GROUPS, SUMS, Claim, claims, in_words
from reproduction.report.evidence import read_json, results_folder
from reproduction.report.html import PageOutput, Row, chip, link, listed, note, table
from reproduction.report.verdicts import DECIDED, WORDS, Verdict, sources

BOTH = "At the printed settings; small: at settings tuned on validation rows, adapters not tuned."
PAGES = ("table", "figure", "theory")  # kinds of places that have a page each
DOUBT = '<a href="differences.html">in doubt</a>'
Read = Callable[..., pd.DataFrame]


def verdicts(place: str, suite: str) -> PageOutput:
    """Return the paper's claims about one of its tables or figures, with verdicts by source."""
    chosen = [claim for claim in claims() if claim.place == place]
    return PageOutput(verdict_table(chosen, suite, "The paper’s claims"))


def provenance(page: str, suite: str, reads: Sequence[str]) -> PageOutput:
    """Return one line: result files, commit, machine, and the command that makes the page again."""
    root = results_folder(suite)
    named, commits, machines = [], set(), set()
    for read in reads:
        kind = read.partition("/")[0]
        file = f"{read}/{kind}.csv"
        there = (root / file).is_file()
        named.append(link(f"../results/{suite}/{file}", read) if there else f"<code>{read}</code>")
        for record in sorted((root / read).glob("**/run.json")):
            run = read_json(record)
            commits.add(str(run.get("commit", ""))[:8] + "+" * bool(run.get("dirty")))
            machines.add(str(run.get("host", {}).get("cpu", "")))
    parts = [f"Results: {', '.join(named)}"]
    parts += [f"commit {escape(', '.join(sorted(commits)))}"] if commits else ["not run"]
    parts += [escape(", ".join(sorted(machines)))] if machines else []
    parts += [f"<code>dvc repro page@{page}</code>", link(f"../notebooks/{page}.ipynb", "source")]
    parts += ['<a href="differences.html">differences from the paper</a>']
    return PageOutput(note(" · ".join(parts)))


def counts(found: list[Verdict | None]) -> str:
    """Return chips with the number of verdicts of each kind."""
    number = Counter(verdict.word for verdict in found if verdict)
    run = (word for word in WORDS if number[word])
    chips = (f'<span class="fc-count">{chip(word)} {number[word]}</span>' for word in run)
    return " ".join(chips) or "–"


def tally(suite: str) -> PageOutput:
    """Count verdicts by source: of headline claims by group, of theorems, and of all claims."""
    judged = [source.judged(claims()) for source in sources(suite)]

    def cells(chosen: list[bool], shown: Callable[[list[Verdict | None]], str]) -> list[str]:
        own = ([[*compress(found, chosen)] for found in column] for column in judged)
        return [_both([*map(shown, column)]) for column in own]

    headline, every = [claim.headline for claim in claims()], [True for _ in claims()]
    of = {group: [claim.group == group for claim in claims()] for group in GROUPS}
    rows: list[Row] = [[group, *cells(chosen, counts)] for group, chosen in of.items()]
    rows.append(("fc-total", [f"headline claims, {sum(headline)}", *cells(headline, counts)]))
    rows.append(("fc-total", [f"all claims, {len(every)}", *cells(every, counts)]))
    fragile = "decided by less than three standard errors"
    rows.append(("fc-total", [fragile, *cells(every, _fragile)]))
    head = ["Claims", *(source.title for source in sources(suite))]
    return listed(head, rows, f"Verdicts counted. {BOTH}", "fc-words")


def _both(cells: list[str]) -> str:
    """Return what is shown at the printed settings, and small what is at the tuned ones."""
    return cells[0] + "".join(f"<small>tuned: {cell}</small>" for cell in cells[1:])


def _fragile(found: list[Verdict | None]) -> str:
    """Return how many decided verdicts would not be decided at three standard errors."""
    decided = [verdict for verdict in found if verdict and verdict.word in DECIDED]
    return f"{sum(verdict.fragile for verdict in decided)} of {len(decided)}"


def board(suite: str) -> PageOutput:
    """List all claims in the order of claims.yaml, for the filter of book/_static/filter.js."""
    kind = "fc-claims fc-filtered"
    return PageOutput(verdict_table(list(claims()), suite, "All claims", kind, True))


def place_link(place: str) -> str:
    """Name a place of the paper, such as "Table 1", with a link to its page where it has one."""
    kind = place.rstrip("0123456789")
    name = " ".join([kind.title(), *(str(int(n)) for n in [place[len(kind) :]] if n)])
    return f'<a href="{place}.html">{name}</a>' if kind in PAGES else name


def verdict_table(
    chosen: list[Claim], suite: str, caption: str, kind: str = "fc-claims", places: bool = False
) -> str:
    """List claims with the paper's numbers, and verdicts and what was measured by source, if any."""
    columns, head = [], ["Claim", "The paper’s numbers"]
    for source in sources(suite):
        found = source.judged(chosen)
        if any(found[0]):
            columns.append(list(zip(*found, strict=True)))
            head.append(source.title)
    rows = []
    for claim, *found in zip(chosen, *columns, strict=True):
        where = f"{place_link(claim.place)} · " if places else ""
        sentence = f"{escape(claim.sentence)}<small>{where}{escape(claim.source)}</small>"
        printed = escape(paper_says(claim)) + (f" ({DOUBT})" if in_doubt(claim) else "")
        words = dict.fromkeys(own[0].word for own in found if own[0])
        look = " ".join(f"fc-is-{word.replace(' ', '-')}" for word in words)
        cells = [_cell(claim, own, places) for own in found]
        rows.append((look, [sentence, printed or "–", *cells]))
    return table(head, rows, f"{caption}. {BOTH}", kind)


def _cell(claim: Claim, found: Sequence[Verdict | None], short: bool) -> str:
    """Show the verdict of one source at the printed settings, and small at the tuned ones."""
    first, *others = found
    if first is None:
        return '<span class="fc-none">–</span>'
    parts, whole = len(first.claim.parts), len(claim.parts)
    only = f"<small>here: {parts} of {whole}</small>" if 0 < parts < whole else ""
    also = [verdict_chip(verdict) for verdict in others if verdict and claim.has_settings]
    return _both([f"{verdict_chip(first)}<br>{measured(first, short)}{only}", *also])


def verdict_chip(verdict: Verdict) -> str:
    """Return a verdict as a chip, with its direction if measured once, or a note on a single seed."""
    if verdict.word == "one run":
        return chip(verdict.word, "as claimed" if verdict.met else "not as claimed")
    return chip(verdict.word, "one seed" if verdict.one_run and verdict.word != "not run" else "")


def measured(verdict: Verdict, short: bool = False) -> str:
    """Return the numbers behind a verdict: both sides, the margin, two standard errors."""
    detail, _, rest = escape(verdict.detail).partition(";")
    if short and rest or math.isnan(verdict.margin):
        return detail
    digits = DIGITS.get(verdict.claim.measure, 3)
    noise = f" ± {verdict.noise:.{digits}f}" if verdict.noise else ""
    pairing = f" {verdict.pairing}" if verdict.pairing else ""
    detail = f"{detail};{rest}" if rest else detail
    return f"{detail}<small>{verdict.margin:+.{digits}f}{noise}{pairing}</small>"


def is_printed(claim: Claim) -> bool:
    """Return True if printed tables of single models have a claim's numbers, so none are typed."""
    return claim.kind in SUMS and claim.file == "scores" and not claim.paper


def paper_says(claim: Claim) -> str:
    """Return the paper's numbers, typed where no table has them, and corrected ones that differ."""
    if not is_printed(claim):
        return claim.paper

    def words(read: Read) -> str:
        if claim.over or claim.each:
            met = [paper_margin(part, read) > 0 for part in printed_parts(claim)]
            return f"{sum(met)} of {len(met)} {claim.unit}"
        return in_words(claim.kind, [_value(claim, side, read) for _, side in claim.terms])

    said, fixed = words(paper.paper_table), words(paper.corrected_table)
    return said if said == fixed else f"{said} as printed, {fixed} corrected"


def paper_margin(claim: Claim, read: Read = paper.paper_table) -> float:
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


def _value(claim: Claim, side: dict[str, Any], read: Read) -> float:
    row, column = _place(claim, side)
    return float(paper.paper_row(*row, read=read)[column])
