"""Build the page on real models: two sentence encoders, an image model and a language model, their sets, and other
experts.
"""

import math
from collections.abc import Iterator
from html import escape
from itertools import product
from statistics import fmean, stdev

import pandas as pd

from reproduction.report.evidence import Evidence, read_json, select
from reproduction.report.html import PageOutput, TableRow, change, estimated, listed
from reproduction.report.paper import LANGUAGE, REAL, VISION, paper_value, photos, texts
from reproduction.report.statistics import TRAINED, Estimate, estimate, lead
from reproduction.report.tables import (
    MERGERS,
    REFERENCES,
    SHIFT,
    Key,
    average,
    rows_of,
    settings_of,
)
from reproduction.results import GREEDY, PLAIN, project_root

WAYS = {
    ("featcal", "auto"): "w/ FeatCal, default", ("featcal", "paper"): "w/ FeatCal, printed", ("featcal", "paper_8b"): "w/ FeatCal, λ 3",
    ("featcal", "suite"): "w/ FeatCal, tuned", ("surgery", "paper"): "w/ Surgery", ("surgery", "paper_train"): "w/ Surgery, FeatCal’s samples",
    ("surgery", "suite"): "w/ Surgery, smaller", ("prob_surgery", "paper"): "w/ ProbSurgery",
    ("prob_surgery", "paper_train"): "w/ ProbSurgery, FeatCal’s samples", ("prob_surgery", "suite"): "w/ ProbSurgery, smaller",
    (SHIFT, "suite"): "w/ mean shift",
}  # fmt: skip
COLUMNS = ("upstream", "method", "setting")
EXAMPLE = "reproduction/real_language/example.json"  # scripts/chat_example.py
MISSING = "no results of the real language model"
CHAT_WAYS = {
    ("featcal", "paper"): "w/ FeatCal, λ 10⁻⁵", ("featcal", "paper_8b"): "w/ FeatCal, λ 3", ("anchor", "paper"): "its anchor alone",
    ("featcal", "auto"): "w/ FeatCal, default", ("surgery", "paper"): "w/ Surgery", ("prob_surgery", "paper"): "w/ ProbSurgery",
}  # fmt: skip
SEEDED = {"ViT-S/14": (VISION, "8"), "MiniLM": (REAL, "8"), "SmolLM2": LANGUAGE}


def lines(ways: dict[tuple[str, str], str]) -> Iterator[tuple[str, Key]]:
    """Yield the names and keys of references, mergers, and what was run after each merger."""
    for method, name in REFERENCES.items():
        yield name, ("", method, "")
    for merger, name in MERGERS.items():
        yield name, (merger, "merged", "")
        for way, words in ways.items():
            yield words, (merger, *way)


def by_samples(ours: Evidence, key: Key) -> dict[str, pd.DataFrame]:
    """Return the rows of the default in its study, by number of samples."""
    rows = rows_of(ours, key, "default")
    return {f", {n} samples": own for n, own in rows.groupby("samples") if key[2] == "auto"}


def averages(suite: str) -> PageOutput:
    """List the averages of all real models, with the change against the merger."""
    texts_8, images = Evidence(suite, REAL, "8"), Evidence(suite, VISION, "8")
    models, rows = ((images, "scores"), (texts_8, "scores"), (texts_8, "second_encoder")), []
    for name, key in lines(WAYS):
        found = {name: [average(ours, key, file) for ours, file in models]}
        if key[1] == SHIFT:  # an adapter without settings, run beside either of FeatCal’s
            found[name][0] = average(images, (key[0], SHIFT, "paper"))
        for n, own in by_samples(images, key).items():  # MiniLM's studies have other texts
            found[name + n] = [estimate(own), None, None]
        for label, own in found.items():
            cells = []
            for one, (ours, file) in zip(own, models, strict=True):
                start = average(ours, (key[0], "merged", ""), file) if key[1] != "merged" else None
                small = f"<small>{change(one, start)}</small>" if one and start else ""
                cells.append(estimated(one) + small)
            printed = paper_value("table01", key[0], key[1]) if key[2] in ("", "paper") else None
            cells.append("–" if printed is None or label != name else f"{printed:.1f}")
            if any(own):
                rows.append(("fc-merger" if key[1] == "merged" else "", [label, *cells]))
    caption = (
        "Average accuracy (%) on 8 tasks; small: change against the merger ± two standard errors. "
        "Adapters have the published size or, smaller, one in proportion to the model"
    )
    head = ["", "ViT-S/14, images", "MiniLM, texts", "MPNet, texts", "The paper, CLIP ViT-B/32"]
    return listed(head, rows, caption, "fc-long", "no scores of a real model with 8 tasks")


def seeds(suite: str) -> PageOutput:
    """List the averages from experts of other seeds, and FeatCal's margins with the experts' part of
    the error: the variance s²/S over S sets of experts is added to that of the first set.
    """
    models = {name: Evidence(suite, *place) for name, place in SEEDED.items()}
    drawn = {s for ours in models.values() for s in ours.table("expert_seeds")["expert_seed"]}
    rows: list[TableRow] = []
    for (model, ours), (name, key) in product(models.items(), lines(WAYS)):
        key = (*key[:2], settings_of(ours)[-1]) if key[1] == SHIFT else key
        means = _by_expert_seed(ours, key)
        if not means:
            continue
        if key[1] == "base":
            rows.append(("fc-merger", [model, *[""] * (len(drawn) + 4)]))
        cells = [f"{means[seed]:.1f}" if seed in means else "–" for seed in ("", *sorted(drawn))]
        cells += [f"{one:.1f}" for one in (fmean(means.values()), stdev(means.values()))]
        tuned, printed = ((key[0], "featcal", setting) for setting in ("suite", "paper"))
        best = tuned if _by_expert_seed(ours, tuned) else printed
        margins = [one - means[seed] for seed, one in _by_expert_seed(ours, best).items()]
        small = ""
        if key[0] and key[1] != "featcal" and margins:
            # the first training alone: the variance between trainings is added below
            alone = (rows_of(ours, one).filter(regex=f"^(?!{TRAINED})") for one in (best, key))
            _, room = lead(*map(estimate, alone))
            room = math.hypot(room, 2 * stdev(margins) / math.sqrt(len(margins)))
            small = f"{fmean(margins):+.1f} ± {room:.1f}"
        kind = "fc-merger" if key[1] == "merged" else ""
        rows.append((kind, [name, *cells, small]))
    head = ["", "First experts", *(f"Seed {seed}" for seed in sorted(drawn)), "Mean", "sd"]
    head.append("FeatCal minus this ± 2 SE")
    caption = (
        "Average score (%) by the experts’ seed; FeatCal tuned, or as printed where it was not"
    )
    return listed(head, rows, caption, "fc-long", "no experts of other seeds")


def _by_expert_seed(ours: Evidence, key: Key) -> dict[str, float]:
    """Return the average of one row with the first experts (seed "") and each other set of experts."""
    own, first = rows_of(ours, key, "expert_seeds"), average(ours, key)
    own = own[own["task"].isin(ours.tasks)]
    if own.empty or first is None:
        return {}
    return {"": first.mean} | own.groupby("expert_seed")["value"].mean().to_dict()


def sets(suite: str) -> PageOutput:
    """List the sets: what one sees, classes, and what base and expert score."""
    places = [*product((REAL,), ("8", "14", "20")), *product((VISION,), ("8", "14"))]
    tables = [Evidence(suite, *place).table("scores") for place in places]
    rows = []
    for task, facts in (texts() | photos()).items():
        scores = next((one for one in tables if task in set(one["task"])), tables[0])
        own = [estimate(select(scores, {"task": task, "method": m})) for m in ("base", "expert")]
        name = f"{escape(facts['name'])}<small>{escape(facts['says'])}</small>"
        rows.append([name, str(facts["classes"]), *map(estimated, own)])
    head = ["Set", "Classes", "Base (%)", "Expert (%)"]
    caption = "The text sets, MiniLM on their test texts, and the image sets, ViT-S/14"
    return listed(head, rows, caption, "fc-words")


# the language model


def parts(ours: Evidence, rows: pd.DataFrame) -> list[Estimate | None]:
    """Return the means of one model: right answers by likelihood and greedily on the experts' tasks,
    by likelihood on the others, and the log-likelihood of plain texts.
    """
    likely = ours.own_tasks
    greedy = [f"{task}{GREEDY}" for task in likely]
    unseen = {task for task in rows["task"] if not task.endswith(GREEDY)} - {*likely, PLAIN}
    groups = (likely, greedy, unseen, [PLAIN])
    return [estimate(rows[rows["task"].isin(tasks)]) for tasks in groups]


def answers(suite: str) -> PageOutput:
    """List every model's means, with the changes against the merged model that it starts from."""
    ours, rows = Evidence(suite, *LANGUAGE), []

    def scored(key: Key) -> pd.DataFrame:
        return select(ours.every_score, dict(zip(COLUMNS, key, strict=True)))

    for name, key in lines(CHAT_WAYS):
        for n, own in ({"": scored(key)} | by_samples(ours, key)).items():
            *answered, plain = parts(ours, own)
            starts = parts(ours, scored((key[0], "merged", "")))
            cells = []
            for one, before in zip(answered, starts[:3], strict=True):
                changed = key[1:] in CHAT_WAYS and one and before
                small = f"<small>{change(one, before)}</small>" if changed else ""
                cells.append(estimated(one) + small)
            cells.append(f"{plain.mean:.2f}" if plain else "–")
            if plain or any(answered):
                rows.append(("fc-merger" if key[1] == "merged" else "", [name + n, *cells]))
    head = ["SmolLM2-135M-Instruct", "By likelihood", "Greedy", "Unseen tasks", "Plain text"]
    caption = (
        "Right answers (%) on the experts’ tasks, and on tasks that no expert saw; log-likelihood per token. "
        "Small: change against the merged model ± two standard errors"
    )
    return listed(head, rows, caption, "fc-long", MISSING)


def example(suite: str) -> PageOutput:
    """Show one drawn question, and its answers before and after merging and calibration."""
    found, rows = read_json(project_root() / EXAMPLE), []
    for one in found.get("answers", []) if found.get("suite") == suite else []:
        way, merger = (one["method"], one["setting"]), MERGERS.get(one["upstream"])
        name = CHAT_WAYS.get(way) or merger or REFERENCES[one["method"]]
        rows.append([name, escape(one["answer"])])
    caption = (
        f"One question, drawn with seed {found.get('seed')}: “{escape(found.get('question', ''))}”. "
        f"Greedy answers, cut after {found.get('new_tokens')} tokens"
    )
    return listed(["SmolLM2-135M-Instruct", "Answer"], rows, caption, "fc-words", MISSING)
