"""Show the paper's claims on a page, and the line with the page's result files and commits."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from itertools import compress
from typing import Any

import pandas as pd

from reproduction.report import paper
from reproduction.report.claims import DIGITS, GROUPS, SUMS, Claim, claims, means_text
from reproduction.report.evidence import RUN_RECORD, read_json, results_folder
from reproduction.report.html import PageOutput, TableRow, chip, link, note, plain, table, tabulate
from reproduction.report.verdicts import DECIDED, WORDS, Verdict, Verdicts, judged

SETTINGS_NOTE = "Printed settings; tuned: only FeatCal, on validation rows"
MOST_COMMITS = 3  # commits that provenance names
PAGES = ("table", "figure", "theory")  # kinds of locations with a page each
# locations whose own pages list their claims with measured values
LISTED = ("figure", "theory", "table05", "table06", "table12", "table13", "table14")
ReadTable = Callable[..., pd.DataFrame]


def verdicts(location: str, suite: str) -> PageOutput:
    """Return the paper's claims about one of its tables or figures, with verdicts by source."""
    chosen = [claim for claim in claims() if claim.location == location]
    return PageOutput(verdict_table(chosen, judged(suite, chosen), "The paper’s claims"))


def provenance(page: str, suite: str, reads: Sequence[str]) -> PageOutput:
    """Return a line with result files, image model, commit, machine and the page's command."""
    root = results_folder(suite)
    links, roles, commits, machines = [], set(), set(), set()
    for read in reads:
        kind = read.partition("/")[0]
        file = f"{read}/{kind}.csv"
        exists = (root / file).is_file()
        links.append(link(f"../results/{suite}/{file}", read) if exists else f"<code>{read}</code>")
        for record in sorted((root / read).glob("**/run.json")):
            run = read_json(record)
            roles.add(record.parent.name.partition("-")[0])
            commits.add(str(run.get("commit", ""))[:8] + "+" * bool(run.get("dirty")))
            host = run.get("host", {})
            machines.update(host[part] for part in ("cpu", "gpu") if part in host)
    base = paper.VISION_BASE.get(suite) if paper.VISION in roles else None
    parts = [", ".join(links), *([base] if base else [])]
    many = len(commits) > MOST_COMMITS
    listed_commits = sorted(commit for commit in commits if commit.endswith("+") or not many)
    made = [f"{len(commits)} commits"] if many else []
    made += [f"commit {escape(', '.join(listed_commits))}"] if listed_commits else []
    parts += made or ["not run"]
    parts += [escape(", ".join(sorted(machines)))] if machines else []
    parts += [f"<code>dvc repro page@{page}</code>", link(f"../notebooks/{page}.ipynb", "source")]
    parts += ['<a href="differences.html">differences</a>']
    return PageOutput(note(" · ".join(parts)))


def counts(verdicts: Sequence[Verdict | None]) -> str:
    """Return chips with the number of verdicts of each kind."""
    counted = Counter(verdict.word for verdict in verdicts if verdict)
    kinds = (word for word in WORDS if counted[word])
    chips = (f'<span class="fc-count">{chip(word)} {counted[word]}</span>' for word in kinds)
    return " ".join(chips) or "–"


def tally(verdicts: Verdicts) -> PageOutput:
    """Count verdicts by source: on headline claims by group and in all, and on all claims."""

    def cells(chosen: list[bool], shown: Callable[[Sequence[Verdict | None]], str]) -> list[str]:
        texts = []
        for column in verdicts.values():
            printed, *others = map(shown, zip(*compress(column, chosen), strict=True))
            tuned = (f"<small>tuned: {text}</small>" for text in others if text != printed)
            texts.append("".join([printed, *tuned]))
        return texts

    headline, every = [claim.headline for claim in claims()], [True for _ in claims()]
    of = {group: [claim.group == group for claim in claims()] for group in GROUPS}
    rows: list[TableRow] = [[group, *cells(chosen, counts)] for group, chosen in of.items()]
    rows.append(("fc-total", [f"headline claims, {sum(headline)}", *cells(headline, counts)]))
    rows.append(("fc-total", [f"all claims, {len(every)}", *cells(every, counts)]))
    fragile = "decided by less than three standard errors"
    rows.append(("fc-total", [fragile, *cells(every, _fragile)]))
    head = ["Claims", *(source.title for source in verdicts)]
    return tabulate(head, rows, f"Verdicts counted. {SETTINGS_NOTE}.", "fc-words")


def _fragile(verdicts: Sequence[Verdict | None]) -> str:
    """Return how many decided verdicts would not be decided at three standard errors."""
    decided = [verdict for verdict in verdicts if verdict and verdict.word in DECIDED]
    return f"{sum(verdict.fragile for verdict in decided)} of {len(decided)}"


def board(verdicts: Verdicts) -> PageOutput:
    """List all claims in the order of claims.yaml, for the filter of book/_static/filter.js."""
    return PageOutput(verdict_table(claims(), verdicts, "All claims", whole=True))


def location_link(location: str) -> str:
    """Return the name of a location such as "Table 1", with a link to its page if it has one."""
    kind = location.rstrip("0123456789")
    name = " ".join([kind.title(), *(str(int(n)) for n in [location[len(kind) :]] if n)])
    return f'<a href="{location}.html">{name}</a>' if kind in PAGES else name


def verdict_table(
    chosen: Sequence[Claim], verdicts: Verdicts, caption: str, whole: bool = False
) -> str:
    """List claims with the paper's numbers, and the verdict and measured values of each source.

    whole: the list of all claims, which omits measured values where a claim's own page lists them.
    """
    columns = {source: column for source, column in verdicts.items() if any(map(any, column))}
    head = ["Claim", "The paper’s numbers", *(source.title for source in columns)]
    rows = []
    for claim, *row in zip(chosen, *columns.values(), strict=True):
        where = linked_source(claim) if whole else escape(claim.source)
        printed = escape(paper_says(claim)) + (f" ({paper.DOUBTS})" if in_doubt(claim) else "")
        kinds = dict.fromkeys(first.word for first, *_ in row if first)
        classes = " ".join(f"fc-is-{word.replace(' ', '-')}" for word in kinds)
        cells = [_cell(claim, at_settings, whole) for at_settings in row]
        sentence = f"{escape(claim.sentence)}<small>{where}</small>"
        rows.append((classes, [sentence, printed or "–", *cells]))
    kind = "fc-claims fc-filtered" if whole else "fc-claims"
    return table(head, rows, f"{caption}. {SETTINGS_NOTE}; ¹ one seed; ○ not run.", kind)


def linked_source(claim: Claim) -> str:
    """Return the source of a claim in the paper, with a link to the page of its table or figure."""
    page_link, source = location_link(claim.location), escape(claim.source)
    linked, count = re.subn(rf"\b{plain(page_link)}\b", page_link, source, count=1)
    return linked if count else page_link.replace(plain(page_link), source)


def _cell(claim: Claim, verdicts: Sequence[Verdict | None], short: bool) -> str:
    """Return a source's verdict at the printed settings, and the tuned one if it differs."""
    first, *others = verdicts
    if first is None:
        return ""
    only, cell = first.share_of(claim), verdict_chip(first)
    if not (short and claim.location.startswith(LISTED)):
        cell += f"<br>{measured(first, short)}" + (f"<small>{only}</small>" if only else "")
    for tuned in others if claim.has_settings else ():
        if tuned and tuned.word != first.word:
            cell += f"<small>tuned: {verdict_chip(tuned)}</small>"
    return cell


def verdict_chip(verdict: Verdict) -> str:
    """Return a verdict as a chip, with its direction if measured once, or a mark for one seed."""
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
    if short and rest:
        counted = verdict.claim.over or verdict.claim.each
        return detail.replace(f" {verdict.claim.unit}", "") if counted else detail
    if math.isnan(verdict.margin):
        return detail
    digits = DIGITS.get(verdict.claim.measure, 3)
    noise = f" ± {verdict.noise:.{digits}f}" if verdict.noise else ""
    pairing = f" {verdict.pairing}" if verdict.pairing else ""
    margin = f"<small>{verdict.margin:+z.{digits}f}{noise}{pairing}</small>"
    if short:
        return margin
    if rest and not verdict.claim.file.endswith(RUN_RECORD):  # their machine is named by the page
        detail += f";{rest}"
    return f"{detail}{margin}"


def is_printed(claim: Claim) -> bool:
    """Return True if printed tables of single models have a claim's numbers, so none are typed."""
    return claim.kind in SUMS and claim.file == "scores" and not claim.paper


def paper_says(claim: Claim) -> str:
    """Return the paper's numbers, typed where no table has them, and corrected ones that differ."""
    if not is_printed(claim):
        return claim.paper

    def text(read: ReadTable) -> str:
        if claim.over or claim.each:
            met = [paper_margin(part, read) > 0 for part in printed_parts(claim)]
            return f"{sum(met)} of {len(met)} {claim.unit}"
        means = [_printed_value(claim, side, read) for _, side in claim.terms]
        return means_text(claim.kind, means)

    printed, fixed = text(paper.paper_table), text(paper.corrected_table)
    return printed if printed == fixed else f"{printed} as printed, {fixed} corrected"


def paper_margin(claim: Claim, read: ReadTable = paper.paper_table) -> float:
    """Return by how much the paper's averages meet a claim about single models."""
    terms = (weight * _printed_value(claim, side, read) for weight, side in claim.terms)
    return sum(terms) - claim.by


def printed_parts(claim: Claim) -> list[Claim]:
    """Return one claim about each experiment, model and task."""
    parts = []
    for part in list(claim.parts.values()) or [claim]:
        if part.each:
            row, _ = _printed_cell(part, part.terms[0][1])
            tasks = paper.paper_row(*row).index.drop(paper.AVERAGE)
            parts += [part.for_value(task) for task in tasks if part.includes(task)]
        else:
            parts.append(part)
    return parts


def in_doubt(claim: Claim) -> list[str]:
    """Return why printed cells that a claim uses are in doubt, where no correction is known."""
    reasons: dict[str, None] = {}
    for part in printed_parts(claim) if is_printed(claim) else []:
        for _, side in part.terms:
            (number, upstream, method, model, _), column = _printed_cell(part, side)
            for entry in paper.row_errata(number, upstream, method, model):
                # of a change the arrow is wrong, not the value
                doubted = set(entry.cells) - {*entry.corrected} if entry.kind != "change" else ()
                if column in doubted:
                    reasons[f"{paper.table_name(number)}: {entry.reason}"] = None
    return list(reasons)


def _printed_cell(claim: Claim, side: dict[str, Any]) -> tuple[tuple[str, ...], str]:
    """Return the printed row of one side, as arguments of `paper_row`, and its column."""
    experiment = (str(side.get("role", claim.role)), str(side.get("pool", claim.pool)))
    is_own_table = claim.table and experiment == (claim.role, claim.pool)
    number = claim.table if is_own_table else paper.PRINTED[experiment]
    upstream, method = str(side["upstream"]), str(side["method"])
    domain = str(side.get("setting", "")) if method == "expert" else ""  # an expert's own row
    column = str((claim.where | side).get("task", paper.AVERAGE))
    return (number, upstream, method, paper.PAPER_MODELS[experiment[0]], domain), column


def _printed_value(claim: Claim, side: dict[str, Any], read: ReadTable) -> float:
    row, column = _printed_cell(claim, side)
    return float(paper.paper_row(*row, read=read)[column])
