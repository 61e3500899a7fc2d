"""Accuracy tables on invented results: rows and columns of the paper, changes, shares, and the
drawing of gains.
"""

import numpy as np
import pytest
from synthetic_results import write_project

from reproduction.report import accuracies, extended
from reproduction.report.evidence import Evidence
from reproduction.report.page import Page
from reproduction.report.paper import PRINTED
from reproduction.report.tables import accuracy_rows, paper_recovered, paper_rows, recovered


@pytest.mark.parametrize(("role", "pool"), PRINTED)
def test_rows_stand_in_the_papers_order_and_none_is_missing(results, role, pool):
    ours = [row.label for row in accuracy_rows(Evidence("mini", role, pool))]
    _, printed = paper_rows(PRINTED[role, pool])
    assert ours == [row.label for row in printed]
    assert len(ours) == (3 if pool == "8" else 2) + 4 * 4, (
        "the larger pools have no multi-task model"
    )


def test_settings_that_are_not_the_main_ones_stand_in_a_fold_and_only_where_they_were_run(results):
    eight, twenty = (
        accuracies.measured(Page(page, "mini")).html for page in ("table01", "table10")
    )
    assert (
        eight.index("at the suite’s settings")
        < eight.index("<details")
        < eight.index("at the paper’s settings — ")
    )
    assert "<details" not in twenty and "paper’s settings" not in twenty
    assert "<details" not in accuracies.measured(Page("table01", "paper")).html


def test_the_table_of_averages_has_the_papers_rows_and_columns(results):
    lines = [
        line.split("  ") for line in extended.averages(Page("table02", "mini")).text.splitlines()
    ]
    assert lines[1][1:] == ["8 tasks, larger model"] + [
        f"{n} tasks, {s} model" for n in (14, 20) for s in ("smaller", "larger")
    ]
    _, printed = paper_rows("table02")
    assert [row.label for row in extended.rows(Page("table02", "mini"))] == [
        row.label for row in printed
    ]
    surgery = {
        row.upstream: row
        for row in extended.rows(Page("table02", "mini"))
        if row.label == "w/ Surgery"
    }["wudi"]
    assert surgery.cells["20-Task L/14"].value == pytest.approx(79 + 0.25 * 19)
    assert (
        surgery.cells["20-Task L/14"].change == pytest.approx(3)
        and "8-Task L/14" not in surgery.cells
    )


def test_lines_of_the_drawing_are_the_gains_by_number_of_tasks(results):
    drawn = extended.drawn(Page("table02", "mini")).axes
    (panel,) = [panel for panel in drawn if panel.get_title() == "Task Arithmetic,\nsmaller model"]
    featcal = panel.containers[0].lines[0]
    assert list(featcal.get_xdata()) == [8, 14, 20] and list(featcal.get_ydata()) == pytest.approx(
        [16.2, 16, 16]
    )


def test_cells_hold_mean_spread_and_change_over_the_merger(results):
    rows = {
        (row.upstream, row.label): row for row in accuracy_rows(Evidence("mini", "clip_b32", "8"))
    }
    cell = rows["task_arithmetic", "w/ FeatCal"].cells["sun397"]
    values = np.array([80.0, 80.2, 80.4])
    assert (cell.value, cell.spread) == (
        pytest.approx(values.mean()),
        pytest.approx(values.std(ddof=1)),
    )
    assert cell.change == pytest.approx(values.mean() - 64) and cell.best
    assert rows["task_arithmetic", "w/ ProbSurgery"].cells == {}
    paper = {
        row.label: row
        for row in accuracy_rows(Evidence("mini", "clip_b32", "8"), "paper")
        if row.upstream == "average"
    }
    assert paper["w/ FeatCal"].cells["sun397"].change == pytest.approx(72 - 60)


def test_columns_follow_the_suite_of_the_user(tmp_path, monkeypatch):
    mine = ["cats", "gtsrb", "dogs"]
    write_project(tmp_path, "files", tasks=mine)
    monkeypatch.chdir(tmp_path)
    text = accuracies.measured(Page("table01", "files")).text.splitlines()
    assert text[1].split("  ") == ["Model", "cats", "GTSRB", "dogs", "Average"]


def test_the_share_recovered_is_the_part_of_the_gap(results):
    found = {(r.upstream, r.setting): r for r in recovered(Evidence("mini", "clip_b32", "8"))}
    assert found["average", "suite"].share == pytest.approx(100 * (80 - 60) / (90 - 60))
    assert found["average", "suite"].one_run and not found["task_arithmetic", "suite"].one_run
    assert paper_recovered("table10", "average") == pytest.approx(
        100 * (87.3 - 61.1) / (90.3 - 61.1)
    )
    assert paper_recovered("table10", "average", corrected=True) == pytest.approx(
        100 * (73.15 - 61.1) / (89.8 - 61.1)
    )
    assert paper_recovered("table01", "task_arithmetic") == pytest.approx(
        100 * (85.5 - 67.5) / (90.3 - 67.5)
    )
