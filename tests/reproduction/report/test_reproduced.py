"""Values of the suite `paper` against the printed ones, and silence in every other suite."""

import pandas as pd
import pytest
from synthetic_results import write_project

from reproduction.report import paper
from reproduction.report.evidence import Evidence
from reproduction.report.pages import accuracies, reproduced, samples
from reproduction.report.pages.reproduced import ROUNDING, against_printed, tolerance
from reproduction.report.statistics import Estimate
from reproduction.results import SCORES, write_rows

PAGES = [*paper.PRINTED.items(), (("llama_3b", "mergebench"), "table14")]


@pytest.fixture
def project(tmp_path, monkeypatch):
    folder = write_project(tmp_path, "paper", empty=True)
    monkeypatch.chdir(tmp_path)
    return folder


def write_as_printed(folder, role, pool, number, moved=None):
    """Write the paper's corrected values of one table as scores, some of them moved."""
    frame = paper.corrected_table(number)
    if frame["model"].nunique() > 1:
        frame = frame[frame["model"] == paper.PAPER_MODELS[role]]
    shared = {"suite": "paper", "role": role, "pool": pool, "metric": "accuracy", "count": 10**7}
    rows = []
    for _, cell in frame[frame["task"] != paper.AVERAGE].iterrows():
        if number in ("table04", "table14") and cell["method"] == "expert" and not cell["setting"]:
            continue  # a row of the highest values, which no model has
        key = {name: cell[name] for name in ("upstream", "method", "task")}
        calibrated = cell["method"] in ("featcal", "surgery", "prob_surgery")
        columns = {"setting": "paper" if calibrated else cell["setting"]}
        columns |= {"seed": "42" if calibrated else ""}
        value = cell["value"] + (moved or {}).get(tuple(key.values()), 0.0)
        rows.append(shared | key | columns | {"value": value})
    write_rows(folder / f"scores/{role}-{pool}/scores.csv", rows, SCORES)


def cells(role, pool, number):
    compared = reproduced.compared(Evidence("paper", role, pool), number)
    return {(cell.row, cell.column): cell for cell in compared}


def test_a_tolerance_is_rounding_and_two_standard_errors_of_images_and_of_both_sides_seeds():
    one, three = (Estimate(80.0, sd, n, known_variance=0.04) for sd, n in ((None, 1), (0.6, 3)))
    allowed = {0.0: tolerance(one), 0.09: tolerance(one, spread=0.3)}  # of one run of the paper
    allowed |= {0.03: tolerance(one, spread=0.3, seeds=3), 0.36: tolerance(three)}
    for variance, actual in allowed.items():
        assert actual == pytest.approx(0.05 + 2 * (0.04 + variance) ** 0.5)


def test_printed_tables_reproduce_themselves_but_for_values_that_are_moved(project):
    """Averages are means of printed cells here, which are rounded."""
    write_as_printed(project, "clip_b32", "8", "table01", {("wudi", "featcal", "dtd"): 1.0})
    compared = cells("clip_b32", "8", "table01")
    assert len(compared) == len(paper.paper_table("table01"))
    moved = compared["WUDI-Merging w/ FeatCal", "dtd"]
    assert not moved.as_printed and tolerance(moved.measured) < 0.1
    assert moved.measured.mean - moved.printed == pytest.approx(1.0)
    missed = {key for key, cell in compared.items() if not cell.as_printed}
    assert {key for key in missed if key[1] != paper.AVERAGE} == {(moved.row, moved.column)}


def test_a_rotated_row_is_reproduced_in_its_corrected_form_only(project):
    write_as_printed(project, "clip_b32", "14", "table08")
    rotated = cells("clip_b32", "14", "table08")["Task Arithmetic", "mnist"]
    assert rotated.as_corrected and not rotated.as_printed
    assert rotated.corrected == 85.6 and rotated.doubt
    text = accuracies.measured(Evidence("paper", "clip_b32", "14")).text
    assert "printed 48.2, +37.4" in text and "corrected 85.6" in text
    assert "values reproduced as printed" in text and ", 0 as corrected" not in text


def test_the_paper_s_own_seeds_count_where_it_repeats_an_experiment(project):
    write_as_printed(project, "clip_b32", "8", "table01")
    compared = cells("clip_b32", "8", "table01")
    repeated = compared["Task Arithmetic w/ Surgery", paper.AVERAGE]
    once = compared["WUDI-Merging w/ Surgery", paper.AVERAGE]
    assert repeated.reproduced(repeated.measured.mean + ROUNDING + 2 * 0.2 - 0.01)
    assert not once.reproduced(once.measured.mean + 0.1)


@pytest.mark.parametrize(("experiment", "number"), PAGES)
def test_every_page_of_values_says_what_is_reproduced_and_how_many(project, experiment, number):
    role, pool = experiment
    write_as_printed(project, role, pool, number)
    compared, table = cells(role, pool, number), paper.paper_table(number)
    assert len(compared) >= 0.8 * len(table) / table["model"].nunique()
    text = against_printed(Evidence("paper", role, pool), number)
    assert f"of {len(compared)} values reproduced as printed" in text


def test_studies_are_compared_by_number_of_images_and_by_damage(tmp_path, monkeypatch):
    folder = write_project(tmp_path, "paper")
    for kind in ("samples", "samples.correct", "corrupted", "corrupted.correct"):
        path = folder / kind.partition(".")[0] / f"clip_b32-8/{kind}.csv"
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
        tuned = frame[frame["setting"] != "paper"].replace({"setting": {"suite": "paper"}})
        tuned.to_csv(path, index=False)
    monkeypatch.chdir(tmp_path)
    data = Evidence("paper", "clip_b32", "8")
    budgets = samples.compared_means(data)
    assert {cell.column for cell in budgets} == {"n = 8", "n = 64", "n = 512"} and len(budgets) == 9
    assert "values reproduced as printed" in samples.means(data).text
    assert any(cell.column == "Fog" for cell in samples.compared_damage(data))
