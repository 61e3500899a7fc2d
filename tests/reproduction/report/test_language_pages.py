"""Tables 3, 4 and 14 on invented results: rows of the paper, the highest of the experts, the
anchor, and the verdicts.
"""

import pandas as pd
import pytest
from synthetic_correct import changed

from reproduction.report import anchors, domain_experts, language, language_tasks, overview
from reproduction.report.claims import claims
from reproduction.report.evidence import Evidence
from reproduction.report.page import Page
from reproduction.report.paper import AVERAGE, PAPER_MODELS, TEXT_PRINTED, TEXT_TASKS
from reproduction.report.tables import Cell, paper_rows
from reproduction.report.verdicts import judge


def claim(name):
    return next(c for c in claims() if c.id == name)


@pytest.mark.parametrize(("role", "pool"), TEXT_PRINTED)
def test_a_block_has_the_papers_rows_in_its_order(results, role, pool):
    ours = language.accuracy_rows(Evidence("mini", role, pool), "suite")
    _, printed = paper_rows(TEXT_PRINTED[role, pool], PAPER_MODELS[role])
    assert [row.label for row in ours] == [row.label for row in printed]
    assert all(list(row.cells) == [*TEXT_TASKS[pool], AVERAGE] for row in (*ours, *printed))


def test_columns_are_those_the_user_has_texts_for(results):
    for role in ("flan_t5_base", "flan_t5_large"):
        path = results / f"scores/{role}-glue/scores.csv"
        frame = pd.read_csv(path, keep_default_na=False)
        frame[frame["task"].isin(["cola", "rte"]) & (role == "flan_t5_base")].to_csv(
            path, index=False
        )
    assert language.measured(Page("table03", "mini")).text.splitlines()[1].split("  ") == [
        "Model",
        "CoLA",
        "RTE",
        "Average",
    ]


def test_featcal_is_the_same_at_both_sizes_of_the_adapters(results):
    changed(
        results,
        "flan_t5_base-glue",
        lambda f: (f["method"] == "surgery") & (f["setting"] == "paper"),
        99.0,
    )
    ours = Evidence("mini", "flan_t5_base", "glue")
    rows = {
        s: {row.label: row.cells for row in language.accuracy_rows(ours, s)}
        for s in ("suite", "paper")
    }
    assert (
        rows["suite"]["w/ FeatCal"]["cola"].value
        == rows["paper"]["w/ FeatCal"]["cola"].value
        == 80.0
    )
    assert [rows[s]["w/ Surgery"]["cola"].value for s in ("suite", "paper")] == [74.0, 99.0]
    assert [judge(claim("t3_surgery"), "mini", s, results).word for s in ("suite", "paper")] == [
        "holds",
        "does not hold",
    ]


def test_the_highest_of_base_and_experts_is_taken_column_by_column(results):
    found = [
        {"a": Cell(5), "b": Cell(1), AVERAGE: Cell(3)},
        {"a": Cell(2), "b": Cell(9), AVERAGE: Cell(5.5)},
    ]
    assert {column: cell.value for column, cell in domain_experts.highest(found).items()} == {
        "a": 5,
        "b": 9,
        AVERAGE: 7,
    }
    assert domain_experts.highest([*found, {}]) == {}, "one of them was not run"
    for model in ("llama-3.2-3b-instruct", "llama-3.1-8b-instruct"):
        *models, last = domain_experts.printed_rows(model)
        top = domain_experts.highest(row.cells for row in models)
        rounded = {column: cell.value for column, cell in last.cells.items()}
        assert {column: round(cell.value, 1) for column, cell in top.items()} == rounded, (
            "as the paper has it"
        )


def test_experts_win_on_their_own_tests_and_lose_on_the_others(results):
    line = next(
        line
        for line in domain_experts.won_and_lost("mini").text.splitlines()
        if line.startswith("Math expert")
    )
    assert [cell.strip() for cell in line.split("  ")[2:]] == [
        "+10.0",
        "above",
        "-10.0",
        "below",
        "+3.3",
        "-4.7",
    ]
    assert judge(claim("t14_coding_humaneval"), "mini", "suite", results).word == "holds"
    changed(
        results,
        "llama_8b-mergebench",
        lambda f: (f["setting"] == "coding") & (f["task"] == "humaneval_plus"),
        20.0,
    )
    assert judge(claim("t14_coding_humaneval"), "mini", "suite", results).word == "does not hold"


def test_the_anchor_is_held_against_featcal_and_the_merger(results):
    changed(results, "llama_8b-mergebench", lambda f: f["method"] == "anchor", 79.0)
    line = next(
        x for x in anchors.folded(Page("table04", "mini")).text.splitlines() if "λ = 3" in x
    )
    assert "within noise" in line and "+5.8" in line, "from 73.25 to 79, and FeatCal at 79.25"


def test_a_claim_about_one_task_reads_that_task_alone(results):
    changed(
        results,
        "llama_8b-mergebench",
        lambda f: (f["method"] == "featcal") & (f["task"] == "ifeval"),
        99.0,
    )
    verdict = judge(claim("t4_8b_gain_ifeval"), "mini", "suite", results)
    assert verdict.word == "holds" and verdict.detail.startswith("5 of 5 other tasks; ")
    raised = judge(claim("t4_8b_ifeval"), "mini", "suite", results)
    assert raised.detail == "99.0 against 74.0" and raised.one_run


def test_ranges_of_language_models_name_what_lies_outside(results):
    lines = language_tasks.ranges("mini").text.splitlines()
    smaller = next(line for line in lines if line.startswith("Smaller T5"))
    assert smaller.endswith("✓ all met")
    assert next(line for line in lines if line.startswith("Smaller Llama")).endswith("✓ all met")
    paper = [line.split("  ") for line in lines if line.startswith("the paper")]
    assert paper[0][1:4] == ["75.7", "78.9", "86.4"] and paper[2][1:4] == [
        "61.1",
        "60.1",
        "56.0 · 63.5 · 69.7",
    ]
    for key, rows in (("flan_t5_base-glue", "base"), ("llama_3b-mergebench", "expert")):
        changed(results, f"{key}.references", lambda f, m=rows: f["method"] == m, 20.0)
    text = language_tasks.ranges("mini").text
    assert "✗ outside: base" in text and "✗ not above the base: coding, math, instruction" in text


def test_models_that_were_not_chosen_by_ranges_are_held_to_none(results):
    for name in ("choice", "language_choice"):
        (results / f"{name}.json").write_text("{}")
    for text in (language_tasks.ranges("mini").text, overview.ranges("mini").text):
        assert "not chosen by ranges" in text and "✓" not in text and "✗" not in text
