"""The one-liners of an experiment's page: what it claims, what was measured, what differs, where it comes from.

Every function takes the page's name and the suite, and works without results. Accuracy tables are in accuracies.py, the front
pages in overview.py.
"""

from dataclasses import asdict
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from reproduction.report import tables
from reproduction.report.claims import claims, main_setting
from reproduction.report.evidence import Evidence, read_json
from reproduction.report.markup import PageOutput, compact, fold, link, note, table
from reproduction.report.reproduced import counted
from reproduction.report.values import PAPER_SETTINGS, PRINTED, place_name
from reproduction.report.verdict_table import counts, verdict_table
from reproduction.report.verdicts import judged

PLACES = {  # page → role, pool, printed table
    "figure1": ("clip_b32", "8", "table01"), "figure2": ("clip_b32", "8", "table01"), "figure6": ("clip_b32", "8", "table01"),
    "figure7": ("clip_b32", "8", "table01"), "table06": ("clip_b32", "8", "table06"), "figure4": ("clip_b32", "8", "table06"),
    "figure5": ("clip_b32", "8", ""), "table05": ("clip_b32", "8", "table05"), "figure3": ("clip_b32", "8", "table12"),
    "table12": ("clip_b32", "8", "table12"), "table13": ("clip_b32", "8", "table13"),
    **{table: (role, pool, table) for (role, pool), table in PRINTED.items()},
}  # fmt: skip
SEVERAL = ("table02", "table03", "table04", "table14")  # pages of the paper's places that are about more than one role and pool
HEADLINE = ("table01", "figure1")  # pages that `make repro` makes with all they need
KINDS = (
    "csv", "correct.csv", "seen.csv", "references.csv", "drift.csv", "projection.csv", "curves.csv", "scales.csv",
    "settings.json", "run.json",
)  # fmt: skip
SYMBOLS = {"ridge": "λ", "anchor_blend": "ρ", "interpolation": "α", "samples": "images per task, n"}


@cache
def suites() -> dict[str, Any]:
    """What each suite is and how it differs from the paper, from differences.yaml."""
    text = files("reproduction.report").joinpath("differences.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def label(suite: str) -> str:
    """The words that mark a suite's numbers."""
    return suites().get(suite, {}).get("label", f"{suite} suite")


def evidence(page: str, suite: str) -> Evidence:
    """The results a page is about."""
    role, pool, _ = PLACES[page]
    return Evidence(suite, role, pool)


def banner(page: str, suite: str) -> PageOutput:
    """What the numbers below are, and the page's verdicts counted."""
    found = judged([c for c in claims() if c.place == page], suite, main_setting(suite))
    about = suites().get(suite, {}).get("about", f"The suite {suite}.")
    warning = " Compare with the paper by claim, never by value." if suite != "paper" else ""
    head = f"<p><strong>Numbers here: {label(suite)}.</strong> {about}{warning}</p><p>{counts(found)}</p>"
    return PageOutput(f'<div class="fc-card">{head}{counted(page, suite)}</div>')


def verdicts(page: str, suite: str) -> PageOutput:
    """The page's claims, each with what was measured, what the paper prints, and the verdict at every setting of FeatCal."""
    chosen = [c for c in claims() if c.place == page]
    words = {v.claim.id: v.word for v in judged(chosen, suite, main_setting(suite))}
    chosen.sort(key=lambda claim: words[claim.id] == "not run")  # what was run first, otherwise the paper's order
    return PageOutput(verdict_table(chosen, suite, f"What the paper claims here — {label(suite)}"))


def figure(panel: str, page: str, suite: str) -> PageOutput:
    """One panel as a drawing, or a note that it was not run."""
    from reproduction.report import figures  # matplotlib takes a second to import; only pages with figures pay

    return drawn(panel, figures.PANELS[panel](evidence(page, suite)), suite)


def drawn(panel: str, picture: Any, suite: str) -> PageOutput:
    """A drawing as it stands on a page; the note where there is none."""
    from reproduction.report import figures

    if picture is None:
        return PageOutput(note(f"○ not run: no result files for this panel in the {label(suite)}."))
    return PageOutput(picture={"image/svg+xml": figures.svg(picture)}, text=f"{panel} ({label(suite)})")


def settings(page: str, suite: str) -> PageOutput:
    """λ, ρ, α and the draws behind the page, from the settings file beside its results; the paper's in the last column."""
    role, pool, _ = PLACES[page]
    ours = evidence(page, suite)
    used = read_json(ours.folder / f"{role}-{pool}.settings.json").get("calibrate", {})
    head = ["FeatCal on", *SYMBOLS.values(), "seeds"]
    alike: dict[tuple[str, ...], list[str]] = {}  # setting, values and seeds → the mergers that share them
    for run in used.values():
        if run.get("calibration"):
            values = run["calibration"] | run
            shared = (run["setting"], *(compact(values[key]) for key in SYMBOLS), ", ".join(map(str, run["seeds"])))
            alike.setdefault(shared, []).append(tables.MERGERS.get(run["upstream"], run["upstream"]))
    rows = [
        ("", [f"{', '.join(mergers)}<small>{tables.SETTING_LABELS[setting]}</small>", *cells])
        for (setting, *cells), mergers in alike.items()
    ]
    paper = asdict(PAPER_SETTINGS[role]) | {"samples": 256}
    rows.append(("fc-reference", ["the paper, Section 5.1", *(compact(paper[key]) for key in SYMBOLS), "–"]))
    missing = "" if used else note("○ not run: no settings file yet.")
    return PageOutput(table(head, rows, f"Settings — {label(suite)}") + missing)


def differences(suite: str, about: str = "differences", name: str = "Known differences") -> PageOutput:
    """What differs from the paper in this suite, and why.   about: the list of differences.yaml, of images or of `language`."""
    rows = [("", [escape(cell) for cell in entry]) for entry in suites().get(suite, {}).get(about, [])]
    return PageOutput(table(["What", "In the paper", "Here", "Why"], rows, f"{name} — {label(suite)}", "fc-words"))


def known(suite: str) -> PageOutput:
    """The suite's known differences, folded away: they are the same on every page."""
    return PageOutput(fold(f"Everything else in which the {label(suite)} differs from the paper", differences(suite).html))


def provenance(page: str, suite: str) -> PageOutput:
    """Where the page's numbers come from: files, commit, machine, seconds; and the command that makes them again."""
    role, pool, _ = PLACES[page]
    return PageOutput(origin(page, suite, [(role, pool)]))


def origin(page: str, suite: str, runs: list[tuple[str, str]]) -> str:
    """Files, run records and commands behind a page."""
    rows = []
    for role, pool in runs:
        ours = Evidence(suite, role, pool)
        names = [path.name for path in result_files(page, ours)]
        listed = ", ".join(link(f"../results/{suite}/{name}", name) for name in names) or "none yet"
        rows += [("", [f"Results, {place_name(role, pool)}", listed]), *run_rows(ours.run_record)]
    return table(["", ""], rows + commands(page), f"Provenance — {label(suite)}", "fc-words")


def result_files(page: str, ours: Evidence) -> list[Path]:
    """The result files of one role and pool that are there: those of every experiment, and those of the page's own claims."""
    studied = {claim.file for claim in claims() if claim.place == page}
    stem = f"{ours.role}-{ours.pool}"
    listed = {ours.folder / f"{stem}.{kind}" for kind in KINDS}
    listed |= {path for kind in studied for path in ours.folder.glob(f"{stem}.{kind}*")}
    return sorted(path for path in listed if path.is_file())


def commands(page: str) -> list[tuple[str, list[str]]]:
    """The page's source, and what makes its numbers again."""
    source = link(f"../notebooks/{page}.ipynb", f"notebooks/{page}.ipynb")
    whole = "make repro" if page in HEADLINE else "dvc repro"
    again = {"Make everything again": f"<code>{whole}</code>", "This page only": f"<code>dvc repro page@{page}</code>"}
    return [("", [name, cell]) for name, cell in ({"Source of this page": source} | again).items()]


def run_rows(record: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Commit, machine, versions and seconds of one run record."""
    if not record:
        return []
    commit = str(record.get("commit", ""))[:12] + (" with uncommitted changes" if record.get("dirty") else "")
    seconds = record.get("seconds", {})
    total = fold(f"{sum(seconds.values()):.0f} s in {len(seconds)} stage{'s' * (len(seconds) > 1)}", _listed(seconds, " s"))
    cells = {"Commit": escape(commit), "Machine": escape(", ".join(f"{k} {v}" for k, v in record.get("host", {}).items()))}
    cells |= {"Versions": escape(", ".join(f"{k} {v}" for k, v in record.get("versions", {}).items() if v)), "Time": total}
    return [("", [name, cell]) for name, cell in cells.items() if cell]


def _listed(values: dict[str, Any], unit: str) -> str:
    return "<ul>" + "".join(f"<li>{escape(str(k))}: {v}{unit}</li>" for k, v in values.items()) + "</ul>"
