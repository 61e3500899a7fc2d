"""Every stage of the graph writes its results on the smoke suite, and DVC reruns only what changed."""

import json
import os
import shutil
import sys
from itertools import product
from pathlib import Path

import nbformat
import numpy as np
import pytest
from PIL import Image
from resolved import entry
from smoke_graph import DEPTH, FEW, RUN, keep_a_chain, run_smoke_graph, smoke_params, working_in

from featcal.cli.main import main
from featcal.data.batches import draw_indices
from pipeline import settings, write_settings
from reproduction import results
from reproduction.engine.calibrate import rescale
from reproduction.engine.context import Setup, load_context
from reproduction.experiments import ADAPTERS, MAIN, studies
from reproduction.report.statistics import bits
from reproduction.results import correct_columns, read_rows

OUTER = ("surgery", "prob_surgery")  # adapters after the last feature


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """Run the graph once; return its folder and the sha256 of weights and scores."""
    work = tmp_path_factory.mktemp("graph")
    return work, run_smoke_graph(work)


@pytest.fixture
def read(graph):
    """Return a function that reads a results file of the graph."""
    return lambda name, columns: read_rows(graph[0] / "results/smoke" / name, columns)


def test_every_model_of_the_pool_has_a_score_on_every_task(read):
    rows = read("scores/clip_b32-8/scores.csv", results.SCORES)
    params, key = smoke_params(), "clip_b32-8"
    calibrated = len(RUN["calibrate"]) * len(params["calibrate"][key]["smoke"]) * len(FEW["seeds"])
    adapted = (
        4 + 2 + 3
    )  # settings of two adapters after one merged model, and of the third after another
    models = 3 + len(params["merge"][key]) + calibrated + adapted
    assert len(rows) == 3 * models
    assert {row["task"] for row in rows} == {"mnist", "svhn", "dtd"}
    assert all(0 <= row["value"] <= 100 and row["count"] == 60 for row in rows)
    methods = {"base", "expert", "multitask", "merged", "featcal", *ADAPTERS}
    assert {row["method"] for row in rows} == methods
    named = [
        tuple(row[column] for column in ("upstream", "method", "setting", "seed", "task"))
        for row in rows
    ]
    assert len(set(named)) == len(named)


def test_of_every_score_that_is_an_accuracy_the_right_samples_are_kept(graph):
    work, _ = graph
    columns = {
        "scores": results.SCORES,
        "ablate": results.SCORES,
        "samples": results.SAMPLES,
        "cost": results.AUDIT,
        "sweep": results.SWEEP,
        "corrupted": results.CORRUPTED,
    }
    columns |= {
        "choices": results.CHOICES,
        "default": results.DEFAULT,
        "expert_seeds": results.EXPERT_SEEDS,
        "field": results.SCORES,
    }
    columns |= {"second_encoder": results.SCORES, "extrapolation": results.EXTRAPOLATION}
    files = list((work / "results/smoke").rglob("*.correct.csv"))
    assert {path.name.split(".")[0] for path in files} == set(columns)
    for path in files:
        own = columns[path.name.split(".")[0]]
        scores = read_rows(path.with_name(path.name.replace(".correct", "")), own)
        kept = read_rows(path, correct_columns(own))
        assert len(kept) == len(scores)
        for row, right in zip(scores, kept, strict=True):
            assert all(str(row[c]) == str(right[c]) for c in own if c not in ("value", "count"))
            if row["metric"] == "accuracy":
                assert row["value"] == round(
                    100 * bits(right["correct"], row["count"]).mean(), 4
                ), (path.name, row)
            else:
                assert right["correct"] == ""


def test_what_an_adapter_saw_of_the_test_images_is_its_draw(graph, read):
    work, _ = graph
    rows = read("scores/clip_b32-8/seen.csv", results.SEEN)
    named = {(row["stream"], row["samples"], row["seed"]) for row in rows}
    assert named == {("test_unlabelled", "16", "42"), ("test_unlabelled", "", "42")}, (
        "the adapters' draw, and AdaMerging's"
    )
    for row in rows:
        seen = bits(row["seen"], row["count"])
        drawn = range(60) if row["samples"] == "" else sorted(draw_indices(row["task"], 60, 16, 42))
        assert list(np.flatnonzero(seen)) == list(drawn)
    budgets = read("samples/clip_b32-8/samples.seen.csv", results.SEEN)
    assert {(r["samples"], int(bits(r["seen"], r["count"]).sum())) for r in budgets} == {
        ("16", 16),
        ("64", 60),
    }
    damaged = read("corrupted/clip_b32-8/corrupted.seen.csv", results.SEEN)
    assert damaged == [row for row in rows if row["samples"] == "16"]
    assert read("scores/clip_l14-8/seen.csv", results.SEEN) == []
    assert not list((work / "results/smoke").glob("scores/*glue/seen.csv"))


def test_a_larger_pool_scores_every_merger_and_each_with_what_calibrates_it(graph, read):
    work, _ = graph
    rows = read("scores/clip_b32-14/scores.csv", results.SCORES)
    models = [
        (row["upstream"], row["method"], row["setting"]) for row in rows if row["task"] == "eurosat"
    ]
    made = [
        ("merged", ""),
        ("featcal", "suite"),
        *((m, setting) for m in ADAPTERS for setting in ("suite", "suite_train")),
    ]
    mergers = smoke_params()["merge"]["clip_b32-14"]
    expected = [(upstream, *kind) for upstream in mergers for kind in made]
    assert sorted(models) == sorted([("", "base", ""), ("", "expert", ""), *expected]) and len(
        rows
    ) == 4 * len(models)
    record = json.loads((work / "results/smoke/scores/clip_b32-14/run.json").read_text())
    assert len(record["cost"]) == len(mergers) and {
        "merge@clip_b32-14",
        "adapt@clip_b32-14",
    } <= set(record["seconds"])
    for key in ("clip_b32-20", "clip_l14-14"):  # the suite has no such pool, no such role
        assert read(f"scores/{key}/scores.csv", results.SCORES) == []


def test_an_expert_is_made_for_the_smallest_pool_with_its_task(graph, read):
    work, _ = graph
    prepared = work / "outputs/smoke/prepared"
    assert [path.name for path in (prepared / "clip_b32-14/experts").iterdir()] == ["eurosat"]
    rows = {pool: read(f"scores/clip_b32-{pool}/scores.csv", results.SCORES) for pool in (8, 14)}
    found = {
        pool: {r["task"]: r["value"] for r in rows[pool] if r["method"] == "expert"}
        for pool in rows
    }
    assert found[8].items() <= found[14].items()


def test_what_was_trained_leaves_its_loss_and_a_rescaled_merger_its_sweep(read):
    losses = read("scores/clip_b32-8/curves.csv", results.CURVES)
    named = {(row["upstream"], row["method"], row["setting"]) for row in losses}
    assert ("adamerging", "merged", "") in named and (
        "task_arithmetic",
        "surgery",
        "paper_train",
    ) in named
    assert [row["step"] for row in losses if row["upstream"] == "adamerging"] == ["1", "2", "3"]
    swept = read("ablate/clip_b32-8/scales.csv", results.SCALES)
    best = max(swept, key=lambda row: (row["value"], -float(row["factor"])))
    assert [row["factor"] for row in swept if row["chosen"] == "1"] == [best["factor"]]


def test_every_control_has_a_score_on_every_task(graph, read):
    work, _ = graph
    study = load_context(work).experiments.studies["ablate"]["clip_b32-8"]
    rows = read("ablate/clip_b32-8/ablate.csv", results.SCORES)
    wanted = {("anchor", ""), ("rescaled", ""), *(("featcal", name) for name in study.without)}
    assert {(row["method"], row["setting"]) for row in rows} == wanted and len(rows) == 3 * len(
        wanted
    )
    assert {row["upstream"] for row in rows} == {"task_arithmetic"} and all(
        row["count"] == 60 for row in rows
    )


def test_the_anchor_of_task_arithmetic_is_task_arithmetic_at_a_larger_scale(graph):
    work, _ = graph
    from safetensors.torch import load_file

    context = load_context(work)
    blend = context.experiments.studies["ablate"]["clip_b32-8"].featcal.anchor_blend
    anchor = rescale(Setup(context, "clip_b32", 8), "task_arithmetic", blend).state_dict()
    base, merged = (
        load_file(work / "outputs/smoke" / folder / "model.safetensors")
        for folder in ("prepared/clip_b32-8/base", "merged/clip_b32-8/task_arithmetic")
    )
    assert blend > 1 and base.keys() <= anchor.keys()
    for name, weight in base.items():
        expected = weight.double() + blend * (merged[name].double() - weight.double())
        assert (anchor[name] - expected).abs().max() <= 1e-6 * max(1.0, float(expected.abs().max()))


def test_drift_is_measured_at_every_block_for_merged_and_calibrated(read):
    rows = read("drift/clip_b32-8/drift.csv", results.DRIFT)
    blocks = ["embeddings", *(f"{i:02d}" for i in range(DEPTH["clip_b32"])), "features"]
    for model in (("merged", ""), ("featcal", "suite"), ("featcal", "paper")):
        for task in ("mnist", "svhn", "dtd"):
            assert [
                r["block"] for r in rows if (r["method"], r["setting"], r["task"]) == (*model, task)
            ] == blocks


def test_damaged_images_leave_scores_of_every_method_and_examples(graph, read):
    work, _ = graph
    rows = read("corrupted/clip_b32-8/corrupted.csv", results.CORRUPTED)
    named = {(row["method"], row["setting"], row["corruption"], row["task"]) for row in rows}
    assert len(named) == len(rows) == 6 * 2 * 3 and {row["method"] for row in rows} == {
        "featcal",
        "surgery",
        "prob_surgery",
    }
    trained = {row["method"] for row in rows if row["setting"] == "suite_train"}
    assert trained == {"surgery", "prob_surgery"}, "adapters on FeatCal's images, too"
    shown = read("corrupted/clip_b32-8/corrupted.examples.csv", results.EXAMPLES)
    assert [(row["task"], row["corruption"]) for row in shown] == [
        ("svhn", kind) for kind in ("clean", "motion_blur", "fog")
    ]
    with Image.open(work / "results/smoke/corrupted/clip_b32-8/corrupted.examples.png") as sheet:
        assert sheet.size == (3 * 32, 32)


def test_drawn_parts_are_scored_where_no_adapter_has_looked(graph, read):
    """The smoke suite has 60 test images and three tasks: 16 images are drawn, two tasks make one
    part, all three another.
    """
    work, _ = graph
    rows = read("task_counts/clip_b32-8/task_counts.csv", results.TASK_COUNTS)
    assert {row["count"] for row in rows} == {60 - 16}
    named = {(row["upstream"], row["method"], row["setting"]) for row in rows}
    made = [("merged", ""), ("featcal", "suite"), ("featcal", "paper")]
    made += [
        (method, setting)
        for method in ("surgery", "prob_surgery", "mean_shift")
        for setting in ("suite", "suite_train")
    ]
    assert named == {
        ("", "expert", ""),
        *((upstream, *kind) for upstream in ("average", "task_arithmetic") for kind in made),
    }
    assert len(rows) == (2 + 3) * len(named) and {(row["tasks"], row["draw"]) for row in rows} == {
        ("2", "0"),
        ("3", "0"),
    }
    assert all(
        float(row["union"]) <= row["value"] + 1e-4 for row in rows
    )  # as written, to four decimals and to six
    assert all(float(row["mean_drift"]) <= float(row["drift"]) for row in rows)
    assert all(float(row["drift"]) == 0 for row in rows if row["method"] == "expert")
    classes = json.loads(
        (work / "results/smoke/task_counts/clip_b32-8/task_counts.settings.json").read_text()
    )["classes"]
    assert classes == {"mnist": 10, "svhn": 10, "dtd": 10}


def test_a_model_on_two_curves_of_a_sweep_is_made_once_and_reported_twice(read):
    rows = read("sweep/clip_b32-8/sweep.csv", results.SWEEP)
    points = {
        (row["parameter"], row["at"], row["chosen"]): row for row in rows if row["task"] == "dtd"
    }
    assert set(points) == {
        ("ridge", "1e-06", "1"),
        ("ridge", "1", "0"),
        ("interpolation", "0.9", "1"),
    }
    assert points["ridge", "1e-06", "1"]["value"] == points["interpolation", "0.9", "1"]["value"]


def test_one_choice_after_the_other_is_scored_next_to_two_draws_of_the_default(read):
    rows = read("choices/flan_t5_base-glue/choices.csv", results.CHOICES)
    named = [
        (row["choice"], row["option"], row["default"], row["seed"])
        for row in rows
        if row["task"] == "sst2"
    ]
    changed = [("split", "validation", "0", "42"), ("samples", "8", "0", "42")]
    assert named == [("", "", "1", "42"), ("", "", "1", "43"), *changed]


def test_the_default_is_scored_with_what_it_is_compared_with(graph):
    work, _ = graph
    for key, task in (("clip_b32-8", "dtd"), ("flan_t5_base-glue", "sst2")):
        folder = work / f"results/smoke/default/{key}"
        rows = [r for r in read_rows(folder / "default.csv", results.DEFAULT) if r["task"] == task]
        draws = [("16", "average"), ("16", "tsv_merge"), ("8", "average"), ("8", "tsv_merge")]
        assert list(dict.fromkeys((row["samples"], row["upstream"]) for row in rows)) == draws
        for n, merger in draws:
            own = [r for r in rows if (r["samples"], r["upstream"]) == (n, merger)]
            named = {row["setting"] or row["method"] for row in own}
            searched = {"search"} if (n, merger) == draws[0] else set()
            assert {"merged", "paper", "auto", *OUTER} | searched <= named
            assert ("search" in named) == bool(searched) and len(named) == len(own)
        found = read_rows(folder / "default.candidates.csv", results.CANDIDATES)
        keys = ("upstream", "method", "samples")
        for one in {tuple(row[key] for key in keys) for row in found}:
            tried = [row for row in found if tuple(row[key] for key in keys) == one]
            [chosen] = [row for row in tried if row["chosen"] == "1"]
            if one[1] != "auto":  # which also refuses what is worse on some task
                assert float(chosen["divergence"]) == min(float(r["divergence"]) for r in tried)


def test_final_features_of_models_and_adapters_are_compared_with_the_experts(read):
    models = {
        ("merged", ""),
        *(("featcal", s) for s in ("suite", "paper")),
        *(("surgery", s) for s in ("suite", "paper")),
    }
    rows = read("drift/clip_b32-8/alignment.csv", results.ALIGNMENT)
    named = {(row["method"], row["setting"], row["task"]) for row in rows}
    assert named == {(*model, task) for model in models for task in ("mnist", "svhn", "dtd")}
    single = read("drift/clip_b32-8/similarity.csv", results.SIMILARITY)
    assert {row["task"] for row in single} == {"dtd"} and len(single) == 60 * len(models)
    for row in (row for row in rows if row["task"] == "dtd"):
        own = [
            s["similarity"]
            for s in single
            if (s["method"], s["setting"]) == (row["method"], row["setting"])
        ]
        assert sum(own) / len(own) == pytest.approx(row["cosine"], abs=1e-4)
    points = read("drift/clip_b32-8/projection.csv", results.PROJECTION)
    assert len(points) == 3 * 3 * 60


def test_task_vectors_are_those_of_models_and_not_of_adapters(read):
    rows = read("drift/clip_b32-8/vectors.csv", results.VECTORS)
    assert {row["method"] for row in rows} == {"merged", "featcal"} and {
        row["part"] for row in rows
    } == {"backbone", "linear"}
    assert all(-1 <= row["cosine"] <= 1 and row["size"] > 0 for row in rows)
    drift = read("drift/clip_b32-8/drift.csv", results.DRIFT)
    assert {row["method"] for row in drift} == {"merged", "featcal"}


def test_every_statement_of_the_theory_has_been_checked_and_none_is_violated(read):
    rows = read("theory/clip_b32-8/theory.csv", results.THEORY)
    worst = [row for row in rows if row["task"] == "" and row["method"] in ("merged", "featcal")]
    room = {row["statement"]: row["value"] for row in worst if row["quantity"] == "room"}
    numbered = {f"proposition_{i}" for i in (3, 5, 6, 7, 8)} | {
        "corollary_2",
        "proposition_8_transport",
    }
    assert numbered <= set(room) and min(room.values()) >= 0
    shared = {row["statement"]: row["value"] for row in worst if row["quantity"] == "digits"}
    exact = ("proposition_1", "proposition_4", "equation_45")
    assert min(shared[name] for name in exact) > 10 and {"proposition_2", "proposition_7"} <= set(
        shared
    )


def test_every_page_is_executed_without_an_error(graph, read):
    work, _ = graph
    pages = sorted((work / "book/pages").glob("*.ipynb"))
    assert [page.stem for page in pages] == sorted(
        page.stem for page in (work / "notebooks").glob("*.ipynb")
    )
    for page in pages:
        cells = [cell for cell in nbformat.read(page, 4).cells if cell.cell_type == "code"]
        assert all(cell.execution_count for cell in cells)
        assert not [o for cell in cells for o in cell.outputs if o.output_type == "error"]


def test_what_each_calibration_cost_lies_next_to_the_results(graph):
    work, _ = graph
    record = json.loads((work / "results/smoke/scores/clip_b32-8/run.json").read_text())
    for upstream, setting in product(
        RUN["calibrate"], smoke_params()["calibrate"]["clip_b32-8"]["smoke"]
    ):
        costs = record["cost"][f"calibrate@clip_b32-8-{upstream}-{setting}"]
        assert list(costs) == [f"seed {seed}" for seed in FEW["seeds"]]
        assert all(cost["seconds"] > 0 for cost in costs.values())


def test_every_folder_of_results_is_a_copy_with_the_record_of_the_run(graph):
    work, _ = graph
    folders = list((work / "results/smoke").glob("*/*"))
    assert {folder.parent.name for folder in folders} == {"scores", "drift", *studies()}
    for folder in folders:
        made = work / "outputs/smoke" / folder.parent.name / folder.name
        assert {file.name for file in folder.iterdir()} == {
            "run.json",
            *(file.name for file in made.iterdir()),
        }
        assert all(
            (folder / file.name).read_bytes() == file.read_bytes() for file in made.iterdir()
        )
        assert json.loads((folder / "run.json").read_text())["seconds"]


def test_a_study_with_the_numbers_of_the_pipeline_finds_the_scores_of_the_pipeline(read):
    named = ("upstream", "method", "setting", "task", "seed")
    scores = {
        tuple(r[c] for c in named): r["value"]
        for r in read("scores/clip_b32-8/scores.csv", results.SCORES)
    }
    rows = read("samples/clip_b32-8/samples.csv", results.SAMPLES)
    assert len(rows) == 3 * (1 + 3 * 2)
    same = [
        r for r in rows if r["samples"] in ("0", "16") and r["method"] != "prob_surgery"
    ]  # RUN has none after this merger
    assert len(same) == 3 * 3 and all(
        scores[tuple(r[c] for c in named)] == r["value"] for r in same
    )


def test_what_was_measured_lies_in_the_run_record_and_the_scores_of_an_audit_in_the_csv(
    graph, read
):
    work, _ = graph
    record = json.loads((work / "results/smoke/cost/clip_b32-8/run.json").read_text())
    runs = [(c["method"], c["encode"]) for c in record["cost"]]
    assert runs == [
        ("featcal", "once"),
        *((m, e) for e in ("once", "each_step") for m in ("surgery", "prob_surgery")),
    ]
    assert all(
        c["seconds"] > 0 and c["memory_mib"] > 0 and c["energy_wh"] is None for c in record["cost"]
    )
    audited = {(r["method"], r["step"]) for r in read("cost/clip_b32-8/cost.csv", results.AUDIT)}
    assert audited == {(m, s) for m in ("surgery", "prob_surgery") for s in ("1", "3")}
    budgets = json.loads((work / "results/smoke/samples/clip_b32-8/run.json").read_text())["cost"]
    assert [(c["method"], c["samples"], c["images"]) for c in budgets[:4]] == [
        ("featcal", 16, 16), ("featcal", 64, 64), ("surgery", 16, 16), ("surgery", 64, 60),
    ]  # fmt: skip


def test_a_calibrated_folder_explains_itself_and_loads(graph):
    work, _ = graph
    from transformers import CLIPVisionModel

    folder = work / "outputs/smoke/calibrated/clip_b32-8/task_arithmetic-suite/seed42"
    named = json.loads((folder / "featcal.json").read_text())
    ridge = smoke_params()["featcal"]["clip_b32"]["suite"]["ridge"]
    assert named["settings"]["ridge"] == ridge
    assert (
        CLIPVisionModel.from_pretrained(folder).config.num_hidden_layers
        == len(named["blocks"])
        == DEPTH["clip_b32"]
    )


def test_seeds_of_the_draw_give_different_weights_and_nothing_else_does(graph):
    _, digests = graph
    calibrated = {path: digest for path, digest in digests.items() if "/calibrated/" in path}
    assert len(set(calibrated.values())) == len(calibrated)


@pytest.fixture
def run_again(tmp_path, monkeypatch, caplog):
    """`dvc repro` of a target in the current folder, in this process; returns the stages that DVC
    did not take from its cache.
    """
    from dvc.repo import Repo

    monkeypatch.setenv(
        "PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    )  # stages say `featcal`
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(
        "dpath.get", entry
    )  # which looks at every entry of the settings for each that it finds
    caplog.set_level("INFO", logger="dvc.stage.run")

    def repro(target: str) -> list[str]:
        caplog.clear()
        with Repo() as repo:
            repo.reproduce(target)
        return [
            message.split("'")[1]
            for message in caplog.messages
            if message.startswith("Running stage")
        ]

    return repro


def switch_to_a_suite_without_roles(work: Path) -> None:
    """suites/bare.yaml, which has the images of the smoke suite and no models, in force."""
    text = (work / "suites/smoke.yaml").read_text()
    start, end = text.index("roles:"), text.index("fine_tune:")
    (work / "suites/bare.yaml").write_text(text[:start] + "roles: {clip_b32: null}\n" + text[end:])
    params = settings(work)
    apart = (*MAIN, "methods", "merge")
    sections = [entries for name, entries in params.items() if name not in apart]
    groups = [entry for entries in sections for entry in entries.values()]
    for group in (
        *groups,
        *(group for mergers in params["merge"].values() for group in mergers.values()),
    ):
        group["bare"] = None
    write_settings(work, params | {"suite": "bare"})


def test_editing_one_ridge_or_the_suite_and_back_reruns_what_it_must_and_nothing_else(
    graph, run_again, tmp_path
):
    """From the outputs of the graph above, which DVC takes as they are."""
    from dvc.repo import Repo

    work, target = tmp_path / "work", "gather@scores-clip_b32-8"
    shutil.copytree(graph[0], work)
    keep_a_chain(work)
    with working_in(work):
        with Repo() as repo:
            repo.commit(target, with_deps=True, force=True)
        assert run_again(target) == []
        params = settings(work)
        params["calibrate"]["clip_b32-8"]["from"]["task_arithmetic"] = {"suite": {"ridge": 0.7}}
        write_settings(work, params)
        calibrate, *later = run_again(target)
        assert calibrate == "pipeline/models/dvc.yaml:calibrate@clip_b32-8" and later[-1] == target
        assert set(later) == {"pipeline/models/dvc.yaml:evaluate@clip_b32-8", target}
        switch_to_a_suite_without_roles(work)
        assert "pipeline/models/dvc.yaml:evaluate@clip_b32-8" in run_again(target)
        write_settings(work, params)
        cheap = {"pipeline/prepare/dvc.yaml:prepare_data", "gather@scores-clip_b32-8"}
        assert set(run_again(target)) <= cheap, (
            "switching back trains, calibrates and evaluates nothing again"
        )
    assert read_rows(work / "results/smoke/scores/clip_b32-8/scores.csv", results.SCORES)
