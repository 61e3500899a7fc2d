"""Pages on samples, costs, damage, sweeps and drift, on results in git and on invented ones."""

import json
import math
from statistics import fmean
from xml.etree import ElementTree

import matplotlib
import pandas as pd
import pytest
import torch
from synthetic_results import TASKS
from tiny import seeded
from torch import nn

from pipeline import RESULTS
from reproduction.report.claims import claims
from reproduction.report.evidence import Evidence
from reproduction.report.pages import cost, drift, samples, sweeps
from reproduction.report.verdicts import judge
from reproduction.stages import measure

BOTH = ("clip_b32", "minilm")


def judged(name, folder):
    return judge(next(c for c in claims() if c.id == name), "mini", "suite", folder)


def measured(role):
    return Evidence("mini", role, "8", RESULTS)


@pytest.mark.parametrize("role", BOTH)
def test_means_by_number_of_samples_are_those_of_the_csv(role):
    frame = pd.read_csv(RESULTS / f"samples/{role}-8/samples.csv")
    keys = ["method", "setting", "samples"]
    seeds = frame[frame["method"] != "merged"].groupby([*keys, "seed"])["value"].mean()
    means = samples.mean_accuracies(measured(role)).set_index(keys)
    by_hand = seeds.groupby(keys)
    assert dict(means["mean"]) == pytest.approx(dict(by_hand.mean()))
    spreads = means["sd"].dropna()
    assert len(spreads) and dict(spreads) == pytest.approx(dict(by_hand.std()[spreads.index]))


@pytest.mark.parametrize("role", BOTH)
def test_costs_are_those_of_the_run_record(role):
    runs = json.loads((RESULTS / f"cost/{role}-8/run.json").read_text())["cost"]
    seconds = {(r["method"], r["encode"]): r["seconds"] for r in runs if r["setting"] == "suite"}
    lines = cost.single(measured(role)).text.splitlines()
    for key, name in cost.ROWS.items():
        shown = "not run"
        if key in seconds:
            ratio = seconds[key] / seconds["featcal", "once"]
            shown = f"  {seconds[key]:.1f}  {ratio:.1f}×  "
        assert any(line.startswith(name) and shown in line for line in lines), name


@pytest.mark.parametrize("role", BOTH)
def test_averages_after_damage_are_those_of_the_csv(role):
    tuned = pd.read_csv(RESULTS / f"corrupted/{role}-8/corrupted.csv").query("setting == 'suite'")
    data = measured(role)
    for (method, kind), rows in tuned.groupby(["method", "corruption"]):
        by_seed = rows.groupby("seed")["value"].mean()
        assert samples.after_damage(data, method, kind).mean == pytest.approx(by_seed.mean())
    assert set(samples.kinds(data)) == {"clean", *tuned["corruption"]}


@pytest.mark.parametrize("role", BOTH)
def test_a_curve_holds_the_averages_of_the_csv_in_rising_order(role):
    frame = pd.read_csv(RESULTS / f"sweep/{role}-8/sweep.csv", keep_default_na=False)
    means = frame.groupby(["parameter", "upstream", "setting", "at"])["value"].agg(fmean)
    curves = [(p, *curve) for p in sweeps.SYMBOLS for curve in sweeps._curves(measured(role), p)]
    assert len(curves) >= 6
    for *key, points in curves:
        assert dict(points["value"]) == dict(means[*key])  # to the last digit, as in verdicts
        assert points.index.is_monotonic_increasing and points["chosen"].sum() == 1


def test_a_fall_is_not_compared_without_its_chosen_value(results):
    path = results / "sweep/clip_b32-8/sweep.csv"
    path.write_text(path.read_text().replace("anchor_blend,2,1", "anchor_blend,2,0"))
    assert judged("f5_rho_wudi_most", results).word == "not run"


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
    base, expert, model = map(linear, ([5.0, 5.0], [8.0, 9.0], [5.0, 7.0]))
    cosine, length = measure.task_vector_alignment(model, base, expert, ["0.weight"])
    assert (cosine, length) == (pytest.approx(4 / 5), pytest.approx(2 / 5))  # (0, 2) against (3, 4)
    cosine, _ = measure.task_vector_alignment(base, base, expert, ["0.weight"])
    assert math.isnan(cosine), "no direction"


def test_the_row_of_a_task_is_the_mean_of_its_images():
    features, expert = nn.functional.normalize(torch.randn(2, 7, 4, generator=seeded(3)), dim=-1)
    line = {"task": "t", "method": "merged", "setting": ""}
    single = [row["similarity"] for row in measure.similarity_rows(line, features, expert)]
    whole = measure.alignment_row(line, features, expert)
    by_hand = [float(a @ b) for a, b in zip(features, expert, strict=True)]
    assert single == pytest.approx(by_hand) and whole["cosine"] == pytest.approx(sum(by_hand) / 7)
    assert whole["cosine_sd"] == pytest.approx(pd.Series(by_hand).std())
    distances = [math.sqrt(2 - 2 * cosine) for cosine in by_hand]
    assert whole["l2"] == pytest.approx(sum(distances) / 7, rel=1e-5)


def test_all_models_of_a_task_share_their_plane():
    expert = torch.randn(30, 6, generator=seeded(4))
    shift = torch.tensor([0, 0, 9.0, 0, 0, 0])
    models = {"expert": expert, "merged": expert + shift, "featcal": expert}
    frame = pd.DataFrame(measure.projection_rows("t", torch.arange(30), models))
    points = {model: rows[["x", "y"]].to_numpy() for model, rows in frame.groupby("model")}
    assert (points["expert"] == points["featcal"]).all()
    moved = points["merged"] - points["expert"]
    assert abs(moved - moved[0]).max() < 1e-3
    assert math.hypot(*moved[0]) == pytest.approx(9, rel=0.05)


FIGURE1 = (drift.features, drift.distance, drift.drift, drift.accuracies)


def test_panels_show_the_numbers_of_the_tables(data, monkeypatch):
    monkeypatch.setattr(drift, "figure_output", lambda figure, name: figure)
    axes = drift.alignment(data, "surgery").axes[0]
    dots = {d.get_label(): list(map(float, d.get_offsets()[:, 0])) for d in axes.collections}
    values = [0.71] * len(TASKS)  # at the printed settings
    assert dots["Surgery"] == pytest.approx([*values, sum(values) / len(values)])
    bars = drift.accuracies(data).axes[0].containers[1]
    assert [bar.get_width() for bar in bars] == pytest.approx([64 + 0.5 * i for i in range(8)])


@pytest.mark.parametrize("panel", FIGURE1)
def test_a_figure_has_the_same_bytes_twice_and_no_outside_link(data, panel):
    before = dict(matplotlib.rcParams)
    first, second = (panel(data).bundle["image/svg+xml"] for _ in range(2))
    assert first == second and len(first) < 120_000
    tree = ElementTree.fromstring(first.split("?>", 1)[1])
    links = [v for node in tree.iter() for key, v in node.attrib.items() if key.endswith("href")]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert dict(matplotlib.rcParams) == before
