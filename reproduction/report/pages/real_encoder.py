"""Build the page on real models: two sentence encoders, their text sets, and other experts."""

from collections import Counter
from collections.abc import Iterator
from html import escape

import pandas as pd

from reproduction.report.claims import claims
from reproduction.report.evidence import Evidence, select
from reproduction.report.html import PageOutput, estimated, note, table
from reproduction.report.paper import REAL, paper_value, texts
from reproduction.report.statistics import estimate, noise
from reproduction.report.tables import MERGERS, REFERENCES, SHIFT, Key, average
from reproduction.report.verdicts import DECIDED, sources

POOLS = ("8", "14", "20")
WAYS = {
    ("featcal", "paper"): "FeatCal, printed settings",
    ("featcal", "suite"): "FeatCal, tuned on validation rows",
    ("surgery", "paper"): "Surgery, published size",
    ("surgery", "suite"): "Surgery, in proportion",
    ("prob_surgery", "paper"): "ProbSurgery, published size",
    ("prob_surgery", "suite"): "ProbSurgery, in proportion",
    (SHIFT, "suite"): "mean shift",
}


def lines() -> Iterator[tuple[str, Key]]:
    """Yield the names and keys of references, mergers, and what was run after each merger."""
    for method, name in REFERENCES.items():
        yield name, ("", method, "")
    for merger, name in MERGERS.items():
        yield name, (merger, "merged", "")
        for (method, setting), words in WAYS.items():
            yield f"w/ {words}", (merger, method, setting)


def averages(suite: str) -> PageOutput:
    """List the averages of both encoders, with the change against the merger."""
    ours, rows = Evidence(suite, REAL, "8"), []
    for name, key in lines():
        found = [average(ours, key, file) for file in ("scores", "second_encoder")]
        if not any(found):
            continue
        cells = []
        for one, file in zip(found, ("scores", "second_encoder"), strict=True):
            start = average(ours, (key[0], "merged", ""), file) if key[1] != "merged" else None
            change = (
                f"<small>{one.mean - start.mean:+.1f} ± {noise(one, start):.1f}</small>"
                if one and start
                else ""
            )
            cells.append(estimated(one) + change)
        printed = paper_value("table01", key[0], key[1]) if key[2] in ("", "paper") else None
        rows.append(
            (
                "fc-merger" if key[1] == "merged" else "",
                [name, *cells, "–" if printed is None else f"{printed:.1f}"],
            )
        )
    if not rows:
        return PageOutput(note("○ not run: no scores of a real encoder with 8 tasks."))
    caption = "Average accuracy (%) on 8 text tasks; small: change against the merger ± two standard errors"
    return PageOutput(
        table(["", "MiniLM", "MPNet", "The paper, CLIP ViT-B/32"], rows, caption, "fc-long")
    )


def seeds(suite: str) -> PageOutput:
    """List the averages from experts of other seeds: how far another fine-tuning moves each model."""
    ours, rows = Evidence(suite, REAL, "8"), []
    found = ours.table("expert_seeds")
    drawn = sorted(set(found["expert_seed"]))
    for name, key in lines():
        own = select(found, dict(zip(("upstream", "method", "setting"), key, strict=True)))
        first = average(ours, key)
        if len(own) and first:
            means = pd.Series([first.mean, *own.groupby("expert_seed")["value"].mean()[drawn]])
            cells = [f"{mean:.1f}" for mean in (*means, means.mean(), means.std(ddof=1))]
            rows.append(("fc-merger" if key[1] == "merged" else "", [name, *cells]))
    if not rows:
        return PageOutput(note("○ not run: no experts of other seeds."))
    head = ["", "First experts", *(f"Seed {seed}" for seed in drawn), "Mean", "sd"]
    return PageOutput(
        table(head, rows, "MiniLM: average accuracy (%) by the experts’ seed", "fc-long")
    )


def agreement(suite: str) -> PageOutput:
    """Count the claims that real encoder and synthetic models decide alike, and differently."""
    judged = {source.key: source.judged(claims()) for source in sources(suite)}
    real, drawn = judged["real_encoder"], judged[suite]
    words = Counter((r.word, d.word) for r, d in zip(real, drawn, strict=True) if r and d)
    rows = [
        ("", [f"real: {one}", *(str(words[one, other]) for other in DECIDED)]) for one in DECIDED
    ]
    head = ["Claims decided by both", *(f"synthetic: {word}" for word in DECIDED)]
    return PageOutput(table(head, rows, "Verdicts on the same claims by both sources"))


def sets(suite: str) -> PageOutput:
    """List the text sets: what one reads, classes, licence and source, and what base and expert score."""
    rows, tables = [], [Evidence(suite, REAL, pool).table("scores") for pool in POOLS]
    for number, (task, facts) in enumerate(texts().items(), start=1):
        pool = next(pool for pool in POOLS if number <= int(pool))
        scores = next((one for one in tables if task in set(one["task"])), tables[0])
        own = [
            estimated(estimate(select(scores, {"task": task, "method": m})))
            for m in ("base", "expert")
        ]
        name = f"{escape(facts['name'])}<small>{escape(facts['says'])}</small>"
        source = f"{escape(facts['licence'])}<small>{escape(facts['source'])}</small>"
        rows.append(("", [name, str(facts["classes"]), pool, *own, source]))
    head = ["Set", "Classes", "From pool", "Base (%)", "Expert (%)", "Licence and source"]
    return PageOutput(table(head, rows, "The text sets, MiniLM on their test texts", "fc-words"))
