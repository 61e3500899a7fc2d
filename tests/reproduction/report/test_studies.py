"""Pages on samples, costs, damage, sweeps and drift, on results in git and on invented ones."""

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pandas as pd
import pytest
import torch
from synthetic_correct import forget_answers
from synthetic_results import TASKS, write_project
from torch import nn

from pipeline import read_rows
from reproduction.report.claims import claims
from reproduction.report.evidence import Evidence
from reproduction.report.pages import cost, drift, samples, sweeps
from reproduction.report.statistics import apart, correlation, estimate, together
from reproduction.report.verdicts import judge
from reproduction.results import SCORES, write_rows
from reproduction.stages.measure import (
    alignment_row,
    evenly,
    parameter_groups,
    projection_rows,
    similarity_rows,
    task_vector_alignment,
)

RESULTS = Path(__file__).parents[3] / "results" / "mini"
BOTH = ("clip_b32", "minilm")
SURGERY, FEATCAL = (
    {"upstream": "task_arithmetic", "method": m, "setting": "suite"} for m in ("surgery", "featcal")
)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Invented results, with ProbSurgery one point above Surgery everywhere."""
    file = forget_answers(write_project(tmp_path)) / "scores/clip_b32-8/scores.csv"
    scores = read_rows(file, SCORES)
    surgery = [row for row in scores if row["method"] == "surgery"]
    better = [r | {"method": "prob_surgery", "value": r["value"] + 1} for r in surgery]
    write_rows(file, [*scores, *better], SCORES)
    monkeypatch.chdir(tmp_path)
    return Evidence("mini", "clip_b32", "8")


def judged(name, folder):
    return judge(next(c for c in claims() if c.id == name), "mini", "suite", folder)


def measured(role):
    return Evidence("mini", role, "8", RESULTS)


@pytest.mark.parametrize("role", BOTH)
def test_means_by_number_of_samples_are_those_of_the_csv(role):
    frame = pd.read_csv(RESULTS / f"samples/{role}-8/samples.csv")
    frame = frame[frame["method"].isin(samples.ORDER) & (frame["setting"] == "suite")]
    seeds = frame.groupby(["method", "samples", "seed"])["value"].mean()
    found = samples.measured(measured(role)).set_index(["method", "samples"])
    by_hand = seeds.groupby(["method", "samples"])
    assert dict(found["mean"]) == pytest.approx(dict(by_hand.mean()))
    spreads = found["sd"].dropna()
    assert len(spreads) and dict(spreads) == pytest.approx(dict(by_hand.std()[spreads.index]))


@pytest.mark.parametrize("role", BOTH)
def test_costs_are_those_of_the_run_record(role):
    runs = json.loads((RESULTS / f"cost/{role}-8/run.json").read_text())["cost"]
    seconds = {(r["method"], r["encode"]): r["seconds"] for r in runs if r["setting"] == "suite"}
    lines = cost.single(measured(role)).text.splitlines()
    for key, name in cost.ROWS.items():
        if key not in seconds:
            assert any(line.startswith(name) and "not run" in line for line in lines)
            continue
        line = next(line for line in lines if line.startswith(name))
        ratio = seconds[key] / seconds["featcal", "once"]
        assert f"  {seconds[key]:.1f}  {ratio:.1f}×  " in line


def test_printed_costs_keep_the_papers_numbers():
    text = cost.printed_costs("table05").text
    assert "FeatCal  53  1.0×" in text and "nan" not in text


@pytest.mark.parametrize("role", BOTH)
def test_averages_after_damage_are_those_of_the_csv(role):
    frame = pd.read_csv(RESULTS / f"corrupted/{role}-8/corrupted.csv")
    own = frame[(frame["setting"] == "suite")]
    ours = measured(role)
    for (method, kind), rows in own.groupby(["method", "corruption"]):
        by_seed = rows.groupby("seed")["value"].mean()
        assert samples.after_damage(ours, method, kind).mean == pytest.approx(by_seed.mean())
    assert set(samples.kinds(ours)) == {"clean", *own["corruption"]}


@pytest.mark.parametrize("role", BOTH)
def test_a_curve_holds_the_averages_of_the_csv_in_rising_order(role):
    frame = pd.read_csv(RESULTS / f"sweep/{role}-8/sweep.csv", keep_default_na=False)
    ours = measured(role)
    curves = [(p, *one) for p in sweeps.SYMBOLS for one in sweeps._curves(ours, p)]
    assert len(curves) >= 6
    for parameter, upstream, setting, points in curves:
        own = frame[(frame["parameter"] == parameter) & (frame["upstream"] == upstream)]
        own = own[own["setting"] == setting]
        assert dict(points["value"]) == pytest.approx(dict(own.groupby("at")["value"].mean()))
        assert points.index.is_monotonic_increasing and points["chosen"].sum() == 1


def test_the_clean_column_has_the_scores_of_the_same_seed(results):
    rows = Evidence("mini", "clip_b32", "8").table("corrupted")
    clean = rows[rows["corruption"] == "clean"]
    assert set(clean["seed"]) == {"", "42"}
    lines = samples.damage(Evidence("mini", "clip_b32", "8")).text.splitlines()
    wanted = {"tuned": ["81.8", "77.8", "↓4.0"], "printed": ["73.8", "72.8", "↓1.0"]}
    for setting, cells in wanted.items():
        line = next(line for line in lines if line.startswith(f"w/ FeatCal, {setting}"))
        assert line.split("  ")[1:4] == cells


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("t6_surgery", "holds"),
        ("t6_prob_surgery", "not run"),
        ("t6_fog_below_clean", "holds"),
        ("f5_ridge_flat_ta", "holds"),  # level: no difference at all
        ("f5_ridge_large_wudi", "holds"),
        ("f5_alpha_small_ta", "within noise"),  # 0.3 and 0 are alike
        ("f5_alpha_end_ta", "holds"),
        ("f5_rho_wudi_most", "holds"),  # 8 points against 4
        ("t12_surgery", "holds"),
        ("f3_most", "holds"),
        ("t13_surgery_kept", "does not hold"),  # 4 s with kept features against 5 s
        ("t5_surgery", "one run"),
        ("t5_energy_surgery", "not run"),  # no GPU
    ],
)
def test_claims_about_studies_are_judged_from_their_files(results, name, said):
    assert judged(name, results).word == said


def test_a_level_claim_fails_when_the_points_differ(results):
    path = results / "sweep/clip_b32-8/sweep.csv"
    text = path.read_text().replace("ridge,0.0001,0", "ridge,0.00011,0")
    path.write_text(text.replace("ridge,100,0", "ridge,0.0001,0"))
    forget_answers(results)
    assert judged("f5_ridge_flat_ta", results).word == "does not hold"


def test_a_fall_is_not_compared_without_its_chosen_value(results):
    path = results / "sweep/clip_b32-8/sweep.csv"
    path.write_text(path.read_text().replace("anchor_blend,2,1", "anchor_blend,2,0"))
    assert judged("f5_rho_wudi_most", results).word == "not run"


def test_a_claim_about_every_number_of_samples_fails_with_one(results):
    path = results / "samples/clip_b32-8/samples.csv"
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    frame.loc[(frame["method"] == "featcal") & (frame["samples"] == "64"), "value"] = "40.0000"
    frame.to_csv(path, index=False)
    forget_answers(results)
    verdict = judged("t12_surgery", results)
    assert verdict.word == "does not hold" and "n = 64" in verdict.detail


def test_energy_that_was_measured_is_shown_and_judged(results):
    path = results / "cost/clip_b32-8/run.json"
    record = json.loads(path.read_text())
    for run in record["cost"]:
        run["energy_wh"] = run["seconds"] / 100
    path.write_text(json.dumps(record))
    assert judged("t5_energy_surgery", results).met
    assert "0.80" in cost.single(Evidence("mini", "clip_b32", "8")).text


def linear(values):
    module = nn.Sequential(nn.Linear(2, 1, bias=False))
    module[0].weight.data = torch.tensor([values])
    return module


def test_a_task_vector_is_the_change_from_the_base_and_not_the_parameter():
    base, expert, model = linear([5.0, 5.0]), linear([8.0, 9.0]), linear([5.0, 7.0])
    cosine, length = task_vector_alignment(model, base, expert, ["0.weight"])
    assert (cosine, length) == (pytest.approx(4 / 5), pytest.approx(2 / 5))  # (0, 2) against (3, 4)
    assert math.isnan(task_vector_alignment(base, base, expert, ["0.weight"])[0]), "no direction"


def test_calibrated_weights_are_the_linears_inside_blocks():
    from tiny import clip

    groups = parameter_groups(clip())
    assert set(groups["linear"]) < set(groups["backbone"])
    assert all(".weight" in name and "layers" in name for name in groups["linear"])
    assert len(groups["linear"]) % 6 == 0, "q, k, v, out, fc1 and fc2 of every block"


def test_the_row_of_a_task_is_the_mean_of_its_images():
    draw = torch.Generator().manual_seed(3)
    features, expert = (
        nn.functional.normalize(torch.randn(7, 4, generator=draw), dim=-1) for _ in range(2)
    )
    line = {"task": "t", "method": "merged", "setting": ""}
    single = [row["similarity"] for row in similarity_rows(line, features, expert)]
    whole = alignment_row(line, features, expert)
    by_hand = [float(a @ b) for a, b in zip(features, expert, strict=True)]
    assert single == pytest.approx(by_hand) and whole["cosine"] == pytest.approx(sum(by_hand) / 7)
    assert whole["cosine_sd"] == pytest.approx(pd.Series(by_hand).std())
    distances = [math.sqrt(2 - 2 * cosine) for cosine in by_hand]
    assert whole["l2"] == pytest.approx(sum(distances) / 7, rel=1e-5)


def test_images_are_taken_evenly_from_a_sorted_data_set():
    assert evenly(4, 10) == [0, 1, 2, 3] and evenly(1000, 4) == [0, 250, 500, 750]
    assert len(set(evenly(10_001, 500))) == 500


def test_all_models_of_a_task_share_their_plane():
    draw = torch.Generator().manual_seed(4)
    expert = torch.randn(30, 6, generator=draw)
    shift = torch.zeros(6)
    shift[2] = 9.0
    models = {"expert": expert, "merged": expert + shift, "featcal": expert}
    frame = pd.DataFrame(projection_rows("t", torch.arange(30), models))
    own = {model: rows[["x", "y"]].to_numpy() for model, rows in frame.groupby("model")}
    assert (own["expert"] == own["featcal"]).all()
    moved = own["merged"] - own["expert"]
    assert abs(moved - moved[0]).max() < 1e-3
    assert math.hypot(*moved[0]) == pytest.approx(9, rel=0.05)


def test_the_error_of_a_mean_cosine_comes_from_its_images(project):
    rows = project.table("alignment")
    every = rows[rows["method"] == "merged"]
    one = every[every["task"] == "dtd"]
    assert estimate(one, "cosine").variance == pytest.approx(0.05**2 / 500)
    assert estimate(every, "cosine").variance == pytest.approx(0.05**2 / 500 / len(TASKS))


def test_gains_are_those_of_the_seed_that_was_measured(project):
    found = project.gains(FEATCAL, SURGERY).set_index("task")
    assert list(found.index) == TASKS
    assert found.loc["dtd", "cosine"] == pytest.approx(0.84 - 0.74 - 0.02 * 7)
    assert found["accuracy"].tolist() == pytest.approx([10.0] * len(TASKS))
    assert math.isnan(correlation(found["cosine"], found["accuracy"])[0]), "all gains are alike"
    assert together(found)[0] == "within noise"
    assert project.gains(FEATCAL, {**SURGERY, "method": "nobody"}).empty


@pytest.mark.parametrize(("slope", "word"), [(50, "holds"), (-50, "does not hold")])
def test_gains_go_together_where_they_lie_on_a_rising_line(slope, word):
    cosine = [0.0, 0.1, 0.2, 0.3, 0.4]
    accuracy = [slope * c + (i % 2) for i, c in enumerate(cosine)]
    found = pd.DataFrame({"cosine": cosine, "accuracy": accuracy})
    assert together(found)[0] == word and together(found.head(3))[0] == "within noise"


@pytest.mark.parametrize(
    ("accuracy", "word"), [(9, "holds"), (2, "within noise"), (-1, "does not hold")]
)
def test_a_gain_comes_without_the_other_where_one_rises_as_the_other_falls(project, accuracy, word):
    noises = {"cosine_noise": 0.01, "accuracy_noise": 5.0}
    rows = {"task": ["dtd", "mnist"], "cosine": [-0.05, 0.05], "accuracy": [accuracy, 9.0]}
    assert apart(pd.DataFrame(rows | noises), project.title)[0] == word


def test_claims_about_drift_are_answered_from_their_own_files(project):
    chosen = [c for c in claims() if c.place in ("figure2", "figure6", "figure7")]
    words = {c.id: judge(c, "mini", "suite", project.folder).word for c in chosen}
    assert words == {
        "f2_macro": "holds", "f2_shown": "holds", "f2_together": "within noise", "f2_apart": "holds", "f2_vectors": "one run",
        "f6_nearer": "one run", "f7_macro": "holds", "f7_shown": "holds", "f7_every_task": "holds", "f7_apart": "does not hold",
    }  # fmt: skip


FIGURE1 = (drift.features, drift.distance, drift.drift, drift.accuracies)


def test_every_axis_is_labelled_and_a_panel_without_results_says_so(project, monkeypatch):
    empty = Evidence("paper", "clip_b32", "8")
    assert "not run" in drift.drift(empty).text
    assert "not run" in drift.images(empty, "surgery").text
    monkeypatch.setattr(drift, "shown", lambda figure, name: figure)
    drawn = [*(draw(project) for draw in FIGURE1), drift.vectors(project)]
    for adapter in ("surgery", "prob_surgery"):
        against = (drift.alignment, drift.images, drift.gains)
        drawn += [draw(project, adapter) for draw in against]
    assert all(axes.get_xlabel() for figure in drawn for axes in figure.axes)


def test_panels_show_the_numbers_of_the_tables(project, monkeypatch):
    monkeypatch.setattr(drift, "shown", lambda figure, name: figure)
    axes = drift.alignment(project, "surgery").axes[0]
    dots = {d.get_label(): list(map(float, d.get_offsets()[:, 0])) for d in axes.collections}
    values = [0.71] * len(TASKS)  # at the printed settings
    assert dots["Surgery"] == pytest.approx([*values, sum(values) / len(values)])
    bars = drift.accuracies(project).axes[0].containers[1]
    assert [bar.get_width() for bar in bars] == pytest.approx([64 + 0.5 * i for i in range(8)])


@pytest.mark.parametrize("panel", FIGURE1)
def test_a_figure_has_the_same_bytes_twice_and_no_outside_link(results, panel):
    before = dict(matplotlib.rcParams)
    ours = Evidence("mini", "clip_b32", "8")
    first, second = (panel(ours).bundle["image/svg+xml"] for _ in range(2))
    assert first == second and len(first) < 120_000
    tree = ElementTree.fromstring(first.split("?>", 1)[1])
    links = [v for node in tree.iter() for key, v in node.attrib.items() if key.endswith("href")]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert dict(matplotlib.rcParams) == before
