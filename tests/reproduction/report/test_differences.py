"""What differences.yaml and the passages beside it say in numbers is what is run: held against
params, models and records.
"""

import json
from pathlib import Path
from statistics import mean

import pandas as pd
import yaml

from featcal.core.moments import PATCH_WEIGHT
from featcal.core.ridge import EPS
from pipeline import settings
from reproduction.prepare.suite import FineTune
from reproduction.report.html import compact

ROOT = Path(__file__).parents[3]
LISTS = yaml.safe_load((ROOT / "reproduction/report/differences.yaml").read_text("utf-8"))
PARAMS = settings()
CHOICE = json.loads((ROOT / "results/mini/choice.json").read_text("utf-8"))
TEXTS = json.loads((ROOT / "reproduction/mini/language/settings_choice.json").read_text("utf-8"))
T5, LLAMA = ("flan_t5_base", "flan_t5_large"), ("llama_3b", "llama_8b")


def said(suite, what, about="differences"):
    """In the paper, here and why, of one entry."""
    return next(entry[1:] for entry in LISTS[suite][about] if entry[0] == what)


def config(role):
    return json.loads((ROOT / "reproduction/mini/models" / role / "config.json").read_text("utf-8"))


def test_the_settings_of_images_and_that_lambda_is_at_the_end_of_its_grid():
    chosen, here = CHOICE["chosen"]["settings"], said("mini", "λ and α")[1]
    grid = [float(value) for value in CHOICE["settings"]["sweeps"]["ridge"]]
    assert f"{compact(chosen['ridge'])} and {compact(chosen['interpolation'])}" in here
    assert chosen["ridge"] == min(grid) and "smallest value of its grid" in here
    assert {name: PARAMS["featcal"]["clip_b32"]["suite"][name] for name in chosen} == chosen


def test_the_settings_of_texts_and_that_alpha_is_at_the_end_of_its_grid():
    here = said("mini", "λ and α", "language")[1]
    for key in ("flan_t5_base-glue", "llama_3b-mergebench"):
        run, best = PARAMS["featcal"][key.rpartition("-")[0]]["suite"], TEXTS[key]["best"]
        assert best == f"ridge {run['ridge']:g}, interpolation {run['interpolation']:g}"
        assert f"{run['ridge']:g} and {run['interpolation']:g} for " in here
        averages = {n: value for n, value in TEXTS[key]["averages"].items() if n != "merged"}
        assert averages[best] == max(averages.values())
        assert run["interpolation"] == min(float(name.rsplit(" ", 1)[1]) for name in averages)


def test_the_settings_of_the_real_encoder_are_the_best_mean_over_the_mergers():
    found = json.loads((ROOT / "reproduction/real_text/settings_choice.json").read_text("utf-8"))
    run = PARAMS["featcal"]["minilm"]["suite"]
    chosen = found["minilm-8"]["featcal"]
    names = ("ridge", "anchor_blend", "interpolation")
    assert chosen["best"] == ", ".join(f"{name} {run[name]:g}" for name in names)
    assert set(chosen["by_merger"]) == {"task_arithmetic", "wudi"}
    means = pd.DataFrame(chosen["by_merger"]).loc[list(chosen["averages"])].mean(axis=1)
    assert means[chosen["best"]] == means.max()
    values = "{ridge:g}, {anchor_blend:g} and {interpolation:g}, ".format(**run)
    assert said("real", "λ, ρ and α")[1].startswith(values)
    for pool in ("14", "20"):
        scale = PARAMS["merge"][f"minilm-{pool}"]["task_arithmetic"]["mini"]["scale"]
        assert found[f"minilm-{pool}"]["scale"]["best"] == f"scale {scale:g}"


def test_the_stabiliser_is_the_share_of_lambda_that_is_said():
    paper, here, _ = said("mini", "stabiliser")
    share = EPS / PARAMS["featcal"]["clip_b32"]["suite"]["ridge"]
    assert f"{share:.0%}".replace("%", " %") in here and compact(EPS) in paper


def test_tokens_frozen_parts_and_norms_are_those_of_the_code():
    assert f"count {PATCH_WEIGHT:g}" in said("mini", "tokens of the last block")[1]
    assert FineTune().frozen == ("embeddings", "pre_layrnorm")
    assert "embeddings and the norm before the blocks" in said("mini", "experts")[1]
    own = [PARAMS["featcal"][role] for role in (*T5, *LLAMA)]
    assert {one[word]["norm"] for one in own for word in ("suite", "paper")} == {False}


def test_twenty_tasks_miss_the_ranges_as_it_is_said():
    found = CHOICE["suite"]
    held = {pool: one["checks_hold"] for pool, one in found["checked"].items()}
    assert held == {"8": True, "14": True, "20": False}
    runs = {role: list(seeds.values()) for role, seeds in found["pools"]["20"].items()}
    assert all(run["average"] - run["base"] < 8 for several in runs.values() for run in several)
    assert all(run["base"] < 40 for run in runs["clip_l14"])
    assert all(40 <= run["base"] <= 55 for run in runs["clip_b32"])
    assert "averaging gains less" in said("mini", "ranges with 20 tasks")[1]


def test_the_larger_t5_misses_its_range_as_it_is_said():
    found = json.loads((ROOT / "results/mini/language_choice.json").read_text("utf-8"))
    smaller, larger = (mean(found[role]["experts"].values()) for role in T5)
    assert larger < 85 <= smaller
    assert "below the 85 points" in said("mini", "range of the larger T5", "language")[1]


def test_the_sizes_of_models_and_adapters():
    t5, llama = [config(role) for role in T5], [config(role) for role in LLAMA]
    widths = {one["d_model"] for one in t5} | {one["hidden_size"] for one in llama}
    blocks = {one["num_layers"] for one in t5} | {one["num_hidden_layers"] for one in llama}
    here = said("mini", "models", "language")[1]
    assert f"{min(widths)} or {max(widths)} wide" in here and len(widths) == 2
    assert f"{min(blocks)} to {max(blocks)} blocks" in here
    towers = [config(role)["vision_config"] for role in ("clip_b32", "clip_l14")]
    here = said("mini", "models")[1]
    assert "{} and {} wide".format(*(tower["hidden_size"] for tower in towers)) in here
    assert {tower["num_hidden_layers"] for tower in towers} == {6} and "6 blocks" in here
    methods = PARAMS["methods"]
    rank, hidden = methods["surgery_paper"]["rank"], methods["prob_paper"]["hidden"]
    assert f"Surgery of rank {rank} and ProbSurgery {hidden} wide" in said("mini", "adapters")[0]
    record = json.loads((ROOT / "results/mini/cost/clip_b32-8/run.json").read_text("utf-8"))
    run = record["settings"]["rivals"]
    assert (run["surgery"]["features"], run["prob_surgery"]["features"]) == ("unit", "raw")
    assert {methods[name]["features"] for name in ("surgery_text", "prob_text")} == {"raw"}


def test_the_second_encoders_results_are_as_its_section_says():
    found = pd.read_csv(ROOT / "results/mini/second_encoder/minilm-8/second_encoder.csv")
    means = found.groupby(["upstream", "method", "setting"], dropna=False)["value"].mean()
    for upstream in ("average", "task_arithmetic", "wudi_closed_form"):
        own = means[upstream]
        merged, suite, paper = own["merged"].item(), *own["featcal"][["suite", "paper"]]
        assert (suite > merged) == (upstream != "wudi_closed_form")
        assert paper > max(merged, own["surgery", "suite"], own["prob_surgery", "suite"])
