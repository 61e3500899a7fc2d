"""Tables of accuracies and of language models: the paper's rows, and cells computed another way."""

import pandas as pd
import pytest
from synthetic_results import write_project

from featcal.errors import MissingPath
from pipeline import RESULTS
from reproduction.report.evidence import Evidence, project_root, select
from reproduction.report.html import margin
from reproduction.report.pages import accuracies, language
from reproduction.report.paper import AVERAGE, PAPER_MODELS, PRINTED, TEXT_TASKS
from reproduction.report.statistics import Estimate
from reproduction.report.tables import METHODS, accuracy_rows, by_task, paper_recovered, paper_rows

MEASURED = sorted({folder.name for folder in RESULTS.glob("scores/*-*")} - {"smollm2-chat"})
NAMES = {label: method for method, label in METHODS.items()} | {
    "Pre-trained": "base", "Fine-tuned (STL)": "expert", "Multi-task (MTL)": "multitask",
}  # fmt: skip
KEYS = {"printed": "paper", "published": "paper", "tuned": "suite", "smaller": "suite", "": "paper"}


def labels(rows):
    return list(dict.fromkeys(row.label.partition(", ")[0] for row in rows))


@pytest.mark.parametrize(("role", "pool"), PRINTED)
def test_a_table_has_the_papers_rows_and_every_setting(results, role, pool):
    measured = accuracy_rows(Evidence("mini", role, pool))
    text = pool in TEXT_TASKS
    _, printed = paper_rows(PRINTED[role, pool], PAPER_MODELS[role] if text else "")
    assert labels(measured) == labels(printed)
    if text:
        assert all(list(row.cells) == [*TEXT_TASKS[pool], AVERAGE] for row in (*measured, *printed))
    else:
        settings = 2 if pool == "8" else 1
        run = [row for row in measured if row.kind == "merger" and row.cells]
        assert len(measured) == (3 if pool == "8" else 2) + 4 + len(run) * 3 * settings


@pytest.mark.parametrize("name", MEASURED)
def test_every_cell_is_the_mean_of_its_rows_in_the_csv(name):
    """Plain pandas on the files against what the pages show."""
    role, pool = name.rsplit("-", 1)
    files = [RESULTS / kind / name / f"{kind}.csv" for kind in ("scores", "ablate")]
    scores = pd.concat([pd.read_csv(f, keep_default_na=False) for f in files if f.is_file()])
    checked = 0
    for row in accuracy_rows(Evidence("mini", role, pool, RESULTS)):
        calibrated = row.kind == "calibrated"  # mergers' names have commas too
        label, _, setting = row.label.partition(", ") if calibrated else (row.label, "", "")
        method = NAMES.get(label, "merged")
        if not row.cells or (method == "expert" and pool == "mergebench"):
            continue
        model_scores = scores[(scores["method"] == method) & (scores["upstream"] == row.upstream)]
        chosen = KEYS[setting] if method in METHODS else ""
        model_scores = model_scores[model_scores["setting"] == chosen]
        for task, values in model_scores.groupby("task")["value"]:
            assert row.cells[task].value == pytest.approx(values.mean())
        by_seed = model_scores.groupby("seed")["value"].mean()
        assert row.cells[AVERAGE].value == pytest.approx(by_seed.mean())
        if len(by_seed) > 1:
            assert row.cells[AVERAGE].spread == pytest.approx(by_seed.std())
        checked += 1
    assert checked >= 6


@pytest.mark.parametrize(("value", "word"), [(78.46, "tie"), (80.6, "above"), (76.4, "below")])
def test_differences_are_named_by_two_standard_errors(value, word):
    left, right = (Estimate(mean, None, 1, known_variance=0.5) for mean in (value, 78.5))
    assert margin(left, right).startswith(f"{value - 78.5:+z.1f} <small>{word}")


def test_the_answer_is_featcal_minus_its_merger_and_minus_the_better_adapter(results):
    data = Evidence("mini", "clip_b32", "8")
    lines = [line.split("  ") for line in accuracies.answer("table01", data).text.splitlines()]
    printed, tuned = [line for line in lines if line[0].startswith("Task Arithmetic")]
    assert printed[2:5] == ["+18.0", "79 %", "+6.7"], "85.5 − 67.5, of 90.3 − 67.5; 85.5 − 78.8"
    assert printed[5] == "+8.2"
    assert tuned[4:] == ["+16.2", " above", "62 %", "+10.0", " above"]


def test_table_2_holds_the_averages_of_the_other_experiments(results):
    lines = [line.split("  ") for line in accuracies.extended("mini", "clip_b32").text.splitlines()]
    columns, printed = paper_rows("table02")
    assert lines[1] == ["Model", *columns]
    kept = (name for name, *_ in lines[2:] if not name.endswith((", printed", ", published")))
    names = [name.removesuffix(", tuned").removesuffix(", smaller") for name in kept]
    assert names == [row.label for row in printed]
    surgery = [line for line in lines if line[0] == "w/ Surgery, smaller"][1]
    assert surgery[-2:] == ["83.8", "↑3.0"], "79 + 0.25 · 19 after WUDI with twenty tasks"


def test_columns_are_the_tasks_of_the_user(tmp_path, monkeypatch):
    write_project(tmp_path, "files", tasks=["cats", "gtsrb", "dogs"])
    monkeypatch.chdir(tmp_path)
    text = accuracies.measured(Evidence("files", "clip_b32", "8")).text.splitlines()
    assert text[1].split("  ") == ["Model", "cats", "GTSRB", "dogs", "Average"]


def test_the_share_recovered_is_the_part_of_the_gap(results):
    data = Evidence("mini", "clip_b32", "8")
    assert accuracies.share_of(data, "average", "suite") == f"{100 * (80 - 60) / (90 - 60):.0f}"
    assert "not run" in accuracies.share_of(data, "wudi", "suite")
    shares = [paper_recovered("table10", "average", corrected=c) for c in (False, True)]
    assert shares[0] == pytest.approx(100 * (87.3 - 61.1) / (90.3 - 61.1))
    assert shares[1] == pytest.approx(100 * (73.15 - 61.1) / (89.8 - 61.1))


def test_the_highest_of_base_and_experts_is_taken_test_by_test(results):
    data = Evidence("mini", "llama_3b", "mergebench")
    rows = data.table("scores")
    models = rows[rows["method"].isin(("base", "expert"))]
    top = models.groupby(["task", "method", "setting"])["value"].mean().groupby("task").max()
    highest = {name: value.mean for name, value in by_task(data, ("", "expert", "")).items()}
    assert highest == {**top, AVERAGE: pytest.approx(top.mean())}
    for model in ("llama-3.2-3b-instruct", "llama-3.1-8b-instruct"):
        *models, last = language._printed_experts(model)
        for test, cell in last.cells.items():
            if test != AVERAGE:
                assert cell.value == max(row.cells[test].value for row in models)


def test_the_project_is_found_by_climbing_and_otherwise_named(tmp_path):
    (tmp_path / "params.yaml").write_text("suite: mini\n")
    deep = tmp_path / "book" / "pages"
    deep.mkdir(parents=True)
    assert project_root(deep) == tmp_path.resolve()
    with pytest.raises(MissingPath, match="params.yaml"):
        project_root(tmp_path.parent)


@pytest.mark.parametrize(
    ("kind", "file", "columns"),
    [
        ("drift", "drift/clip_b32-8/drift.csv", {"method": "merged"}),
        ("scores", "scores/clip_b32-8/scores.csv", {"method": "featcal", "setting": "suite"}),
        ("scores", "ablate/clip_b32-8/ablate.csv", {"method": "anchor"}),
        ("corrupted", "scores/clip_b32-8/scores.csv", {"corruption": "clean", "method": "featcal"}),
    ],
)
def test_rows_picked_before_are_picked_anew_from_a_changed_file(kind, file, columns, results):
    def selected():
        return select(Evidence("mini", "clip_b32", "8").table(kind), columns)

    before, path = selected(), results / file
    assert len(before) and selected().equals(before)
    head, *lines = path.read_text().splitlines(keepends=True)
    value = columns["method"] if "method" in columns else columns["corruption"]
    path.write_text("".join([head, *(line for line in lines if f",{value}," not in line)]))
    assert selected().empty
    path.write_text("".join([head, *lines]))
    assert selected().equals(before)
