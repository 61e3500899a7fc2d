"""Build the page on real models: two sentence encoders and an image model, their sets, and other experts."""

import math
from collections import Counter
from collections.abc import Iterator
from html import escape
from statistics import fmean, stdev
from typing import Any

import pandas as pd

from reproduction.report.claims import claims
from reproduction.report.evidence import Evidence, select
from reproduction.report.html import PageOutput, change, estimated, listed
from reproduction.report.paper import REAL, VISION, paper_value, photos, texts
from reproduction.report.statistics import estimate, lead
from reproduction.report.tables import MERGERS, REFERENCES, SHIFT, Key, average, rows_of
from reproduction.report.verdicts import DECIDED, sources

POOLS = ("8", "14", "20")
WAYS = {
    ("featcal", "auto"): "FeatCal, default", ("featcal", "paper"): "FeatCal, printed settings",
    ("featcal", "suite"): "FeatCal, tuned on validation rows",
    ("surgery", "paper"): "Surgery, published size", ("surgery", "paper_train"): "Surgery, published size, FeatCal’s samples",
    ("surgery", "suite"): "Surgery, in proportion", ("prob_surgery", "paper"): "ProbSurgery, published size",
    ("prob_surgery", "paper_train"): "ProbSurgery, published size, FeatCal’s samples",
    ("prob_surgery", "suite"): "ProbSurgery, in proportion", (SHIFT, "suite"): "mean shift",
}  # fmt: skip


def lines() -> Iterator[tuple[str, Key]]:
    """Yield the names and keys of references, mergers, and what was run after each merger."""
    for method, name in REFERENCES.items():
        yield name, ("", method, "")
    for merger, name in MERGERS.items():
        yield name, (merger, "merged", "")
        for (method, setting), words in WAYS.items():
            yield f"w/ {words}", (merger, method, setting)


def averages(suite: str) -> PageOutput:
    """List the averages of all real models, with the change against the merger."""
    texts_8, images = Evidence(suite, REAL, "8"), Evidence(suite, VISION, "8")
    models, rows = ((images, "scores"), (texts_8, "scores"), (texts_8, "second_encoder")), []
    for name, key in lines():
        found = [average(ours, key, file) for ours, file in models]
        if key[1] == SHIFT:  # an adapter without settings, run beside either of FeatCal’s
            found[0] = average(images, (key[0], SHIFT, "paper"))
        if key[2] == "auto":  # of its study, which has MiniLM's own samples
            found[0] = average(images, key, "default")
        if not any(found):
            continue
        cells = []
        for one, (ours, file) in zip(found, models, strict=True):
            start = average(ours, (key[0], "merged", ""), file) if key[1] != "merged" else None
            small = f"<small>{change(one, start)}</small>" if one and start else ""
            cells.append(estimated(one) + small)
        printed = paper_value("table01", key[0], key[1]) if key[2] in ("", "paper") else None
        cells.append("–" if printed is None else f"{printed:.1f}")
        rows.append(("fc-merger" if key[1] == "merged" else "", [name, *cells]))
    caption = (
        "Average accuracy (%) on 8 tasks; small: change against the merger ± two standard errors"
    )
    head = ["", "ViT-S/14, images", "MiniLM, texts", "MPNet, texts", "The paper, CLIP ViT-B/32"]
    return listed(head, rows, caption, "fc-long", "no scores of a real model with 8 tasks")


def seeds(suite: str) -> PageOutput:
    """List the averages from experts of other seeds, and FeatCal's margins with the experts' part of
    the error: the variance s²/S over S sets of experts is added to that of the first set.
    """
    ours, rows = Evidence(suite, REAL, "8"), []
    found = ours.table("expert_seeds")
    drawn = sorted(set(found["expert_seed"]))
    for name, key in lines():
        means = _by_expert_seed(ours, key)
        if not means:
            continue
        cells = [f"{mean:.1f}" for mean in (*means, fmean(means), stdev(means))]
        best = (key[0], "featcal", "suite")
        margins = [a - b for a, b in zip(_by_expert_seed(ours, best), means, strict=False)]
        left, right = average(ours, best), average(ours, key)
        if key[0] and key[1] != "featcal" and margins and left and right:
            room = math.hypot(lead(left, right)[1], 2 * stdev(margins) / math.sqrt(len(margins)))
            cells.append(f"{fmean(margins):+.1f} ± {room:.1f}")
        else:
            cells.append("")
        rows.append(("fc-merger" if key[1] == "merged" else "", [name, *cells]))
    head = ["", "First experts", *(f"Seed {seed}" for seed in drawn), "Mean", "sd"]
    head.append("FeatCal, tuned, minus this ± 2 SE")
    caption = "MiniLM: average accuracy (%) by the experts’ seed"
    return listed(head, rows, caption, "fc-long", "no experts of other seeds")


def _by_expert_seed(ours: Evidence, key: Key) -> list[float]:
    """Return the average of one row with the first experts and with each other set of experts."""
    own, first = rows_of(ours, key, "expert_seeds"), average(ours, key)
    if own.empty or first is None:
        return []
    return [first.mean, *own.groupby("expert_seed")["value"].mean()]


def agreement(suite: str) -> PageOutput:
    """Count the claims that real encoder and synthetic models decide alike, and differently."""
    judged = {source.key: source.judged(claims()) for source in sources(suite)}
    pairs = zip(judged["real_encoder"], judged[suite], strict=True)
    words = Counter((real.word, other.word) for real, other in pairs if real and other)
    rows = [[f"real: {one}", *(str(words[one, other]) for other in DECIDED)] for one in DECIDED]
    head = ["Claims decided by both", *(f"synthetic: {word}" for word in DECIDED)]
    return listed(head, rows, "Verdicts on the same claims by both sources")


def sets(suite: str) -> PageOutput:
    """List the sets: what one sees, classes, licence and source, and what base and expert score."""
    tables = [Evidence(suite, REAL, pool).table("scores") for pool in POOLS]
    rows = [_set(facts, task, tables) for task, facts in texts().items()]
    images = [Evidence(suite, VISION, "8").table("scores")]
    rows += [_set(facts, task, images) for task, facts in photos().items()]
    head = ["Set", "Classes", "Base (%)", "Expert (%)", "Licence and source"]
    caption = "The text sets, MiniLM on their test texts, and the image sets, ViT-S/14"
    return listed(head, rows, caption, "fc-words")


def _set(facts: dict[str, Any], task: str, tables: list[pd.DataFrame]) -> list[str]:
    """Return the row of one set, with scores from the first table that has it."""
    scores = next((one for one in tables if task in set(one["task"])), tables[0])
    own = [estimate(select(scores, {"task": task, "method": m})) for m in ("base", "expert")]
    name = f"{escape(facts['name'])}<small>{escape(facts['says'])}</small>"
    source = f"{escape(facts['licence'])}<small>{escape(facts['source'])}</small>"
    return [name, str(facts["classes"]), *map(estimated, own), source]
