"""Tables 3, 4 and 14: language models, both sizes as blocks of one table, and a real model."""

from collections.abc import Callable, Sequence
from itertools import product

import pandas as pd

from reproduction.report import paper, tables
from reproduction.report.claims import LLAMAS
from reproduction.report.evidence import Evidence, select
from reproduction.report.html import PageOutput, TableRow, compact, estimate_cell, margin, tabulate
from reproduction.report.pages.accuracies import printed_gain, printed_share, share_of
from reproduction.report.pages.reproduced import against_printed
from reproduction.report.statistics import estimate
from reproduction.results import GREEDY, PLAIN

MERGER = "task_arithmetic"
MODELS = {  # of each printed table
    "table03": (("flan_t5_base", "glue"), ("flan_t5_large", "glue")),
    "table04": (("llama_3b", "mergebench"), ("llama_8b", "mergebench")),
    "table14": (("llama_3b", "mergebench"), ("llama_8b", "mergebench")),
}
UNITS = {
    "glue": "Exactly right answers (%), for STS-B Spearman’s ρ in percent, on test texts",
    "mergebench": "Right answers (%) on test prompts",
}
LEGEND = "Arrows: against task arithmetic. Bold: best of what was merged."
OWN_TESTS = {  # domain → the tests of its own
    "coding": ("humaneval_plus", "mbpp_plus"), "math": ("math500", "gsm8k"), "instruction": ("ifeval",),
}  # fmt: skip


def experiments(number: str, suite: str) -> list[Evidence]:
    """Return the results of both sizes of a table's model."""
    return [Evidence(suite, *experiment) for experiment in MODELS[number]]


def answer(number: str, suite: str) -> PageOutput:
    """Return FeatCal minus task arithmetic and minus the better adapter, printed and measured."""
    rows: list[TableRow] = []
    for data in experiments(number, suite):
        model = paper.PAPER_MODELS[data.role]
        cells = [printed_gain(number, MERGER, ["merged"], model)]
        cells.append(printed_gain(number, MERGER, tables.ADAPTERS, model))
        cells.append(printed_share(number, MERGER, model))
        label = f"{paper.PAPER_NAMES[data.role]} <small>the paper</small>"
        rows.append(("fc-merger", [label, *cells]))
        for setting in tables.settings_shown(suite):
            label = f"{data.model_title} <small>{tables.SHORT[setting]}</small>"
            rows.append(_gain_row(label, data, setting))
    for label, data, (setting, _) in _real_models(number, suite):
        rows.append(_gain_row(label, data, setting))
    head = ["FeatCal on", "− task arithmetic", "− better adapter"]
    head.append("Share of the gap to the experts (%)")
    caption = "Differences of the average, points. Above, below: by more than two standard errors."
    return tabulate(head, rows, caption)


def _gain_row(label: str, data: Evidence, setting: str) -> list[str]:
    return [label, *tables.gains(data, MERGER, setting), share_of(data, MERGER, setting)]


def _real_models(number: str, suite: str) -> list[tuple[str, Evidence, tuple[str, str]]]:
    """Return label, results, setting and role of Table 4's real model, at both Llamas' settings."""
    data = Evidence(suite, *paper.LANGUAGE)
    return [
        (f"SmolLM2 <small>{paper.PAPER_NAMES[role]}’s settings</small>", data, (setting, role))
        for role, setting in LLAMAS.items()
        if number == "table04"
    ]


def measured(number: str, suite: str) -> PageOutput:
    """Return Table 3 or 4 in the paper's order of rows, at every setting that was run."""
    notes = {tables.settings_note(o): paper.PAPER_NAMES[o.role] for o in experiments(number, suite)}
    differ = len(notes) > 1
    texts = (f" {name}:{note}" if differ else note for note, name in notes.items())
    return _model_blocks(number, suite, tables.accuracy_rows, LEGEND + "".join(texts))


def _model_blocks(
    number: str, suite: str, rows_of: Callable[[Evidence], list[tables.ModelRow]], legend: str
) -> PageOutput:
    """Return the rows of both sizes below each other, each block below its model's name."""
    both, rows = experiments(number, suite), []
    for data in both:
        rows += [_heading(data.model_name), *rows_of(data)]
    pool = both[0].pool
    run = {task for data in both if data.was_run for task in data.tasks}
    titles = {t: both[0].title(t) for t in paper.TEXT_TASKS[pool] if t in run or not run}
    html = tables.accuracy_table(rows, titles, f"{UNITS[pool]}. {legend}")
    return PageOutput(html + "".join(against_printed(data, number) for data in both))


def _heading(name: str) -> tables.ModelRow:
    return tables.ModelRow(name, "heading", "", {})


def printed(number: str) -> PageOutput:
    """Return the paper's printed table, in a fold, with the cells in doubt marked."""
    rows: list[tables.ModelRow] = []
    for role, _ in MODELS[number]:
        model = paper.PAPER_MODELS[role]
        _, model_rows = tables.paper_rows(number, model)
        model_rows = _printed_experts(model) if number == "table14" else model_rows
        rows += [_heading(paper.PAPER_NAMES[role]), *model_rows]
    caption = f"The paper’s {paper.table_name(number)}, as printed"
    return tables.printed_table(rows, paper.TEXT_TASKS[MODELS[number][0][1]], caption)


def anchors(number: str, suite: str) -> PageOutput:
    """Return averages of task arithmetic, of FeatCal's anchor alone and of FeatCal."""
    both, rows = experiments(number, suite), []
    models = [(data.model_name, data, ("paper", data.role)) for data in both]
    for label, data, (setting, role) in models + _real_models(number, suite):
        ridge, blend = map(compact, paper.PAPER_SETTINGS[role])
        keys = ((MERGER, "merged", ""), (MERGER, "anchor", "paper"), (MERGER, "featcal", setting))
        merged, anchor, featcal = (tables.average(data, key) for key in keys)
        cells = [*map(estimate_cell, (merged, anchor, featcal))]
        cells += [margin(anchor, merged), margin(featcal, anchor)]
        rows.append([f"{label} <small>λ {ridge}, ρ {blend}</small>", *cells])
    head = ["", "Task arithmetic", "Anchor alone", "FeatCal", "Anchor − task arithmetic"]
    caption = "Averages (%) and their differences (points) at the printed settings"
    return tabulate([*head, "FeatCal − anchor"], rows, caption, "fc-long")


def experts_table(suite: str) -> PageOutput:
    """Return Table 14: the base and every expert on all tests, and the highest of each column."""
    legend = "Arrows: against the base. Bold: highest of the column."
    return _model_blocks("table14", suite, _expert_rows, legend)


def _experts(cells_of: Callable[[str, str], tables.Cells]) -> list[tables.ModelRow]:
    """Return rows of the base, each domain's expert and the best; cells_of: by method, domain."""
    keys = {tables.REFERENCES["base"]: ("base", "")}
    keys |= {_expert_name(domain): ("expert", domain) for domain in OWN_TESTS}
    keys[tables.REFERENCES["expert"]] = ("expert", "")
    kinds = {name: "calibrated" if domain else "reference" for name, (_, domain) in keys.items()}
    return [tables.ModelRow(name, kinds[name], "", cells_of(*key)) for name, key in keys.items()]


def _expert_rows(data: Evidence) -> list[tables.ModelRow]:
    base, *rows, best = _experts(lambda *key: tables.cells_of(tables.by_task(data, ("", *key))))
    changed = (tables.with_changes(row, base) for row in rows)
    return [*tables.with_best([base, *changed]), best]


def _printed_experts(model: str) -> list[tables.ModelRow]:
    """Return the paper's block of one model, by its printed name."""

    def cells_of(method: str, domain: str) -> tables.Cells:
        values = paper.paper_row("table14", "", method, model, domain).items()
        return {str(task): tables.Cell(value) for task, value in values}

    return _experts(cells_of)


def _expert_name(domain: str) -> str:
    return f"{domain.capitalize()} expert"


def won_and_lost(suite: str) -> PageOutput:
    """Return the changes of every expert against the base, on its own tests and on all others."""
    rows, sides = [], (True, False)
    for data, domain in product(experiments("table14", suite), OWN_TESTS):
        scores, tests = data.table("scores"), OWN_TESTS[domain]
        cells = [_printed_change(paper.PAPER_MODELS[data.role], domain, inside) for inside in sides]
        cells += [_expert_change(scores, domain, tests, inside) for inside in sides]
        name = f"{_expert_name(domain)} <small>{data.model_name}</small>"
        rows.append([name, *cells])
    data = Evidence(suite, *paper.LANGUAGE)
    for task in data.expert_tasks:
        cells = [_expert_change(_likelihood_rows(data), task, [task], inside) for inside in sides]
        rows.append([f"{data.title(task)} <small>SmolLM2</small>", "–", "–", *cells])
    head = ["", "The paper: own tests", "all others", "Here: own tests", "all others"]
    caption = (
        "Mean change against the base, points. Above, below: by more than two standard errors."
    )
    return tabulate(head, rows, caption, "fc-long")


def real_experts(suite: str) -> PageOutput:
    """Return the scores of the real model's base and experts on every task, and on plain texts."""
    data = Evidence(suite, *paper.LANGUAGE)
    scores, plain = _likelihood_rows(data), data.all_scores["task"] == PLAIN
    tasks, rows = list(dict.fromkeys(scores["task"])), []
    models = {"none (base)": {"method": "base"}}
    for task in data.expert_tasks:
        models[data.title(task)] = {"method": "expert", "setting": task}
    for name, key in models.items():
        means = [estimate(select(scores, key | {"task": task})) for task in tasks]
        texts = estimate(select(data.all_scores[plain], key))
        rows.append([name, *map(estimate_cell, means), f"{texts.mean:.2f}" if texts else "–"])
    head = ["Expert", *map(data.title, tasks), "Plain text"]
    caption = "Right answers by likelihood (%), and log-likelihood per token of plain texts; the last two tasks have no expert"
    return tabulate(head, rows, caption, "fc-long", "no results of the real language model")


def _likelihood_rows(data: Evidence) -> pd.DataFrame:
    scores = data.all_scores
    return scores[~scores["task"].str.endswith(GREEDY) & (scores["task"] != PLAIN)]


def _expert_change(scores: pd.DataFrame, expert: str, tests: Sequence[str], inside: bool) -> str:
    rows = scores[scores["task"].isin(tests) == inside]
    keys = ({"method": "expert", "setting": expert}, {"method": "base"})
    return margin(*(estimate(select(rows, key)) for key in keys))


def _printed_change(model: str, domain: str, inside: bool) -> str:
    keys = (("expert", model, domain), ("base", model))
    rows = (paper.paper_row("table14", "", *key).drop(paper.AVERAGE) for key in keys)
    expert, base = (row[row.index.isin(OWN_TESTS[domain]) == inside].mean() for row in rows)
    return f"{expert - base:+.1f}"
