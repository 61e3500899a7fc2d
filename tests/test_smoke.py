"""The whole graph from nothing on the smoke suite: what every stage leaves behind, and one chain of it through DVC itself."""

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from smoke_graph import lay_out, run_smoke_graph, smoke_params

from featcal.storage.results import DRIFT, SCORES, read_rows


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """The graph run once: its folder and the sha256 of weights and scores."""
    work = tmp_path_factory.mktemp("graph")
    return work, run_smoke_graph(work)


def test_every_model_of_the_pool_has_a_score_on_every_task(graph):
    work, _ = graph
    rows = read_rows(work / "results/smoke/clip_b32-8.csv", SCORES)
    params = smoke_params()
    calibrated = [c for k, c in params["calibrate"].items() if c["role"] == "clip_b32"]
    merged = [m for m in params["merge"].values() if m["role"] == "clip_b32"]
    models = 2 + len(merged) + sum(len(c["smoke"]["seeds"]) for c in calibrated)
    assert len(rows) == 3 * models
    assert {row["task"] for row in rows} == {"mnist", "svhn", "dtd"}
    assert all(0 <= row["value"] <= 100 and row["count"] == 60 for row in rows)
    assert {row["method"] for row in rows} == {"base", "expert", "merged", "featcal"}


def test_drift_is_measured_at_every_block_for_merged_and_calibrated(graph):
    work, _ = graph
    rows = read_rows(work / "results/smoke/clip_b32-8.drift.csv", DRIFT)
    blocks = ["embeddings", *(f"{i:02d}" for i in range(6)), "features"]
    for model in (("merged", ""), ("featcal", "suite"), ("featcal", "paper")):
        for task in ("mnist", "svhn", "dtd"):
            assert [r["block"] for r in rows if (r["method"], r["setting"], r["task"]) == (*model, task)] == blocks


def test_a_role_that_the_suite_does_not_define_leaves_an_empty_result(graph):
    work, _ = graph
    assert read_rows(work / "results/smoke/clip_l14-8.csv", SCORES) == []


def test_every_page_is_executed_without_an_error(graph):
    work, _ = graph
    pages = sorted((work / "book/pages").glob("*.ipynb"))
    assert [page.stem for page in pages] == sorted(["landing", "tasks", *smoke_params()["page"]])
    for page in pages:
        cells = [cell for cell in nbformat.read(page, 4).cells if cell.cell_type == "code"]
        assert all(cell.execution_count for cell in cells)
        assert not [o for cell in cells for o in cell.outputs if o.output_type == "error"]


def test_what_each_calibration_cost_lies_beside_the_results(graph):
    work, _ = graph
    record = json.loads((work / "results/smoke/clip_b32-8.run.json").read_text())
    for key, run in smoke_params()["calibrate"].items():
        if run["role"] == "clip_b32":
            costs = record["cost"][f"calibrate@{key}"]
            assert list(costs) == [f"seed {seed}" for seed in run["smoke"]["seeds"]]
            assert all(cost["flops"] > 0 and cost["seconds"] > 0 and cost["peak_host_bytes"] > 0 for cost in costs.values())


def test_a_calibrated_folder_explains_itself_and_loads(graph):
    work, _ = graph
    from transformers import CLIPVisionModel

    folder = work / "outputs/smoke/calibrated/clip_b32-8-task_arithmetic-suite/seed42"
    told = json.loads((folder / "featcal.json").read_text())
    ridge = smoke_params()["calibrate"]["clip_b32-8-task_arithmetic-suite"]["smoke"]["ridge"]
    assert told["settings"]["ridge"] == ridge
    assert CLIPVisionModel.from_pretrained(folder).config.num_hidden_layers == len(told["blocks"]) == 6


def test_seeds_of_the_draw_give_different_weights_and_nothing_else_does(graph):
    _, digests = graph
    calibrated = {path: digest for path, digest in digests.items() if "/calibrated/" in path}
    assert len(set(calibrated.values())) == len(calibrated)


def dvc(work: Path, *words: str) -> str:
    """Output of dvc, run with this interpreter's programs on the path."""
    programs = str(Path(sys.executable).parent)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(work), "DVC_NO_ANALYTICS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["dvc", *words], cwd=work, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def stages_run(said: str) -> list[str]:
    """The stages that DVC did not take from its cache."""
    return [line.split("'")[1] for line in said.splitlines() if line.startswith("Running stage")]


def switch_to_a_suite_without_roles(work: Path) -> None:
    """suites/bare.yaml, which has the images of the smoke suite and no models, in force."""
    text = (work / "suites/smoke.yaml").read_text()
    start, end = text.index("roles:"), text.index("fine_tune:")
    (work / "suites/bare.yaml").write_text(text[:start] + "roles: {clip_b32: null}\n" + text[end:])
    params = yaml.safe_load((work / "params.yaml").read_text())
    for section in ("merge", "calibrate", "measure"):
        for entry in params[section].values():
            entry["bare"] = None
    (work / "params.yaml").write_text(yaml.safe_dump(params | {"suite": "bare"}, sort_keys=False))


def test_editing_one_ridge_or_the_suite_and_back_reruns_what_it_must_and_nothing_else(tmp_path):
    lay_out(tmp_path)
    target = "results@clip_b32-8"
    dvc(tmp_path, "repro", target)
    assert "Running stage" not in dvc(tmp_path, "repro", target)
    params = yaml.safe_load((tmp_path / "params.yaml").read_text())
    params["calibrate"]["clip_b32-8-average-suite"]["smoke"]["ridge"] = 0.7
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    assert stages_run(dvc(tmp_path, "repro", target)) == [
        "calibrate@clip_b32-8-average-suite",
        "evaluate@clip_b32-8",
        "results@clip_b32-8",
    ]
    switch_to_a_suite_without_roles(tmp_path)
    assert "evaluate@clip_b32-8" in stages_run(dvc(tmp_path, "repro", target))
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    again = stages_run(dvc(tmp_path, "repro", target))
    assert set(again) <= {"prepare_data", "results@clip_b32-8"}, "switching back trains, calibrates and evaluates nothing again"
    assert read_rows(tmp_path / "results/smoke/clip_b32-8.csv", SCORES)
