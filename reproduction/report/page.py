"""A page of the book: what it is about, and what stands on every page beside its own table or
figure.

A page on the real encoder (`real`) is the same page about that encoder's results. Everything works
without results.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from reproduction.report import tables
from reproduction.report.claims import Claim, claims
from reproduction.report.evidence import Evidence, read_json, results_folder
from reproduction.report.html import PageOutput, chip, compact, fold, link, note, table
from reproduction.report.paper import (
    EXTENDED,
    IMAGES,
    PAPER_SETTINGS,
    PRINTED,
    REAL,
    TEXT_PRINTED,
    packaged,
    place_name,
)
from reproduction.report.printed import paper_says
from reproduction.report.verdict_table import counts, verdict_table
from reproduction.report.verdicts import sources

Place = tuple[str, str]  # role, pool
HEADLINE = ("table01", "figure1")  # pages that `make repro` makes with all they need
SYMBOLS = {"ridge": "λ", "anchor_blend": "ρ", "interpolation": "α", "samples": "images per task, n"}
B32, L14 = (IMAGES, "8"), ("clip_l14", "8")
EIGHT = ((REAL, "8"), B32, L14)
TEXTS = tuple(TEXT_PRINTED)


@dataclass(frozen=True)
class Topic:
    """What a page is about: its own experiment and those beside it, the printed table with the
    paper's numbers, a study.
    """

    place: Place = B32
    printed: str = ""
    study: str = ""
    beside: tuple[Place, ...] = ()

    @property
    def places(self) -> tuple[Place, ...]:
        """All experiments behind the page, the real encoder's first where it has the same pool."""
        role, pool = self.place
        real = ((REAL, pool),) if role == IMAGES else ()
        return tuple(dict.fromkeys((*real, self.place, *self.beside)))


TOPICS = {
    **{number: Topic(place, number) for place, number in PRINTED.items()},
    "table02": Topic(B32, "table02", beside=((REAL, "14"), (REAL, "20"), *EXTENDED.values())),
    "table03": Topic(TEXTS[0], "table03", beside=TEXTS[1:2]), "table04": Topic(TEXTS[2], "table04", beside=TEXTS[3:]),
    "table14": Topic(TEXTS[2], "table14", beside=TEXTS[3:]), "choices": Topic(TEXTS[0], study="choices", beside=TEXTS[2:3]),
    "table05": Topic(B32, "table05", "cost"), "table12": Topic(B32, "table12", "samples"),
    "table13": Topic(B32, "table13", "samples"), "figure3": Topic(B32, "table12", "samples"),
    "table06": Topic(B32, "table06", "corrupted"), "figure4": Topic(B32, "table06", "corrupted"),
    "field": Topic(B32, study="field"), "beyond": Topic(B32, study="beyond", beside=(TEXTS[0], TEXTS[2])),
    "figure5": Topic(B32, study="sweep"), "theory": Topic(B32, study="theory"),
    "why_adapters": Topic(
        B32, study="task_counts", beside=((REAL, "14"), (REAL, "20"), ("clip_b32", "14"), ("clip_b32", "20"))
    ),
    "tune": Topic(
        B32, study="tune",
        beside=(L14, ("clip_b32", "14"), ("clip_b32", "20"), TEXTS[0], TEXTS[2]),
    ),
    **dict.fromkeys(("figure1", "figure6", "start"), Topic(B32, "table01")),
    **dict.fromkeys(("figure2", "figure7", "rankings", "gain"), Topic(B32, "table01", beside=(L14,))),
    **dict.fromkeys(
        ("landing", "real_encoder", "reproducibility", "compute"),
        Topic(B32, "table01", beside=((REAL, "14"), (REAL, "20"), L14, ("clip_b32", "14"), ("clip_b32", "20"), *TEXTS)),
    ),
    "tasks": Topic(B32, beside=((REAL, "14"), (REAL, "20"), L14, *TEXTS)),
}  # fmt: skip


def suites() -> dict[str, Any]:
    """What each suite is and how it differs from the paper, from differences.yaml."""
    return packaged("differences.yaml")


def label(suite: str) -> str:
    """The words that mark a suite's numbers."""
    return suites().get(suite, {}).get("label", f"{suite} suite")


@dataclass(frozen=True)
class Page:
    """One page in one suite.   role: of whose results, where not of the page's own."""

    name: str
    suite: str
    role: str = ""

    @property
    def topic(self) -> Topic:
        return TOPICS.get(self.name, Topic())

    @property
    def place(self) -> Place:
        """Role and pool of its results."""
        return self.role or self.topic.place[0], self.topic.place[1]

    @property
    def evidence(self) -> Evidence:
        """The results it is about."""
        return Evidence(self.suite, *self.place)

    @property
    def real(self) -> "Page":
        """The same page about the real encoder."""
        return replace(self, role=REAL)

    @property
    def label(self) -> str:
        """The words that mark its numbers."""
        return f"{label('real')}, {label(self.suite)}" if self.role == REAL else label(self.suite)

    @property
    def inputs(self) -> str:
        """What its models are shown."""
        return "texts" if self.role == REAL else "images"

    @property
    def claims(self) -> list[Claim]:
        """The paper's claims at its place; those of a figure that shows a table's numbers are the
        table's.
        """
        if self.name in ("landing", "real_encoder"):
            return [claim for claim in claims() if claim.headline]
        own = [claim for claim in claims() if claim.place == self.name]
        return own or [claim for claim in claims() if claim.place == self.topic.printed]

    def both(self, piece: Callable[["Page"], PageOutput]) -> PageOutput:
        """A piece of the page about the real encoder, and below it about the page's own results."""
        return piece(self.real) + piece(self)

    def banner(self) -> PageOutput:
        """The page's verdicts counted, a line for each source of numbers."""
        lines = []
        for source in sources(self.suite):
            found = [verdict for verdict in source.judged(self.claims) if verdict]
            if found:
                lines.append(f"<p><strong>{source.title}:</strong> {counts(found)}</p>")
        return PageOutput(f'<div class="fc-card">{"".join(lines)}</div>')

    def about(self) -> PageOutput:
        """What the numbers are, and how they may be compared with the paper's."""
        text = suites().get(self.suite, {}).get("about", f"The suite {self.suite}.")
        warning = (
            " Compare with the paper by claim, never by value." if self.suite != "paper" else ""
        )
        real = f" {suites()['real']['about']}" if REAL in dict(self.topic.places) else ""
        head = f"<p><strong>Numbers here: {label(self.suite)}.</strong> {text}{real}{warning}</p>"
        return PageOutput(f'<div class="fc-card">{head}</div>')

    def verdicts(self) -> PageOutput:
        """The page's claims, each with what the paper prints, and by source what was measured and
        the verdict.
        """
        return self.about() + PageOutput(
            verdict_table(self.claims, self.suite, f"What the paper claims here — {self.label}")
        )

    def drawn(self, picture: Any, name: str) -> PageOutput:
        """A drawing as it stands on the page; the note where there is none."""
        return drawn(picture, name, self.label)

    def settings(self) -> PageOutput:
        """λ, ρ, α and the draws behind the page, from the settings file beside its results; the
        paper's in the last row.
        """
        role, pool = self.place
        used = self.evidence.settings().get("calibrate", {})
        head = [
            "FeatCal on",
            *(words.replace("images", self.inputs) for words in SYMBOLS.values()),
            "seeds",
        ]
        alike: dict[
            tuple[str, ...], list[str]
        ] = {}  # setting, values and seeds → the mergers that share them
        for run in used.values():
            if run.get("calibration"):
                values = run["calibration"] | run
                shared = (
                    run["setting"],
                    *(compact(values[key]) for key in SYMBOLS),
                    ", ".join(map(str, run["seeds"])),
                )
                alike.setdefault(shared, []).append(
                    tables.MERGERS.get(run["upstream"], run["upstream"])
                )
        rows = [
            ("", [f"{', '.join(mergers)}<small>{tables.SETTING_LABELS[setting]}</small>", *cells])
            for (setting, *cells), mergers in alike.items()
        ]
        paper = PAPER_SETTINGS[role].model_dump() | {"samples": 256}
        rows.append(
            (
                "fc-reference",
                ["the paper, Section 5.1", *(compact(paper[key]) for key in SYMBOLS), "–"],
            )
        )
        missing = "" if used else note("○ not run: no settings file yet.")
        return PageOutput(table(head, rows, f"Settings — {self.label}") + missing)

    def known(self) -> PageOutput:
        """Known differences of the suite, and of the real encoder where the page shows it, folded
        away.
        """
        about, of = (
            ("language", "the language models of ")
            if self.topic.place in TEXTS
            else ("differences", "")
        )
        words = f"Everything else in which {of}the {label(self.suite)} differ{'' if of else 's'} from the paper"
        real = "real" if REAL in dict(self.topic.places) else ""
        folds = (
            [fold(f"In what the {label(real)} differs from the paper", differences(real).html)]
            if real
            else []
        )
        return PageOutput("".join([*folds, fold(words, differences(self.suite, about).html)]))

    def provenance(self) -> PageOutput:
        """Where the page's numbers come from: files, commit, machine, seconds; and the command that
        makes them again.
        """
        rows = []
        for role, pool in self.topic.places:
            ours = Evidence(self.suite, role, pool)
            named = (
                ", ".join(
                    link(f"../results/{self.suite}/{path}", str(path)) for path in self.files(ours)
                )
                or "none yet"
            )
            record = ours.record(self.topic.study) if self.topic.study else {}
            rows += [
                ("", [f"Results, {place_name(role, pool)}", named]),
                *run_rows(record or ours.run_record),
            ]
        return PageOutput(
            table(["", ""], rows + commands(self.name), f"Provenance — {self.label}", "fc-words")
        )

    def files(self, ours: Evidence) -> list[Path]:
        """The result files of a role and pool that are there, below the suite's folder: scores, and
        those of page and claims.
        """
        kinds = (
            "scores",
            "ablate",
            self.topic.study or "drift",
            *(claim.file for claim in self.claims),
        )
        folders = {ours.beside(kind) for kind in kinds}
        return sorted(
            path.relative_to(ours.folder) for folder in folders for path in folder.glob("*.*")
        )


def drawn(picture: Any, name: str, whose: str) -> PageOutput:
    """A figure as SVG, or a note that there is nothing to draw.   whose: the label of its
    results.
    """
    if picture is None:
        return PageOutput(note(f"○ not run: no {name} in the results of the {whose}."))
    from reproduction.report.figures import (
        svg,
    )  # matplotlib takes a second to import; only pages with figures pay

    return PageOutput(picture={"image/svg+xml": svg(picture)}, text=f"{name} ({whose})")


def differences(
    suite: str, about: str = "differences", name: str = "Known differences"
) -> PageOutput:
    """What differs from the paper in this suite, and why.   about: the list of differences.yaml, of
    images or of `language`.
    """
    rows = [
        ("", [escape(cell) for cell in entry]) for entry in suites().get(suite, {}).get(about, [])
    ]
    return PageOutput(
        table(["What", "In the paper", "Here", "Why"], rows, f"{name} — {label(suite)}", "fc-words")
    )


def commands(page: str) -> list[tuple[str, list[str]]]:
    """The page's source, and what makes its numbers again."""
    source = link(f"../notebooks/{page}.ipynb", f"notebooks/{page}.ipynb")
    whole = "make repro" if page in HEADLINE else "dvc repro"
    again = {
        "Make everything again": f"<code>{whole}</code>",
        "This page only": f"<code>dvc repro page@{page}</code>",
    }
    again |= {"Real encoder, and what goes beyond the paper": "<code>make studies</code>"}
    return [("", [name, cell]) for name, cell in ({"Source of this page": source} | again).items()]


def run_rows(record: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Commit, machine, versions and seconds of one run record."""
    if not record:
        return []
    commit = str(record.get("commit", ""))[:12] + (
        " with uncommitted changes" if record.get("dirty") else ""
    )
    seconds = record.get("seconds", {})
    total = fold(
        f"{sum(seconds.values()):.0f} s in {len(seconds)} stage{'s' * (len(seconds) > 1)}",
        _listed(seconds, " s"),
    )
    cells = {
        "Commit": escape(commit),
        "Machine": escape(", ".join(f"{k} {v}" for k, v in record.get("host", {}).items())),
    }
    cells |= {
        "Versions": escape(
            ", ".join(f"{k} {v}" for k, v in record.get("versions", {}).items() if v)
        ),
        "Time": total,
    }
    return [("", [name, cell]) for name, cell in cells.items() if cell]


def _listed(values: dict[str, Any], unit: str) -> str:
    return (
        "<ul>"
        + "".join(f"<li>{escape(str(k))}: {v}{unit}</li>" for k, v in values.items())
        + "</ul>"
    )


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
