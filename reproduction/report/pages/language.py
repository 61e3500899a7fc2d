"""Tables 3, 4 and 14: language models, both sizes as blocks of one table, and a real one beside."""

from collections.abc import Callable
from itertools import product

import pandas as pd

from reproduction.report import paper, tables
from reproduction.report.claims import LLAMAS
from reproduction.report.evidence import Evidence, select
from reproduction.report.html import PageOutput, compact, estimated, listed, margin
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
OWN = {  # domain → the tests of its own
    "coding": ("humaneval_plus", "mbpp_plus"), "math": ("math500", "gsm8k"), "instruction": ("ifeval",),
}  # fmt: skip
MERGED: tables.Key = (MERGER, "merged", "")
ANCHOR: tables.Key = (MERGER, "anchor", "paper")


def experiments(number: str, suite: str) -> list[Evidence]:
    """Return the results of both sizes of a table's model."""
    return [Evidence(suite, *place) for place in MODELS[number]]


def answer(number: str, suite: str) -> PageOutput:
    """Return FeatCal minus task arithmetic and minus the better adapter, printed and measured."""
    rows = []
    for ours in experiments(number, suite):
        model = paper.PAPER_MODELS[ours.role]
        cells = [printed_gain(number, MERGER, own, model) for own in (("merged",), tables.ADAPTERS)]
        cells.append(printed_share(number, MERGER, model))
        label = f"{paper.PAPER_NAMES[ours.role]} <small>the paper</small>"
        rows.append(("fc-merger", [label, *cells]))
        for setting in tables.settings_shown(suite):
            label = f"{paper.model_title(ours.role, suite)} <small>{tables.SHORT[setting]}</small>"
            rows.append(_gained(label, ours, setting))
    for label, ours, (setting, _) in _real(number, suite):
        rows.append(_gained(label, ours, setting))
    head = ["FeatCal on", "− task arithmetic", "− better adapter"]
    head.append("Share of the gap to the experts (%)")
    caption = "Differences of the average, points. Above, below: by more than two standard errors."
    return listed(head, rows, caption)


def _gained(label: str, ours: Evidence, setting: str) -> tuple[str, list[str]]:
    cells = [*tables.gains(ours, MERGER, setting), share_of(ours, MERGER, setting)]
    return "", [label, *cells]


def _real(number: str, suite: str) -> list[tuple[str, Evidence, tuple[str, str]]]:
    """Return the real model beside Table 4 at both Llamas' settings: label, results, setting and role."""
    ours = Evidence(suite, *paper.LANGUAGE)
    return [
        (f"SmolLM2 <small>{paper.PAPER_NAMES[role]}’s settings</small>", ours, (setting, role))
        for role, setting in LLAMAS.items()
        if number == "table04"
    ]


def measured(number: str, suite: str) -> PageOutput:
    """Return Table 3 or 4 in the paper's order of rows, at every setting that was run."""
    notes = {tables.settings_note(o): paper.PAPER_NAMES[o.role] for o in experiments(number, suite)}
    several = len(notes) > 1
    named = (f" {name}:{note}" if several else note for note, name in notes.items())
    return _blocks(number, suite, tables.accuracy_rows, LEGEND + "".join(named))


def _blocks(
    number: str, suite: str, rows_of: Callable[[Evidence], list[tables.ModelRow]], legend: str
) -> PageOutput:
    """Return the rows of both sizes below each other, each block below its model's name."""
    found = experiments(number, suite)
    rows = [row for o in found for row in (_heading(paper.model_name(o.role, suite)), *rows_of(o))]
    pool = found[0].pool
    run = {task for ours in found if ours.was_run for task in ours.tasks}
    titles = {t: found[0].title(t) for t in paper.TEXT_TASKS[pool] if t in run or not run}
    html = tables.accuracy_table(rows, titles, f"{UNITS[pool]}. {legend}")
    return PageOutput(html + "".join(against_printed(ours, number) for ours in found))


def _heading(name: str) -> tables.ModelRow:
    return tables.ModelRow(name, "heading", "", {})


def printed(number: str) -> PageOutput:
    """Return the paper's printed table, one click away, with the cells in doubt marked."""
    rows: list[tables.ModelRow] = []
    for role, _ in MODELS[number]:
        model = paper.PAPER_MODELS[role]
        _, own = tables.paper_rows(number, model)
        own = _printed_experts(model) if number == "table14" else own
        rows += [_heading(paper.PAPER_NAMES[role]), *own]
    caption = f"The paper’s Table {int(number[-2:])}, as printed"
    return tables.printed_table(rows, paper.TEXT_TASKS[MODELS[number][0][1]], caption)


def anchors(number: str, suite: str) -> PageOutput:
    """Return averages of task arithmetic, of FeatCal's anchor alone and of FeatCal."""
    found, rows = experiments(number, suite), []
    models = [(paper.model_name(ours.role, suite), ours, ("paper", ours.role)) for ours in found]
    for label, ours, (setting, role) in models + _real(number, suite):
        ridge, blend = map(compact, paper.PAPER_SETTINGS[role])
        keys = (MERGED, ANCHOR, (MERGER, "featcal", setting))
        merged, anchor, featcal = (tables.average(ours, key) for key in keys)
        cells = [estimated(one) for one in (merged, anchor, featcal)]
        cells += [margin(anchor, merged), margin(featcal, anchor)]
        rows.append([f"{label} <small>λ {ridge}, ρ {blend}</small>", *cells])
    head = ["", "Task arithmetic", "Anchor alone", "FeatCal", "Anchor − task arithmetic"]
    caption = "Averages (%) and their differences (points) at the printed settings"
    return listed([*head, "FeatCal − anchor"], rows, caption, "fc-long")


def experts_table(suite: str) -> PageOutput:
    """Return Table 14: the base and every expert on all tests, and the highest of each column."""
    legend = "Arrows: against the base. Bold: highest of the column."
    return _blocks("table14", suite, _expert_rows, legend)


def _experts(look: Callable[[str, str], tables.Cells]) -> list[tables.ModelRow]:
    """Return a row for the base, each domain's expert, and the best of all; look: by method, domain."""
    keys = {tables.REFERENCES["base"]: ("base", "")}
    keys |= {_name(domain): ("expert", domain) for domain in OWN}
    keys[tables.REFERENCES["expert"]] = ("expert", "")
    kinds = {name: "calibrated" if domain else "reference" for name, (_, domain) in keys.items()}
    return [tables.ModelRow(name, kinds[name], "", look(*key)) for name, key in keys.items()]


def _expert_rows(ours: Evidence) -> list[tables.ModelRow]:
    base, *rows, best = _experts(lambda *key: tables.cells_of(tables.by_task(ours, ("", *key))))
    changed = (tables.with_changes(one, base) for one in rows)
    return [*tables.with_best([base, *changed]), best]


def _printed_experts(model: str) -> list[tables.ModelRow]:
    """Return the paper's block of one model, by its printed name."""

    def look(method: str, domain: str) -> tables.Cells:
        printed = paper.paper_row("table14", "", method, model, domain).items()
        return {str(task): tables.Cell(value) for task, value in printed}

    return _experts(look)


def _name(domain: str) -> str:
    return f"{domain.capitalize()} expert"


def won_and_lost(suite: str) -> PageOutput:
    """Return what every expert won on its own tests and lost on all others."""
    rows, sides = [], (True, False)
    for ours, domain in product(experiments("table14", suite), OWN):
        cells = [_printed_change(paper.PAPER_MODELS[ours.role], domain, own) for own in sides]
        cells += [_change(ours.table("scores"), domain, OWN[domain], own) for own in sides]
        rows.append(
            [f"{_name(domain)} <small>{paper.model_name(ours.role, suite)}</small>", *cells]
        )
    ours = Evidence(suite, *paper.LANGUAGE)
    for task in ours.own_tasks:
        cells = [_change(_likely(ours), task, (task,), own) for own in sides]
        rows.append([f"{ours.title(task)} <small>SmolLM2</small>", "–", "–", *cells])
    head = ["", "The paper: own tests", "all others", "Here: own tests", "all others"]
    caption = (
        "Mean change against the base, points. Above, below: by more than two standard errors."
    )
    return listed(head, rows, caption, "fc-long")


def real_experts(suite: str) -> PageOutput:
    """Return the scores of the real model's base and experts on every task, and on plain texts."""
    ours = Evidence(suite, *paper.LANGUAGE)
    scores, plain = _likely(ours), ours.every_score["task"] == PLAIN
    tasks, rows = list(dict.fromkeys(scores["task"])), []
    models = {"none (base)": {"method": "base"}}
    models |= {ours.title(task): {"method": "expert", "setting": task} for task in ours.own_tasks}
    for name, key in models.items():
        cells = [estimate(select(scores, key | {"task": task})) for task in tasks]
        texts = estimate(select(ours.every_score[plain], key))
        rows.append([name, *map(estimated, cells), f"{texts.mean:.2f}" if texts else "–"])
    head = ["Expert", *map(ours.title, tasks), "Plain text"]
    caption = "Right answers by likelihood (%), and log-likelihood per token of plain texts; the last two tasks have no expert"
    return listed(head, rows, caption, "fc-long", "no results of the real language model")


def _likely(ours: Evidence) -> pd.DataFrame:
    """Return the real model's answers by likelihood."""
    scores = ours.every_score
    return scores[~scores["task"].str.endswith(GREEDY) & (scores["task"] != PLAIN)]


def _change(scores: pd.DataFrame, expert: str, own: tuple[str, ...], inside: bool) -> str:
    tests = scores[scores["task"].isin(own) == inside]
    keys = ({"method": "expert", "setting": expert}, {"method": "base"})
    return margin(*(estimate(select(tests, key)) for key in keys))


def _printed_change(model: str, domain: str, inside: bool) -> str:
    keys = (("expert", model, domain), ("base", model))
    rows = (paper.paper_row("table14", "", *key).drop(paper.AVERAGE) for key in keys)
    expert, base = (row[row.index.isin(OWN[domain]) == inside].mean() for row in rows)
    return f"{expert - base:+.1f}"
