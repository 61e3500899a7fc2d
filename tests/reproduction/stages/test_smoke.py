"""Every stage of the graph writes its results on the smoke suite, and DVC reruns only what changed."""

import json
import shutil
from contextlib import chdir
from itertools import product

import numpy as np
import pytest
from checkpoints import tensors
from PIL import Image
from resolved import entry
from smoke_graph import DEPTH, FEW, PAGES, RUN, keep_a_chain, run_smoke_graph, smoke_params

from featcal.data.batches import draw_indices
from pipeline import read_rows, settings, write_settings
from reproduction import results
from reproduction.engine.context import Setup, load_context
from reproduction.engine.make import rescale
from reproduction.experiments import ADAPTERS, studies
from reproduction.report.statistics import bits
from reproduction.results import correct_columns
from reproduction.stages.command import run_stage

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


@pytest.fixture
def record(graph):
    """Return a function that reads a JSON file of the graph's results."""
    return lambda name: json.loads((graph[0] / "results/smoke" / name).read_text())


def keys(rows, *columns):
    """Return the cells of some columns, each row's once. Raises: AssertionError for a row twice."""
    cells = [tuple(row[column] for column in columns) for row in rows]
    assert len(set(cells)) == len(cells)
    return set(cells)


def values(rows, *columns):
    """Return the cells of some columns."""
    return {tuple(row[column] for column in columns) for row in rows}


def crossed(models, *columns):
    """Return every model with every combination of further cells."""
    return {(*model, *cells) for model in models for cells in product(*columns)}


TASKS = ("mnist", "svhn", "dtd")
NAMED = ("upstream", "method", "setting", "seed", "task")


def test_every_model_of_the_pool_has_a_score_on_every_task(read):
    rows = read("scores/clip_b32-8/scores.csv", results.SCORES)
    params, key = smoke_params(), "clip_b32-8"
    calibrated = len(RUN["calibrate"]) * len(params["calibrate"][key]["smoke"]) * len(FEW["seeds"])
    adapted = 4 + 2 + 3  # two adapters after one merged model, the third after another
    models = 3 + len(params["merge"][key]) + calibrated + adapted
    assert len(keys(rows, *NAMED)) == 3 * models and values(rows, "task") == crossed([()], TASKS)
    assert all(0 <= row["value"] <= 100 and row["count"] == 60 for row in rows)
    methods = {"base", "expert", "multitask", "merged", "featcal", *ADAPTERS}
    assert {row["method"] for row in rows} == methods


def test_of_every_score_that_is_an_accuracy_the_right_samples_are_kept(graph):
    columns = {name: kind.scores for name, kind in studies().items() if kind.scores}
    columns |= {"scores": results.SCORES}
    files = list((graph[0] / "results/smoke").rglob("*.correct.csv"))
    assert {path.name.split(".")[0] for path in files} == set(columns)
    for path in files:
        names = columns[path.name.split(".")[0]]
        scores = read_rows(path.with_name(path.name.replace(".correct", "")), names)
        for row, right in zip(scores, read_rows(path, correct_columns(names)), strict=True):
            assert all(str(row[c]) == str(right[c]) for c in names if c not in ("value", "count"))
            if row["metric"] == "accuracy":
                share = 100 * bits(right["correct"], row["count"]).mean()
                assert row["value"] == round(share, 4), (path.name, row)
            else:
                assert right["correct"] == ""


def test_what_an_adapter_saw_of_the_test_images_is_its_draw(graph, read):
    rows = read("scores/clip_b32-8/seen.csv", results.SEEN)
    draws = {("test_unlabelled", "16", "42"), ("test_unlabelled", "", "42")}  # AdaMerging's last
    assert values(rows, "stream", "samples", "seed") == draws
    for row in rows:
        draw = range(60) if row["samples"] == "" else sorted(draw_indices(row["task"], 60, 16, 42))
        assert list(np.flatnonzero(bits(row["seen"], row["count"]))) == list(draw)
    budgets = read("samples/clip_b32-8/samples.seen.csv", results.SEEN)
    counts = {(r["samples"], int(bits(r["seen"], r["count"]).sum())) for r in budgets}
    assert counts == {("16", 16), ("64", 60)}
    damaged = read("corrupted/clip_b32-8/corrupted.seen.csv", results.SEEN)
    assert damaged == [row for row in rows if row["samples"] == "16"]
    assert read("scores/clip_l14-8/seen.csv", results.SEEN) == []
    assert not list((graph[0] / "results/smoke").glob("scores/*glue/seen.csv"))


def test_a_larger_pool_scores_every_merger_and_each_with_what_calibrates_it(read, record):
    rows = read("scores/clip_b32-14/scores.csv", results.SCORES)
    kinds = {("merged", ""), *product(ADAPTERS, ("suite", "suite_train"))}
    kinds |= set(product(("featcal", *OUTER), ("suite", "paper")))
    mergers = smoke_params()["merge"]["clip_b32-14"]
    expected = {("", "base", ""), ("", "expert", "")} | {(m, *k) for m in mergers for k in kinds}
    tasks = (*TASKS, "eurosat")
    assert keys(rows, "upstream", "method", "setting", "task") == crossed(expected, tasks)
    run = record("scores/clip_b32-14/run.json")
    assert len(run["cost"]) == 2 * len(mergers)
    assert {"merge@clip_b32-14", "adapt@clip_b32-14"} <= set(run["seconds"])
    for key in ("clip_b32-20", "clip_l14-14"):  # the suite has no such pool, no such role
        assert read(f"scores/{key}/scores.csv", results.SCORES) == []


def test_what_was_trained_leaves_its_loss_and_a_rescaled_merger_its_sweep(read):
    losses = read("scores/clip_b32-8/curves.csv", results.CURVES)
    models = values(losses, "upstream", "method", "setting")
    assert {("adamerging", "merged", ""), ("task_arithmetic", "surgery", "paper_train")} <= models
    assert [row["step"] for row in losses if row["upstream"] == "adamerging"] == ["1", "2", "3"]
    swept = read("ablate/clip_b32-8/scales.csv", results.SCALES)
    best = max(swept, key=lambda row: (row["value"], -float(row["factor"])))
    assert [row["factor"] for row in swept if row["chosen"] == "1"] == [best["factor"]]


def test_every_control_has_a_score_on_every_task(graph, read):
    study = load_context(graph[0]).experiments.studies["ablate"]["clip_b32-8"]
    rows = read("ablate/clip_b32-8/ablate.csv", results.SCORES)
    controls = {("anchor", ""), ("rescaled", ""), *(("featcal", name) for name in study.without)}
    assert keys(rows, "method", "setting", "task") == crossed(controls, TASKS)
    assert values(rows, "upstream", "count") == {("task_arithmetic", 60)}


def test_the_anchor_of_task_arithmetic_is_task_arithmetic_at_a_larger_scale(graph):
    context = load_context(graph[0])
    blend = context.experiments.studies["ablate"]["clip_b32-8"].featcal.anchor_blend
    anchor = rescale(Setup(context, "clip_b32", 8), "task_arithmetic", blend).state_dict()
    folders = ("prepared/clip_b32-8/base", "merged/clip_b32-8/task_arithmetic")
    base, merged = (tensors(graph[0] / "outputs/smoke" / folder) for folder in folders)
    assert blend > 1 and base.keys() <= anchor.keys()
    for name, weight in base.items():
        expected = weight.double() + blend * (merged[name].double() - weight.double())
        assert (anchor[name] - expected).abs().max() <= 1e-6 * max(1.0, float(expected.abs().max()))


def test_damaged_images_leave_scores_of_every_method_and_examples(graph, read):
    rows = read("corrupted/clip_b32-8/corrupted.csv", results.CORRUPTED)
    methods = {("featcal", "suite"), ("featcal", "paper")}
    methods |= set(product(OUTER, ("suite", "suite_train")))  # adapters on FeatCal's images, too
    expected = crossed(methods, ("motion_blur", "fog"), TASKS)
    assert keys(rows, "method", "setting", "corruption", "task") == expected
    examples = read("corrupted/clip_b32-8/corrupted.examples.csv", results.EXAMPLES)
    shown = [("svhn", kind) for kind in ("clean", "motion_blur", "fog")]
    assert [(row["task"], row["corruption"]) for row in examples] == shown
    with Image.open(graph[0] / "results/smoke/corrupted/clip_b32-8/corrupted.examples.png") as png:
        assert png.size == (3 * 32, 32)


def test_drawn_parts_are_scored_where_no_adapter_has_looked(read):
    """Of 60 test images 16 are drawn; two of the three tasks make one part, all three another."""
    rows = read("task_counts/clip_b32-8/task_counts.csv", results.TASK_COUNTS)
    kinds = {("merged", ""), ("featcal", "suite"), ("featcal", "paper")}
    kinds |= set(product((*OUTER, "mean_shift"), ("suite", "suite_train")))
    models = {("task_arithmetic", *kind) for kind in kinds} | {("", "expert", "")}
    assert values(rows, "upstream", "method", "setting") == models
    assert len(rows) == (2 + 3) * len(models)
    assert values(rows, "tasks", "draw", "count") == {("2", "0", 60 - 16), ("3", "0", 60 - 16)}
    # as written, to four decimals and to six
    assert all(float(row["union"]) <= row["value"] + 1e-4 for row in rows)
    assert all(float(row["mean_drift"]) <= float(row["drift"]) for row in rows)
    assert all(float(row["drift"]) == 0 for row in rows if row["method"] == "expert")


def test_a_model_on_two_curves_of_a_sweep_is_made_once_and_reported_twice(read):
    rows = read("sweep/clip_b32-8/sweep.csv", results.SWEEP)
    points = {(r["parameter"], r["at"], r["chosen"]): r for r in rows if r["task"] == "dtd"}
    chosen = ("ridge", "1e-06", "1"), ("interpolation", "0.9", "1")
    assert set(points) == {("ridge", "1", "0"), *chosen}
    assert points[chosen[0]]["value"] == points[chosen[1]]["value"]


@pytest.mark.parametrize(
    ("key", "task", "draws"),
    [
        ("clip_b32-8", "dtd", [("16", "average"), ("8", "average")]),
        ("flan_t5_base-glue", "sst2", [("16", "average")]),
    ],
)
def test_the_default_is_scored_with_what_it_is_compared_with(read, key, task, draws):
    rows = read(f"default/{key}/default.csv", results.DEFAULT)
    rows = [row for row in rows if row["task"] == task]
    assert list(dict.fromkeys((row["samples"], row["upstream"]) for row in rows)) == draws
    for draw in draws:
        draw_rows = [row for row in rows if (row["samples"], row["upstream"]) == draw]
        names = {row["setting"] or row["method"] for row in draw_rows}
        assert {"merged", "paper", "auto", *OUTER} <= names and len(names) == len(draw_rows)
    trials: dict = {}
    for row in read(f"default/{key}/default.candidates.csv", results.CANDIDATES):
        key = tuple(row[column] for column in ("upstream", "method", "samples"))
        trials.setdefault(key, []).append((float(row["divergence"]), row["chosen"]))
    for (_, method, _), values in trials.items():
        [chosen] = [divergence for divergence, flag in values if flag == "1"]
        if method != "auto":  # which also refuses what is worse on some task
            assert chosen == min(values)[0]


def test_models_and_adapters_are_compared_with_the_experts(read):
    kinds = {("merged", ""), ("featcal", "suite"), ("featcal", "paper")}
    adapters = {("surgery", "suite"), ("surgery", "paper")}
    drift = read("drift/clip_b32-8/drift.csv", results.DRIFT)
    blocks = ["embeddings", *(f"{i:02d}" for i in range(DEPTH["clip_b32"])), "features"]
    blocks_of: dict = {}
    for row in drift:
        blocks_of.setdefault((row["method"], row["setting"], row["task"]), []).append(row["block"])
    assert blocks_of == dict.fromkeys(crossed(kinds, TASKS), blocks)
    vectors = read("drift/clip_b32-8/vectors.csv", results.VECTORS)
    assert values(vectors, "method", "setting") == kinds
    assert values(vectors, "part") == {("backbone",), ("linear",)}
    assert all(-1 <= row["cosine"] <= 1 and row["size"] > 0 for row in vectors)
    rows = read("drift/clip_b32-8/alignment.csv", results.ALIGNMENT)
    assert keys(rows, "method", "setting", "task") == crossed(kinds | adapters, TASKS)
    single = read("drift/clip_b32-8/similarity.csv", results.SIMILARITY)
    for row in (row for row in rows if row["task"] == "dtd"):
        cosines = [s for s in single if all(s[c] == row[c] for c in ("method", "setting", "task"))]
        assert sum(s["similarity"] for s in cosines) / 60 == pytest.approx(row["cosine"], abs=1e-4)
    assert len(single) == 60 * len(kinds | adapters)
    assert len(read("drift/clip_b32-8/projection.csv", results.PROJECTION)) == 3 * 3 * 60


def test_every_statement_of_the_theory_has_been_checked_and_none_is_violated(read):
    rows = read("theory/clip_b32-8/theory.csv", results.THEORY)
    worst = [row for row in rows if row["task"] == "" and row["method"] in ("merged", "featcal")]
    room, shared = (
        {row["statement"]: row["value"] for row in worst if row["quantity"] == quantity}
        for quantity in ("room", "digits")
    )
    numbered = {f"proposition_{i}" for i in (3, 5, 6, 7, 8)}
    assert numbered | {"corollary_2", "proposition_8_transport"} <= set(room)
    assert min(room.values()) >= 0
    assert min(shared[name] for name in ("proposition_1", "proposition_4", "equation_45")) > 10
    assert {"proposition_2", "proposition_7"} <= set(shared)


def test_every_folder_of_results_is_a_copy_with_the_record_of_the_run(graph, record):
    work, _ = graph
    assert {page.stem for page in (work / "book/pages").glob("*.ipynb")} == set(PAGES)
    folders = list((work / "results/smoke").glob("*/*"))
    assert {folder.parent.name for folder in folders} == {"scores", "drift", *studies()}
    for folder in folders:
        outputs = (work / "outputs/smoke" / folder.parent.name / folder.name).iterdir()
        files = {file.name: file for file in outputs}
        assert {file.name for file in folder.iterdir()} == {"run.json", *files}
        assert all((folder / n).read_bytes() == file.read_bytes() for n, file in files.items())
        assert json.loads((folder / "run.json").read_text())["seconds"]
    cost, settings = record("scores/clip_b32-8/run.json")["cost"], ("suite", "paper")
    for upstream, setting in product(RUN["calibrate"], settings):
        seconds = cost[f"calibrate@clip_b32-8-{upstream}-{setting}"]
        assert list(seconds) == [f"seed {seed}" for seed in FEW["seeds"]]
        assert all(record["seconds"] > 0 for record in seconds.values())


def test_a_study_with_the_numbers_of_the_pipeline_finds_the_scores_of_the_pipeline(read):
    rows = read("scores/clip_b32-8/scores.csv", results.SCORES)
    scores = {tuple(row[c] for c in NAMED): row["value"] for row in rows}
    rows = read("samples/clip_b32-8/samples.csv", results.SAMPLES)
    assert len(rows) == 3 * (1 + 4 * 2)  # FeatCal at two settings
    same = [row for row in rows if row["samples"] in ("0", "16")]
    same = [row for row in same if row["method"] != "prob_surgery"]  # not run after this merger
    assert len(same) == 3 * 4
    assert all(scores[tuple(row[c] for c in NAMED)] == row["value"] for row in same)


def test_what_was_measured_lies_in_the_run_record_and_an_audit_in_the_csv(read, record):
    cost = record("cost/clip_b32-8/run.json")["cost"]
    adapters = [(method, encode) for encode in ("once", "each_step") for method in OUTER]
    assert [(c["method"], c["encode"]) for c in cost] == [("featcal", "once"), *adapters]
    assert all(c["seconds"] > 0 and c["memory_mib"] > 0 and c["energy_wh"] is None for c in cost)
    audited = read("cost/clip_b32-8/cost.csv", results.AUDIT)
    assert values(audited, "method", "step") == set(product(OUTER, ("1", "3")))
    budgets = record("samples/clip_b32-8/run.json")["cost"]
    assert [(c["method"], c["samples"], c["images"]) for c in budgets[:6]] == [
        *2 * [("featcal", 16, 16)], *2 * [("featcal", 64, 64)], ("surgery", 16, 16), ("surgery", 64, 60),
    ]  # fmt: skip


@pytest.fixture
def run_again(monkeypatch, caplog):
    """Return a function that runs `dvc repro` of a target and returns the stages that ran."""
    from dvc.repo import Repo

    monkeypatch.setattr("dpath.get", entry)
    # `featcal stage VERB KEY` in this process
    monkeypatch.setattr("dvc.stage.run._run", lambda _, cmd, **__: run_stage(*cmd.split()[2:]))
    caplog.set_level("INFO", logger="dvc.stage.run")

    def repro(target: str) -> list[str]:
        caplog.clear()
        with Repo() as repo:
            repo.reproduce(target)
        started = [message for message in caplog.messages if message.startswith("Running stage")]
        return [message.split("'")[1] for message in started]

    return repro


def test_editing_a_ridge_reruns_what_it_must_and_undoing_it_nothing(graph, run_again, tmp_path):
    """From the outputs of the graph above, which DVC takes as they are."""
    from dvc.repo import Repo

    work, target = tmp_path / "work", "gather@scores-clip_b32-8"
    shutil.copytree(graph[0], work)
    keep_a_chain(work)
    with chdir(work):
        with Repo() as repo:
            repo.commit(target, with_deps=True, force=True)
        assert run_again(target) == []
        before, params = settings(work), settings(work)
        params["calibrate"]["clip_b32-8"]["from"]["task_arithmetic"] = {"suite": {"ridge": 0.7}}
        write_settings(work, params)
        calibrate, *later = run_again(target)
        assert calibrate == "pipeline/models/dvc.yaml:calibrate@clip_b32-8" and later[-1] == target
        assert set(later) == {"pipeline/models/dvc.yaml:evaluate@clip_b32-8", target}
        write_settings(work, before)
        assert set(run_again(target)) <= {target}, "what was calibrated before is in the cache"
    assert read_rows(work / "results/smoke/scores/clip_b32-8/scores.csv", results.SCORES)
