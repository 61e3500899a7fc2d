"""Numbers and facts stated in differences.yaml are those of settings, models and records."""

import json
from statistics import mean

import pandas as pd
import pytest
import yaml

from featcal.core.moments import PATCH_WEIGHT
from featcal.core.ridge import EPS
from pipeline import ROOT, settings
from reproduction.prepare.suite import FineTune
from reproduction.report.html import compact

LISTS = yaml.safe_load((ROOT / "reproduction/report/differences.yaml").read_text("utf-8"))
PARAMS = settings()
FEATCAL, METHODS = PARAMS["featcal"], PARAMS["methods"]
T5, LLAMA = ("flan_t5_base", "flan_t5_large"), ("llama_3b", "llama_8b")
CLIP = ("clip_b32", "clip_l14")


def record(path):
    return json.loads((ROOT / path).read_text("utf-8"))


CHOICE = record("results/mini/choice.json")
ROLES = ("clip_b32", "flan_t5_base", "llama_3b", "minilm")
TUNED = {role: FEATCAL[role]["suite"] for role in ROLES}


def all_of(roles, *keys):
    """Return the values that the base models' configurations have for some keys."""
    configs = [record(f"reproduction/mini/models/{role}/config.json") for role in roles]
    configs = [config.get("vision_config", config) for config in configs]
    return sorted({config[key] for config in configs for key in keys if key in config})


def both(ridge, interpolation, **_):
    return f"{compact(ridge)} and {compact(interpolation)}"


@pytest.mark.parametrize(
    ("suite", "section", "name", "number"),
    [
        ("mini", "differences", "λ and α", both(**TUNED["clip_b32"])),
        ("mini", "language", "λ and α", f"{both(**TUNED['flan_t5_base'])} for T5"),
        ("mini", "language", "λ and α", f"{both(**TUNED['llama_3b'])} for the"),
        ("real", "differences", "λ, ρ and α",
         "{ridge:g}, {anchor_blend:g} and {interpolation:g}, ".format(**TUNED["minilm"])),
        ("mini", "differences", "stabiliser", f"{100 * EPS / TUNED['clip_b32']['ridge']:.0f} %"),
        ("mini", "differences", "tokens of the last block", f"count {PATCH_WEIGHT:g}"),
        ("mini", "differences", "models", "{} and {} wide".format(*all_of(CLIP, "hidden_size"))),
        ("mini", "differences", "models", "{} blocks".format(*all_of(CLIP, "num_hidden_layers"))),
        ("mini", "language", "models",
         "{} or {} wide".format(*all_of(T5 + LLAMA, "d_model", "hidden_size"))),
        ("mini", "language", "models",
         "{0} to {2} blocks".format(*all_of(T5 + LLAMA, "num_layers", "num_hidden_layers"))),
        ("mini", "differences", "adapters",
         "({rank} and {hidden} of".format(**METHODS["surgery_paper"] | METHODS["prob_paper"])),
    ],
)  # fmt: skip
def test_a_number_is_that_of_the_settings_and_models(suite, section, name, number):
    (text,) = (entry[2] for entry in LISTS[suite][section] if entry[0] == name)
    assert number in text


def test_tuned_settings_are_those_chosen_and_where_it_is_said_at_an_end_of_their_grid():
    chosen, ridges = CHOICE["chosen"]["settings"], CHOICE["settings"]["sweeps"]["ridge"]
    assert {name: TUNED["clip_b32"][name] for name in chosen} == chosen
    assert chosen["ridge"] == min(map(float, ridges))
    for key, choice in record("reproduction/mini/language/settings_choice.json").items():
        used = TUNED[key.rpartition("-")[0]]
        averages = {name: value for name, value in choice["averages"].items() if name != "merged"}
        best = max(averages, key=averages.get)
        setting = "ridge {ridge:g}, interpolation {interpolation:g}".format(**used)
        assert best == choice["best"] == setting
        assert used["interpolation"] == min(float(name.rsplit(" ", 1)[1]) for name in averages)


def test_the_settings_of_the_real_encoder_are_the_best_mean_over_the_mergers():
    choices, used = record("reproduction/real_text/settings_choice.json"), TUNED["minilm"]
    chosen, names = choices["minilm-8"]["featcal"], ("ridge", "anchor_blend", "interpolation")
    means = pd.DataFrame(chosen["by_merger"])[["task_arithmetic", "wudi"]].mean(axis=1)
    best = means[list(chosen["averages"])].idxmax()
    assert best == chosen["best"] == ", ".join(f"{name} {used[name]:g}" for name in names)
    for pool in ("14", "20"):
        scale = PARAMS["merge"][f"minilm-{pool}"]["task_arithmetic"]["mini"]["scale"]
        assert choices[f"minilm-{pool}"]["scale"]["best"] == f"scale {scale:g}"


def test_frozen_parts_norms_and_features_of_adapters():
    assert FineTune().frozen == ("embeddings", "pre_layrnorm")
    settings = [FEATCAL[role][word] for role in T5 + LLAMA for word in ("suite", "paper")]
    assert {own["norm"] for own in settings} == {False}
    run = record("results/mini/cost/clip_b32-8/run.json")["settings"]["comparison"]
    assert (run["surgery"]["features"], run["prob_surgery"]["features"]) == ("unit", "raw")
    assert {METHODS[name]["features"] for name in ("surgery_text", "prob_text")} == {"raw"}


def test_only_twenty_tasks_and_the_larger_t5_miss_their_ranges():
    checks = {pool: entry["checks_hold"] for pool, entry in CHOICE["suite"]["checked"].items()}
    assert checks == {"8": True, "14": True, "20": False}
    choices = record("results/mini/language_choice.json")
    smaller, larger = (mean(choices[role]["experts"].values()) for role in T5)
    assert larger < 85 <= smaller
