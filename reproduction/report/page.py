"""What stands on every page of the book: the paper's claims about it, and where its numbers come from."""

from collections.abc import Sequence
from html import escape

from reproduction.report.claims import claims
from reproduction.report.evidence import read_json, results_folder
from reproduction.report.html import PageOutput, chip, link, note, table
from reproduction.report.printed import paper_says
from reproduction.report.verdicts import sources


def verdicts(place: str, suite: str) -> PageOutput:
    """Return the paper's claims about one of its tables or figures, a verdict word per source."""
    chosen = [claim for claim in claims() if claim.place == place]
    columns = {source.title: source.judged(chosen) for source in sources(suite)}
    columns = {title: found for title, found in columns.items() if any(found)}
    rows = []
    for claim, *found in zip(chosen, *columns.values(), strict=True):
        words = [chip(verdict.word) if verdict else "no counterpart" for verdict in found]
        rows.append(("", [escape(claim.sentence), escape(paper_says(claim)) or "–", *words]))
    caption = "The paper’s claims and what each source of results says of them"
    head = ["Claim", "The paper’s numbers", *columns]
    return PageOutput(table(head, rows, caption, "fc-claims"))


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
            told = read_json(record)
            commits.add(str(told.get("commit", ""))[:8] + "+" * bool(told.get("dirty")))
            machines.add(str(told.get("host", {}).get("cpu", "")))
    parts = [f"Results: {', '.join(named)}"]
    parts += [f"commit {escape(', '.join(sorted(commits)))}"] if commits else ["not run"]
    parts += [escape(", ".join(sorted(machines)))] if machines else []
    parts += [f"<code>dvc repro page@{page}</code>"]
    parts += [link(f"../notebooks/{page}.ipynb", "source")]
    parts += ['<a href="differences.html">differences from the paper</a>']
    return PageOutput(note(" · ".join(parts)))
