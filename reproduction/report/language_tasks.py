"""The language half of the tasks page: what is asked and answered, what the models were chosen by,
whether test texts agree.

The rule, written down before FeatCal or an adapter was run: on GLUE a base of 50 to 78 points,
experts of 85 to 95, and task arithmetic at the paper's scale at least 8 below them; of the Llamas,
each expert above the base on its own tests.
"""

from html import escape
from statistics import mean
from typing import Any

from reproduction.report.evidence import Evidence, read_json, results_folder, select
from reproduction.report.html import PageOutput, estimated, fold, note, table
from reproduction.report.page import label
from reproduction.report.pages.language import MERGER, OWN
from reproduction.report.paper import (
    AVERAGE,
    PAPER_MODELS,
    TEXT_PRINTED,
    TEXT_TASKS,
    model_name,
    paper_row,
    title_of,
)
from reproduction.report.statistics import Estimate, estimate
from reproduction.report.tables import average

SPLITS = ("train", "validation", "test")
CHOSEN = "task_arithmetic 0.3"  # the paper's scale
RULES = "GLUE: base 50–78, experts 85–95, task arithmetic at least 8 lower; Llamas: experts above the base on their own tests"


def task_list(suite: str) -> PageOutput:
    """Every task of texts: what it stands for, an example, how many rows."""
    tasks: dict[str, Any] = read_json(results_folder(suite) / "language.json").get("tasks", {})
    if not tasks:
        return PageOutput(
            note(f"○ not run: no language.json in the results of the {label(suite)}.")
        )
    rows = []
    for task, told in tasks.items():
        name = title_of(task) or f"{task.capitalize()} expert"
        shown = told.get("example", {})
        words = [_words(shown.get(part, "")) for part in ("prompt", "answer")]
        example = (
            fold("an example", f"<p>{words[0]}</p><p><strong>{words[1]}</strong></p>")
            if shown
            else "–"
        )
        counts = " / ".join(str(told.get("rows", {}).get(split, "–")) for split in SPLITS)
        about = told.get("description") or f"{told.get('location', '')} ({told.get('kind', '')})"
        rows.append(("", [escape(name), escape(about), example, counts]))
    head = ["Stands for", "What it is about", "Prompt and answer", "Train / validation / test rows"]
    return PageOutput(table(head, rows, f"Text tasks — {label(suite)}", "fc-words"))


def _words(text: str) -> str:
    return escape(text.strip()).replace("\n", "<br>")


def choice(suite: str) -> PageOutput:
    """What the models scored on validation texts when they were chosen."""
    found = read_json(results_folder(suite) / "language_choice.json")
    if not found:
        return PageOutput(
            note(
                f"○ not run: the language models of the {label(suite)} have no record of a choice."
            )
        )
    html, met = "", []
    for role, models in found.items():
        columns = TEXT_TASKS[next(pool for known, pool in TEXT_PRINTED if known == role)]
        rows = []
        for model, scores in models.items():
            values = [scores[task] for task in columns if task in scores]
            cells = [f"{scores[task]:.1f}" if task in scores else "–" for task in columns]
            mark = "fc-total" if model == CHOSEN else ""
            rows.append(
                (
                    mark,
                    [escape(model.replace("_", " ")), *cells, f"{sum(values) / len(values):.1f}"],
                )
            )
        caption = f"{model_name(role, suite)}: validation texts (%) — {label(suite)}. Bold: the paper’s scale, which is run."
        html += table(["Model", *columns.values(), "Average"], rows, caption)
        if (role, "glue") in TEXT_PRINTED:
            means = [
                mean(models[name].values()) if name in models else None
                for name in ("base", "experts", CHOSEN)
            ]
            met.append(f"{model_name(role, suite)} {_met(*means)}")
    told = (
        note(
            f"The rule for GLUE on validation texts: {'; '.join(met)}. A model that misses it was kept."
        )
        if met
        else ""
    )
    return PageOutput(told + fold("What the language models were chosen by", html))


def ranges(suite: str) -> PageOutput:
    """Whether test texts meet the ranges that the models were chosen by on validation texts; the
    paper's averages beside them.
    """
    rows, chosen = [], read_json(results_folder(suite) / "language_choice.json")
    for role, pool in TEXT_PRINTED:
        ours = Evidence(suite, role, pool)
        keys = (("", "base", ""), (MERGER, "merged", ""), ("", "expert", ""))
        base, merged, expert = (average(ours, key, "references") for key in keys)
        own = _own(ours) if pool == "mergebench" else [expert]
        met = (
            _met_by_domains(ours)
            if pool == "mergebench"
            else _met(*(e and e.mean for e in (base, own[0], merged)))
        )
        scores = [estimated(base), estimated(merged), " · ".join(estimated(e) for e in own)]
        rows.append(("", [model_name(role, suite), *scores, met if chosen else "–"]))
        rows.append(("fc-reference", ["the paper", *_printed(role, pool), ""]))
    head = [
        "",
        "Base",
        "Task arithmetic",
        "Experts (of a Llama coding · math · instruction, each on its own tests)",
        "Ranges",
    ]
    rule = RULES if chosen else "Its models were not chosen by ranges."
    return PageOutput(
        table(head, rows, f"Averages on test texts (%) — {label(suite)}. {rule}", "fc-long")
    )


def _own(ours: Evidence, method: str = "expert") -> list[Estimate | None]:
    """Every domain's expert on its own tests, or another model there."""
    frame = ours.table("references")
    found = []
    for domain, tests in OWN.items():
        key = {"method": method, "setting": domain if method == "expert" else ""}
        found.append(estimate(select(frame[frame["task"].isin(tests)], key)))
    return found


def _met(base: float | None, experts: float | None, merged: float | None) -> str:
    if base is None or experts is None or merged is None:
        return "–"
    missed = [] if 50 <= base <= 78 else ["base"]
    missed += [] if 85 <= experts <= 95 else ["experts"]
    missed += [] if experts - merged >= 8 else ["task arithmetic"]
    return f"✗ outside: {', '.join(missed)}" if missed else "✓ all met"


def _met_by_domains(ours: Evidence) -> str:
    pairs = list(zip(OWN, _own(ours), _own(ours, "base"), strict=True))
    if not all(expert and base for _, expert, base in pairs):
        return "–"
    missed = [
        domain for domain, expert, base in pairs if expert and base and expert.mean <= base.mean
    ]
    return f"✗ not above the base: {', '.join(missed)}" if missed else "✓ all met"


def _printed(role: str, pool: str) -> list[str]:
    """The paper's averages: base, task arithmetic, experts."""
    model, keys = PAPER_MODELS[role], (("", "base"), (MERGER, "merged"), ("", "expert"))
    values = [paper_row(TEXT_PRINTED[role, pool], *key, model)[AVERAGE] for key in keys]
    if pool == "glue":
        return [f"{value:.1f}" for value in values]
    own = [
        paper_row("table14", "", "expert", model, domain)[list(tests)].mean()
        for domain, tests in OWN.items()
    ]
    return [*(f"{value:.1f}" for value in values[:2]), " · ".join(f"{value:.1f}" for value in own)]
