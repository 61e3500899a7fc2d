"""What the real encoder teaches beside the drawn suite: its text sets, both beside the paper, and
where they disagree.

Every sentence is made from the results it speaks of.
"""

from collections import Counter
from collections.abc import Mapping
from html import escape

import pandas as pd

from reproduction.report.claims import Claim, claims, main_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.html import PageOutput, estimated, margin, note, table
from reproduction.report.page import Page, label
from reproduction.report.paper import IMAGES, REAL, paper_value, texts
from reproduction.report.statistics import estimate
from reproduction.report.tables import (
    METHODS,
    REFERENCES,
    SETTING_LABELS,
    SHIFT,
    UPSTREAMS,
    average,
    settings_shown,
)
from reproduction.report.task_counts import drifts
from reproduction.report.verdict_table import verdict_table
from reproduction.report.verdicts import Verdict, sources

DECIDED = ("holds", "does not hold")
POOLS = ("8", "14", "20")
SHARE_ALIKE = "BY-SA"
CLOSED_FORM = {
    "wudi_closed_form": "WUDI-Merging, closed form"
}  # in the place of its gradient steps, which take long

Line = tuple[
    str, str, str, tuple[str, str]
]  # name, merger, method, its setting with the real encoder and on drawn images


def sets(page: Page) -> PageOutput:
    """The text sets: what one reads, classes, licence and source, and what base and expert make of
    each.
    """
    rows = []
    ours = [Evidence(page.suite, REAL, pool) for pool in POOLS]
    for number, (task, told) in enumerate(texts().items(), start=1):
        pool = next(pool for pool in POOLS if number <= int(pool))
        scores = next(
            (e.table("scores") for e in ours if task in set(e.table("scores")["task"])),
            ours[0].table("scores"),
        )
        own = [
            estimated(estimate(select(scores, {"task": task, "method": method})))
            for method in ("base", "expert")
        ]
        alike = "<small>share-alike</small>" if SHARE_ALIKE in told["licence"] else ""
        source = f"{escape(told['licence'])}{alike}<small>{escape(told['source'])}</small>"
        name = f"{escape(told['name'])}<small>{escape(told['says'])}</small>"
        rows.append(("", [name, str(told["classes"]), pool, *own, source]))
    head = ["Set", "Classes", "From pool", "Base (%)", "Expert (%)", "Licence and source"]
    return PageOutput(
        table(head, rows, f"The text sets, scored on test texts — {page.real.label}", "fc-words")
    )


def lines(suite: str, upstreams: Mapping[str, str] = UPSTREAMS) -> list[Line]:
    """References, mergers and what calibrates them, in the tables' order, with the settings that
    each source has of it.
    """
    main, *others = settings_shown(suite)
    found: list[Line] = [(name, "", m, ("", "")) for m, name in REFERENCES.items()]
    for upstream, name in upstreams.items():
        found.append((name, upstream, "merged", ("", "")))
        found += [
            (f"w/ FeatCal, {SETTING_LABELS[at]}", upstream, "featcal", (at, at))
            for at in (main, *others)
        ]
        for method in (*[m for m in METHODS if m != "featcal"], SHIFT):
            words = METHODS.get(method, "w/ mean shift")
            found.append(
                (f"{words}, on unlabelled rows that are not scored", upstream, method, (main, ""))
            )
            found.append(
                (
                    f"{words}, on test rows that are scored",
                    upstream,
                    method,
                    (f"{main}_scored", main),
                )
            )
            found.append(
                (f"{words}, on training rows", upstream, method, (f"{main}_train", f"{main}_train"))
            )
    return found


def averages(page: Page) -> PageOutput:
    """Averages of references, mergers and what calibrates them: the real encoder, drawn images, the
    paper's printed ones.
    """
    rows = []
    for name, upstream, method, settings in lines(page.suite):
        keys = zip((REAL, IMAGES), settings, strict=True)
        found = [
            average(Evidence(page.suite, role, "8"), (upstream, method, setting))
            for role, setting in keys
        ]
        if any(found):
            told = found[1] and settings[1] in ("", main_setting(page.suite))
            printed = paper_value("table01", upstream, method) if told else None
            cells = [*map(estimated, found), "–" if printed is None else f"{printed:.1f}"]
            rows.append(("fc-merger" if method == "merged" else "", [name, *cells]))
    if not rows:
        return PageOutput(note(f"○ not run: no scores with 8 tasks in the {label(page.suite)}."))
    head = ["", *(source.title for source in sources(page.suite)[:2]), "The paper, as printed"]
    return PageOutput(
        table(head, rows, f"Average top-1 accuracy (%) with 8 tasks — {page.real.label}", "fc-long")
    )


def verdicts(page: Page) -> list[tuple[Claim, Verdict, Verdict]]:
    """Every claim that both sources were run on, with the verdict of the real encoder and of the
    drawn suite.
    """
    real, drawn = (source.judged(claims()) for source in sources(page.suite)[:2])
    found = zip(claims(), real, drawn, strict=True)
    return [(c, r, d) for c, r, d in found if r and d and "not run" not in (r.word, d.word)]


def agreement(page: Page) -> PageOutput:
    """How often both sources say the same of a claim, in a sentence; and the claims on which they
    disagree, in a table.
    """
    found = verdicts(page)
    if not found:
        return PageOutput(
            note(f"○ not run: no claim was tested on both sources of the {label(page.suite)}.")
        )
    both = [(c, r, d) for c, r, d in found if r.word in DECIDED and d.word in DECIDED]
    words = Counter((r.word, d.word) for _, r, d in both)
    apart = [c for c, r, d in both if r.word != d.word]
    text = (
        f"{len(found)} claims were tested on both. On {len(both)} of them both decide: {words['holds', 'holds']} hold on both, "
        f"{words['does not hold', 'does not hold']} on neither, {words['holds', 'does not hold']} on the real encoder only, "
        f"{words['does not hold', 'holds']} on drawn images only."
    )
    listed = (
        verdict_table(
            apart, page.suite, "Claims on which the real encoder and the drawn suite disagree"
        )
        if apart
        else ""
    )
    return PageOutput(note(text) + listed)


def why(page: Page) -> PageOutput:
    """What tells the sources apart: headroom, and how much of the merged model's drift one shift
    per task is.
    """
    rows = []
    for role, source in zip((REAL, IMAGES), sources(page.suite), strict=False):
        ours = Evidence(page.suite, role, "8")
        keys = (("", "base", ""), ("task_arithmetic", "merged", ""), ("", "expert", ""))
        base, merged, expert = (average(ours, key) for key in keys)
        parts = {
            row.method: row for row in drifts(page.real if role == REAL else page).itertuples()
        }
        shift = average(ours, ("task_arithmetic", SHIFT, f"{main_setting(page.suite)}_train"))
        start = parts.get("merged")
        part = f"{100 * start.mean_drift / start.drift:.0f} %" if start else "–"
        taken = f"{shift.mean - merged.mean:+.1f}" if shift and merged else "–"
        rows.append(("", [source.title, *map(estimated, (base, merged, expert)), part, taken]))
    head = [
        "",
        "Base",
        "Task arithmetic",
        "Experts",
        "Of its squared drift, per-task mean",
        "A mean shift gains (points)",
    ]
    return PageOutput(
        table(head, rows, f"What one shift per task can do, 8 tasks — {page.real.label}", "fc-long")
    )


def second(page: Page) -> PageOutput:
    """Averages with a second encoder beside the first one's, and how FeatCal stands to each line of
    its merger.
    """
    ours, rows = page.real.evidence, []
    for name, upstream, method, (setting, _) in lines(page.suite, UPSTREAMS | CLOSED_FORM):
        key = (upstream, method, setting)
        here, first = average(ours, key, "second_encoder"), average(ours, key)
        if here is not None:
            featcal = (upstream, "featcal", main_setting(page.suite))
            calibrated = average(ours, featcal, "second_encoder") if upstream else None
            lead = margin(calibrated, here) if calibrated and key != featcal else "–"
            cells = [estimated(here), estimated(first), lead]
            rows.append(("fc-merger" if method == "merged" else "", [name, *cells]))
    if not rows:
        way_out = "dvc repro pipeline/request/dvc.yaml:request@second_encoder-minilm-8"
        return PageOutput(
            note(
                f"○ not run in the {label(page.suite)}; it is made on request: <code>{way_out}</code>."
            )
        )
    head = ["", "Second encoder", "First encoder", "Second encoder: FeatCal above it (points)"]
    return PageOutput(
        table(head, rows, f"Average top-1 accuracy (%) with 8 tasks — {page.real.label}", "fc-long")
    )


def seeds(page: Page) -> PageOutput:
    """Averages of every model from experts of other seeds: how far another fine-tuning moves them,
    and FeatCal's lead.
    """
    ours, rows = page.real.evidence, []
    found = ours.table("expert_seeds")
    drawn = sorted(set(found["expert_seed"]))
    for name, upstream, method, (setting, _) in lines(page.suite):
        own = select(found, {"upstream": upstream, "method": method, "setting": setting})
        first = average(ours, (upstream, method, setting))
        if own.empty or first is None:
            continue
        means = pd.Series([first.mean, *own.groupby("expert_seed")["value"].mean()[drawn]])
        cells = [f"{mean:.1f}" for mean in (*means, means.mean(), means.std(ddof=1))]
        rows.append(("fc-merger" if method == "merged" else "", [name, *cells]))
    if not rows:
        return PageOutput(note(f"○ not run: no experts of other seeds in the {label(page.suite)}."))
    head = ["", "First experts", *(f"Experts of seed {seed}" for seed in drawn), "Mean", "sd"]
    caption = f"Average top-1 accuracy (%) with 8 tasks, by the experts’ seed — {page.real.label}"
    return PageOutput(table(head, rows, caption, "fc-long"))
