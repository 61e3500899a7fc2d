"""Build the page on real models: two sentence encoders, an image model and a language model."""

import math
from collections.abc import Iterator
from html import escape
from itertools import product
from statistics import fmean, stdev

import pandas as pd

from reproduction.report import paper, tables
from reproduction.report.evidence import Evidence, read_json, select
from reproduction.report.html import PageOutput, TableRow, change, estimate_cell, tabulate
from reproduction.report.paper import LANGUAGE, REAL, VISION
from reproduction.report.statistics import TRAINED, Estimate, estimate, lead
from reproduction.results import GREEDY, PLAIN, project_root

METHODS = {
    ("featcal", "auto"): "w/ FeatCal, default", ("featcal", "paper"): "w/ FeatCal, printed", ("featcal", "paper_8b"): "w/ FeatCal, λ 3",
    ("featcal", "suite"): "w/ FeatCal, tuned", ("surgery", "paper"): "w/ Surgery", ("surgery", "paper_train"): "w/ Surgery, FeatCal’s samples",
    ("surgery", "suite"): "w/ Surgery, smaller", ("prob_surgery", "paper"): "w/ ProbSurgery",
    ("prob_surgery", "paper_train"): "w/ ProbSurgery, FeatCal’s samples", ("prob_surgery", "suite"): "w/ ProbSurgery, smaller",
    (tables.SHIFT, "suite"): "w/ mean shift",
}  # fmt: skip
EXAMPLE = "reproduction/real_language/example.json"  # scripts/chat_example.py
MISSING = "no results of the real language model"
CHAT_METHODS = {
    ("featcal", "paper"): "w/ FeatCal, λ 10⁻⁵", ("featcal", "paper_8b"): "w/ FeatCal, λ 3", ("anchor", "paper"): "its anchor alone",
    ("featcal", "auto"): "w/ FeatCal, default", ("surgery", "paper"): "w/ Surgery", ("prob_surgery", "paper"): "w/ ProbSurgery",
}  # fmt: skip
SEEDED = {"ViT-S/14": (VISION, "8"), "MiniLM": (REAL, "8"), "SmolLM2": LANGUAGE}


def names_and_keys(methods: dict[tuple[str, str], str]) -> Iterator[tuple[str, tables.Key]]:
    """Yield the names and keys of references, mergers, and the methods after each merger."""
    for method, name in tables.REFERENCES.items():
        yield name, ("", method, "")
    for merger, name in tables.MERGERS.items():
        yield name, (merger, "merged", "")
        for method_and_setting, label in methods.items():
            yield label, (merger, *method_and_setting)


def by_samples(data: Evidence, key: tables.Key) -> dict[str, pd.DataFrame]:
    """Return the rows of the default in its study, by number of samples; empty for other keys."""
    if key[2] != "auto":
        return {}
    by_size = tables.rows_of(data, key, "default").groupby("samples")
    return {f", {n} samples": rows for n, rows in by_size}


def averages(suite: str) -> PageOutput:
    """List the averages of all real models, with the change against the merger."""
    texts_8, images = Evidence(suite, REAL, "8"), Evidence(suite, VISION, "8")
    models, rows = ((images, "scores"), (texts_8, "scores"), (texts_8, "second_encoder")), []
    for name, key in names_and_keys(METHODS):
        by_label = {name: [tables.average(data, key, file) for data, file in models]}
        if key[1] == tables.SHIFT:  # an adapter without settings, run at either of FeatCal’s
            by_label[name][0] = tables.average(images, (key[0], tables.SHIFT, "paper"))
        for n, rows_at in by_samples(images, key).items():  # MiniLM's studies have other texts
            by_label[name + n] = [estimate(rows_at), None, None]
        for label, estimates in by_label.items():
            cells = []
            for mean, (data, file) in zip(estimates, models, strict=True):
                merged = tables.average(data, (key[0], "merged", ""), file)
                changed = mean and merged and key[1] != "merged"
                small = f"<small>{change(mean, merged)}</small>" if changed else ""
                cells.append(estimate_cell(mean) + small)
            printed = paper.paper_row("table01", *key[:2]).get(paper.AVERAGE)
            is_printed = printed is not None and label == name and key[2] in ("", "paper")
            cells.append(f"{printed:.1f}" if is_printed else "–")
            if any(estimates):
                rows.append(("fc-merger" if key[1] == "merged" else "", [label, *cells]))
    caption = (
        "Average accuracy (%) on 8 tasks; small: change against the merger ± two standard errors. "
        "Adapters: published size or, smaller, one in proportion to the model; sd: over seeds or draws"
    )
    head = ["", "ViT-S/14, images", "MiniLM, texts", "MPNet, texts", "The paper, CLIP ViT-B/32"]
    return tabulate(head, rows, caption, "fc-long", "no scores of a real model with 8 tasks")


def seeds(suite: str) -> PageOutput:
    """List the averages from experts of other seeds, and FeatCal's margins.

    The margins' error adds s²/S over S sets of experts to the variance of the first set.
    """
    models = {name: Evidence(suite, *experiment) for name, experiment in SEEDED.items()}
    retrained = (data.table("expert_seeds")["expert_seed"] for data in models.values())
    expert_seeds = sorted({seed for seeds in retrained for seed in seeds})
    rows: list[TableRow] = []
    for (model, data), (name, key) in product(models.items(), names_and_keys(METHODS)):
        key = (*key[:2], tables.settings_of(data)[-1]) if key[1] == tables.SHIFT else key
        means = _by_expert_seed(data, key)
        if not means:
            continue
        if key[1] == "base":
            rows.append(("fc-merger", [model, *[""] * (len(expert_seeds) + 4)]))
        cells = [f"{means[seed]:.1f}" if seed in means else "–" for seed in ("", *expert_seeds)]
        cells += [f"{value:.1f}" for value in (fmean(means.values()), stdev(means.values()))]
        tuned, printed = ((key[0], "featcal", setting) for setting in ("suite", "paper"))
        best = tuned if _by_expert_seed(data, tuned) else printed
        margins = [value - means[seed] for seed, value in _by_expert_seed(data, best).items()]
        small = ""
        if key[0] and key[1] != "featcal" and margins:
            # the first training alone: the variance between trainings is added below
            sides = (tables.rows_of(data, side) for side in (best, key))
            first = (estimate(side.filter(regex=f"^(?!{TRAINED})")) for side in sides)
            _, room = lead(*first)
            room = math.hypot(room, 2 * stdev(margins) / math.sqrt(len(margins)))
            small = f"{fmean(margins):+.1f} ± {room:.1f}"
        kind = "fc-merger" if key[1] == "merged" else ""
        rows.append((kind, [name, *cells, small]))
    head = ["", "First experts", *(f"Seed {seed}" for seed in expert_seeds), "Mean", "sd"]
    head.append("FeatCal minus this ± 2 SE")
    caption = (
        "Average score (%) by the experts’ seed; FeatCal tuned, or as printed where it was not"
    )
    return tabulate(head, rows, caption, "fc-long", "no experts of other seeds")


def _by_expert_seed(data: Evidence, key: tables.Key) -> dict[str, float]:
    """Return the average of one row with the first experts (seed "") and with each other set."""
    retrained, first = tables.rows_of(data, key, "expert_seeds"), tables.average(data, key)
    retrained = retrained[retrained["task"].isin(data.tasks)]
    if retrained.empty or first is None:
        return {}
    return {"": first.mean} | retrained.groupby("expert_seed")["value"].mean().to_dict()


def sets(suite: str) -> PageOutput:
    """List the data sets with their content, classes, and scores of base and expert."""
    experiments = [*product((REAL,), ("8", "14", "20")), *product((VISION,), ("8", "14"))]
    score_tables = [Evidence(suite, *experiment).table("scores") for experiment in experiments]
    rows = []
    for task, facts in (paper.TEXT_SETS | paper.IMAGE_SETS).items():
        scores = next((t for t in score_tables if task in set(t["task"])), score_tables[0])
        scores = select(scores, {"task": task})
        means = [estimate(select(scores, {"method": method})) for method in ("base", "expert")]
        name = f"{escape(facts['name'])}<small>{escape(facts['says'])}</small>"
        rows.append([name, str(facts["classes"]), *map(estimate_cell, means)])
    head = ["Set", "Classes", "Base (%)", "Expert (%)"]
    caption = "The text sets, MiniLM on their test texts, and the image sets, ViT-S/14"
    return tabulate(head, rows, caption, "fc-words")


# the language model


def mean_parts(data: Evidence, rows: pd.DataFrame) -> list[Estimate | None]:
    """Return one model's means: accuracy on the experts' tasks by likelihood and by greedy answers,
    on unseen tasks by likelihood, and the log-likelihood of plain texts.
    """
    likely = data.expert_tasks
    greedy = [f"{task}{GREEDY}" for task in likely]
    unseen = {task for task in rows["task"] if not task.endswith(GREEDY)} - {*likely, PLAIN}
    groups = (likely, greedy, unseen, [PLAIN])
    return [estimate(rows[rows["task"].isin(tasks)]) for tasks in groups]


def answers(suite: str) -> PageOutput:
    """List every model's means, with the changes against the merged model that it starts from."""
    data, rows = Evidence(suite, *LANGUAGE), []

    def scored_rows(key: tables.Key) -> pd.DataFrame:
        return select(data.all_scores, dict(zip(tables.COLUMNS, key, strict=True)))

    for name, key in names_and_keys(CHAT_METHODS):
        for n, answer_rows in ({"": scored_rows(key)} | by_samples(data, key)).items():
            *answered, plain = mean_parts(data, answer_rows)
            merged = mean_parts(data, scored_rows((key[0], "merged", "")))
            cells = []
            for mean, before in zip(answered, merged[:3], strict=True):
                changed = key[1:] in CHAT_METHODS and mean and before
                small = f"<small>{change(mean, before)}</small>" if changed else ""
                cells.append(estimate_cell(mean) + small)
            cells.append(f"{plain.mean:.2f}" if plain else "–")
            if plain or any(answered):
                rows.append(("fc-merger" if key[1] == "merged" else "", [name + n, *cells]))
    head = ["SmolLM2-135M-Instruct", "By likelihood", "Greedy", "Unseen tasks", "Plain text"]
    caption = (
        "Right answers (%) on the experts’ tasks, and on tasks that no expert saw; log-likelihood per token. "
        "Small: change against the merged model ± two standard errors"
    )
    return tabulate(head, rows, caption, "fc-long", MISSING)


def example(suite: str) -> PageOutput:
    """Show one drawn question, and its answers before and after merging and calibration."""
    record, rows = read_json(project_root() / EXAMPLE), []
    for answer in record.get("answers", []) if record.get("suite") == suite else []:
        method, merger = answer["method"], tables.MERGERS.get(answer["upstream"])
        name = CHAT_METHODS.get((method, answer["setting"])) or merger or tables.REFERENCES[method]
        rows.append([name, escape(answer["answer"])])
    caption = (
        f"One question, drawn with seed {record.get('seed')}: “{escape(record.get('question', ''))}”. "
        f"Greedy answers, cut after {record.get('new_tokens')} tokens"
    )
    return tabulate(["SmolLM2-135M-Instruct", "Answer"], rows, caption, "fc-words", MISSING)
