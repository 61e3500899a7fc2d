"""The one-liners of the front pages: the abstract's claims, all verdicts counted, what was run; and
the suite's own tasks.

Like show.py, every function works without results.
"""

import base64
import io
from collections import Counter
from collections.abc import Iterable
from html import escape
from itertools import product

from reproduction.report import tables
from reproduction.report.choice import ranges_met
from reproduction.report.claims import GROUPS, claims
from reproduction.report.evidence import Evidence, read_json, results_folder, suite_record
from reproduction.report.html import PageOutput, chip, estimated, fold, note, table
from reproduction.report.page import EIGHT, TOPICS, label, suites
from reproduction.report.pages.language import MERGER
from reproduction.report.paper import (
    IMAGES,
    PRINTED,
    REAL,
    TASKS,
    TEXT_PRINTED,
    paper_value,
    place_name,
)
from reproduction.report.verdict_table import counts, verdict_table
from reproduction.report.verdicts import WORDS, Source, sources
from reproduction.report.verdicts import groups as count_groups
from reproduction.report.verdicts import tables as count_table

RUNS = {place: place_name(*place) for place in EIGHT}
KINDS = (
    "Section",
    "Table",
    "Figure",
    "Theory",
    "Appendix",
)  # order in which places of the paper are counted
SHEET_BYTES = 150_000  # a page may have 300 KB, and base64 adds a third
RULE = "base 40–55 · experts at least 85 · mergers 8–20 above the base and at least 20 below the experts"


def headline(suite: str) -> PageOutput:
    """The verdicts of the headline set counted by source, and what each source is."""
    chosen = [claim for claim in claims() if claim.headline]
    text = f"<p><strong>{len(chosen)} claims of the paper’s text, and what each source of numbers here says of them.</strong></p>"
    for source in sources(suite):
        found = [verdict for verdict in source.judged(chosen) if verdict]
        lacking = (
            f", {len(chosen) - len(found)} without a counterpart in texts"
            if len(found) < len(chosen)
            else ""
        )
        about = (
            suites()
            .get("real" if source.real else source.suite, {})
            .get("about", f"The suite {source.suite}.")
        )
        text += f"<p><strong>{source.title}</strong>{lacking}: {counts(found)}<br><small>{about}</small></p>"
    return PageOutput(f'<div class="fc-card">{text}</div>')


def abstract(suite: str) -> PageOutput:
    """The abstract's claims with the paper's numbers, beside what the suite shows."""
    chosen = [c for c in claims() if c.abstract]
    return PageOutput(verdict_table(chosen, suite, f"The abstract’s claims — {label(suite)}"))


def group_counts(suite: str) -> PageOutput:
    """Verdicts of the headline set by group, and of the theorems checked numerically, of every
    source.
    """
    return PageOutput("".join(map(_group_counts, sources(suite))))


def _group_counts(source: Source) -> str:
    frame = count_groups(source)
    unsure = source.judged([claim for claim in claims() if claim.headline])
    met = Counter(v.claim.group for v in unsure if v and v.word == "one run" and v.met)
    *rows, theory = [(name, frame.loc[name], met[name]) for name in frame.index]
    rows.append(("headline set", frame.iloc[:-1].sum(), met.total()))
    body = []
    for name, found, pointing in [*rows, theory]:
        cells = dict(zip(WORDS, _numbers(found), strict=True))
        cells["one run"] += f"<small>{pointing} as claimed</small>" if found["one run"] else ""
        body.append(("fc-total" if name == "headline set" else "", [name, *cells.values()]))
    return table(
        ["Claims", *map(chip, WORDS)],
        body,
        f"The headline set, counted — {source.title}",
        "fc-counts",
    )


def headlines(suite: str) -> PageOutput:
    """The headline set one by one, group after group."""
    chosen = sorted(
        (claim for claim in claims() if claim.headline), key=lambda claim: GROUPS.index(claim.group)
    )
    return PageOutput(
        fold(
            f"The {len(chosen)} claims, one by one",
            verdict_table(chosen, suite, f"The headline set — {label(suite)}"),
        )
    )


def _numbers(found: Iterable[int]) -> list[str]:
    return [str(n) if n else "·" for n in found]


def verdict_counts(suite: str) -> PageOutput:
    """Verdicts per table and figure of the paper, at the suite's main settings, of every source."""
    return PageOutput("".join(map(_verdict_counts, sources(suite))))


def _verdict_counts(source: Source) -> str:
    frame = count_table(source)
    rows = [
        ("", [place_link(place), *_numbers(frame.loc[place])])
        for place in sorted(frame.index, key=_order)
    ]
    rows.append(("fc-total", ["all", *(str(n) for n in frame.sum())]))
    return table(
        ["In the paper", *map(chip, WORDS)], rows, f"Verdicts counted — {source.title}", "fc-counts"
    )


def _order(place: str) -> tuple[int, int]:
    """Where a place of the paper stands in the list: by kind, then by number."""
    kind = place.rstrip("0123456789")
    return KINDS.index(kind.title()), int(place[len(kind) :] or 0)


def place_link(place: str) -> str:
    """A place of the paper by its name ("Table 1"), linked to its page where it has one."""
    kind = place.rstrip("0123456789")
    name = " ".join([kind.title(), *(str(int(n)) for n in [place[len(kind) :]] if n)])
    return f'<a href="{place}.html">{name}</a>' if place in TOPICS else name


def runs(suite: str) -> PageOutput:
    """What was re-run: of every experiment the references, its mergers before and after, each row
    at a setting of its own.
    """
    rows, shown = [], tables.settings_shown
    for (role, pool), name in RUNS.items():
        rows += [
            _run(suite, role, pool, upstream, at, name)
            for upstream in tables.UPSTREAMS
            for at in shown(suite, pool)
        ]
    for role, pool in TEXT_PRINTED:
        name = place_name(role, pool)
        rows += [_run(suite, role, pool, MERGER, at, name) for at in shown(suite, pool)]
    head = ["Merger", "Base", "Merged", "FeatCal", "Experts", "Gap recovered", "Seeds"]
    return PageOutput(
        table(head, rows, f"Average score (%) on test images and texts — {label(suite)}", "fc-long")
    )


def _run(
    suite: str, role: str, pool: str, upstream: str, setting: str, name: str
) -> tuple[str, list[str]]:
    """One merger with FeatCal at one setting; experts only where each has one task, and the share
    from this row's own cells.
    """
    keys = (
        ("", "base", ""),
        (upstream, "merged", ""),
        (upstream, "featcal", setting),
        ("", "expert", ""),
    )
    found = [tables.average(Evidence(suite, role, pool), key) for key in keys]
    share = tables.share(*(e and e.mean for e in found[1:]))
    line = f"{tables.UPSTREAMS[upstream]}<small>{name}, {tables.SETTING_LABELS[setting]}</small>"
    seeds = str(found[2].seeds) if found[2] else '<span class="fc-none">not run</span>'
    return "", [line, *map(estimated, found), "–" if share is None else f"{share:.0f} %", seeds]


def own_checkpoints(suite: str) -> PageOutput:
    """Whether any number of the paper's own checkpoints was re-run, in this suite or another, and
    what that takes.
    """
    if any(Evidence("paper", role, pool).was_run for role, pool in PRINTED | TEXT_PRINTED):
        return PageOutput(
            note(
                "Numbers of the paper’s own checkpoints are in the results of the suite <code>paper</code>."
            )
        )
    text = (
        "<strong>No number of the paper’s own checkpoints has been re-run here</strong>, so nothing in this book confirms or "
        "refutes a printed value. Those checkpoints and the public data sets are downloaded from the Hugging Face hub, which was "
        "out of reach of the runs behind this book, and models of that size want a GPU. What it takes: <code>suite: paper</code> "
        "as the first line of <code>params.yaml</code>, a connection, a GPU, and for the Llamas their publisher’s consent; "
        "<code>featcal doctor --suite paper</code> says what is missing on a machine."
    )
    return PageOutput(note(text))


def task_list(suite: str) -> PageOutput:
    """Every task of the suite: what it stands for, what one sees, how many classes and images."""
    tasks = suite_record(suite).get("tasks", [])
    if not tasks:
        return PageOutput(note(f"○ not run: no suite.json in the results of the {label(suite)}."))
    rows = []
    for task in tasks:
        classes = [str(c) for c in task.get("classes", [])]
        name = task.get("paper_name") or TASKS.get(task["task"], task["task"])
        counts = [
            task.get(split) for split in ("train", "validation", "test")
        ]  # unknown where the images are the user's
        count = " / ".join("–" if value is None else str(value) for value in counts)
        words = fold(f"{len(classes)} classes", escape(", ".join(classes)))
        rows.append(("", [escape(name), escape(task.get("description", "")), words, count]))
    head = ["Stands for", "What one sees", "Classes", "Train / validation / test images"]
    return PageOutput(table(head, rows, f"Tasks — {label(suite)}", "fc-words"))


def contact_sheet(suite: str) -> PageOutput:
    """One row of test-like pictures per task, in the order of the list; made smaller where it would
    swell the page.
    """
    path = results_folder(suite) / "contact_sheet.png"
    if not path.is_file():
        return PageOutput(
            note(f"○ not run: no contact sheet in the results of the {label(suite)}.")
        )
    data = path.read_bytes()
    small = len(data) <= SHEET_BYTES
    picture = {
        "image/png" if small else "image/jpeg": base64.b64encode(
            data if small else _smaller(data)
        ).decode()
    }
    return PageOutput(picture=picture, text=f"contact sheet ({label(suite)})")


def _smaller(data: bytes) -> bytes:
    """The picture as JPEG of at most SHEET_BYTES: first less quality, then fewer pixels."""
    from PIL import Image

    picture = Image.open(io.BytesIO(data)).convert("RGB")
    for shrink, quality in product((1.0, 0.8, 0.65, 0.5, 0.35, 0.25), (88, 75, 60)):
        out, size = io.BytesIO(), (int(picture.width * shrink), int(picture.height * shrink))
        picture.resize(size, Image.Resampling.LANCZOS).save(out, "JPEG", quality=quality)
        if out.tell() <= SHEET_BYTES:
            break
    return out.getvalue()


def ranges(suite: str) -> PageOutput:
    """Whether test samples meet the ranges that the drawn images were chosen by on validation
    images; beside it the paper's.
    """
    rows, chosen = [], read_json(results_folder(suite) / "choice.json")
    for (role, pool), name in RUNS.items():
        ours = Evidence(suite, role, pool)
        keys = [("", "base"), ("average", "merged"), ("task_arithmetic", "merged"), ("", "expert")]
        found = [tables.average(ours, (*key, ""), "references") for key in keys]
        ruled = chosen and role != REAL and None not in found
        rows.append(
            (
                "",
                [
                    name,
                    *map(estimated, found),
                    ranges_met(*([e.mean] for e in found if e)) if ruled else "–",
                ],
            )
        )
        printed = PRINTED[IMAGES if role == REAL else role, pool]
        values = [paper_value(printed, *key) for key in keys]
        shown = ["–" if v is None else f"{v:.1f}" for v in values]
        rows.append(("fc-reference", [f"the paper, Table {int(printed[-2:])}", *shown, ""]))
    head = ["", "Base", "Simple averaging", "Task arithmetic", "Experts", "Ranges"]
    rule = f"Ranges, of drawn images: {RULE}" if chosen else "Its models were not chosen by ranges."
    return PageOutput(
        table(
            head,
            rows,
            f"Average top-1 accuracy (%) on test images and texts — {label(suite)}. {rule}",
        )
    )
