"""The whole graph from nothing on the smoke suite: what every stage leaves behind, and one chain of it through DVC itself."""

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from PIL import Image
from smoke_graph import RUN, keep_a_chain, lay_out, run_smoke_graph, smoke_params

from featcal.stages.columns import CORRUPTED, CURVES, EXAMPLES, SCALES, SWEEP
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
    merged = [m for s in ("merge", "merge_with_data") for m in params[s].values() if m["role"] == "clip_b32"]
    calibrated = sum(len(params["calibrate"][key]["smoke"]["seeds"]) for key in RUN["calibrate"] if "b32" in key)
    adapted = sum(len(params["adapt"][key]["smoke"]) for key in RUN["adapt"])
    controls = sum(2 + len(params["ablate"][key]["smoke"]["without"]) for key in RUN["ablate"])
    models = 2 + len(merged) + calibrated + adapted + controls
    assert len(rows) == 3 * models
    assert {row["task"] for row in rows} == {"mnist", "svhn", "dtd"}
    assert all(0 <= row["value"] <= 100 and row["count"] == 60 for row in rows)
    methods = {"base", "expert", "merged", "featcal", "surgery", "prob_surgery", "anchor", "rescaled"}
    assert {row["method"] for row in rows} == methods
    named = [tuple(row[column] for column in ("upstream", "method", "setting", "seed", "task")) for row in rows]
    assert len(set(named)) == len(named)


def test_what_was_trained_leaves_its_loss_and_a_rescaled_merger_its_sweep(graph):
    work, _ = graph
    losses = read_rows(work / "results/smoke/clip_b32-8.curves.csv", CURVES)
    told = {(row["upstream"], row["method"], row["setting"]) for row in losses}
    assert ("adamerging", "merged", "") in told and ("task_arithmetic", "surgery", "paper_train") in told
    assert [row["step"] for row in losses if row["upstream"] == "adamerging"] == ["1", "2", "3"]
    swept = read_rows(work / "results/smoke/clip_b32-8.scales.csv", SCALES)
    best = max(swept, key=lambda row: (row["value"], -float(row["factor"])))
    assert [row["factor"] for row in swept if row["chosen"] == "1"] == [best["factor"]]


def test_the_anchor_of_task_arithmetic_is_task_arithmetic_at_a_larger_scale(graph):
    work, _ = graph
    from safetensors.torch import load_file

    base, merged, anchor = (
        load_file(work / "outputs/smoke" / folder / "model.safetensors")
        for folder in (
            "prepared/clip_b32-8/base",
            "merged/clip_b32-8-task_arithmetic",
            "ablated/clip_b32-8-task_arithmetic/anchor",
        )
    )
    blend = smoke_params()["ablate"]["clip_b32-8-task_arithmetic"]["smoke"]["anchor_blend"]
    for name, weight in anchor.items():
        expected = base[name].double() + blend * (merged[name].double() - base[name].double())
        assert (weight - expected).abs().max() <= 1e-6 * max(1.0, float(expected.abs().max()))


def test_drift_is_measured_at_every_block_for_merged_and_calibrated(graph):
    work, _ = graph
    rows = read_rows(work / "results/smoke/clip_b32-8.drift.csv", DRIFT)
    blocks = ["embeddings", *(f"{i:02d}" for i in range(6)), "features"]
    for model in (("merged", ""), ("featcal", "suite"), ("featcal", "paper")):
        for task in ("mnist", "svhn", "dtd"):
            assert [r["block"] for r in rows if (r["method"], r["setting"], r["task"]) == (*model, task)] == blocks


def test_damaged_images_leave_scores_of_every_method_and_examples(graph):
    work, _ = graph
    rows = read_rows(work / "results/smoke/clip_b32-8.corrupted.csv", CORRUPTED)
    told = {(row["method"], row["setting"], row["corruption"], row["task"]) for row in rows}
    assert len(told) == len(rows) == 4 * 2 * 3 and {row["method"] for row in rows} == {"featcal", "surgery", "prob_surgery"}
    shown = read_rows(work / "results/smoke/clip_b32-8.corrupted.examples.csv", EXAMPLES)
    assert [(row["task"], row["corruption"]) for row in shown] == [("svhn", kind) for kind in ("clean", "motion_blur", "fog")]
    with Image.open(work / "results/smoke/clip_b32-8.corrupted.examples.png") as sheet:
        assert sheet.size == (3 * 32, 32)


def test_a_model_on_two_curves_of_a_sweep_is_made_once_and_told_twice(graph):
    work, _ = graph
    rows = read_rows(work / "results/smoke/clip_b32-8.sweep.csv", SWEEP)
    points = {(row["parameter"], row["at"], row["chosen"]): row for row in rows if row["task"] == "dtd"}
    assert set(points) == {("ridge", "1e-06", "1"), ("ridge", "1", "0"), ("interpolation", "0.9", "1")}
    assert points["ridge", "1e-06", "1"]["value"] == points["interpolation", "0.9", "1"]["value"]


def test_a_role_that_the_suite_does_not_define_leaves_an_empty_result(graph):
    work, _ = graph
    assert read_rows(work / "results/smoke/clip_l14-8.csv", SCORES) == []


def test_every_page_is_executed_without_an_error(graph):
    work, _ = graph
    pages = sorted((work / "book/pages").glob("*.ipynb"))
    assert [page.stem for page in pages] == sorted(path.stem for path in (work / "notebooks").glob("*.ipynb"))
    for page in pages:
        cells = [cell for cell in nbformat.read(page, 4).cells if cell.cell_type == "code"]
        assert all(cell.execution_count for cell in cells)
        assert not [o for cell in cells for o in cell.outputs if o.output_type == "error"]


def test_what_each_calibration_cost_lies_beside_the_results(graph):
    work, _ = graph
    record = json.loads((work / "results/smoke/clip_b32-8.run.json").read_text())
    for key, run in smoke_params()["calibrate"].items():
        if run["role"] == "clip_b32" and run["smoke"]:
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
    for section in ("merge", "merge_with_data", "calibrate", "adapt", "ablate", "measure"):
        for entry in params[section].values():
            entry["bare"] = None
    (work / "params.yaml").write_text(yaml.safe_dump(params | {"suite": "bare"}, sort_keys=False))


def test_editing_one_ridge_or_the_suite_and_back_reruns_what_it_must_and_nothing_else(tmp_path):
    lay_out(tmp_path)
    keep_a_chain(tmp_path)
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
