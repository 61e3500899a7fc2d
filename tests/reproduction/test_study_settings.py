"""Settings of the studies of choices and of the default: their variants."""

import pytest

import pipeline
from featcal.settings import Calibration
from reproduction.experiments import Reading, SampleDraw, shared_settings, study_run

SETTINGS = pipeline.settings()
GIVEN = {
    "upstream": "task_arithmetic",
    "setting": "paper",
    "featcal": {"ridge": 1e-5, "anchor_blend": 2.0, "interpolation": 0.6},
    "reading": {},
    "samples": 256,
    "batch": 32,
    "seeds": [42, 43, 44],
    "vary": {
        "decoder": ["start"],
        "tokens": [12],
        "modules": {"attention": ["q", "v"]},
        "samples": [64],
    },
}


def test_every_option_changes_one_thing_and_the_default_is_made_at_every_seed():
    study = study_run("choices", "flan_t5_base-glue", {"mini": GIVEN}, "mini")
    default, *models = study.models()
    assert [one.seed for one in models] == [43, 44, 42, 42, 42, 42]
    assert default.settings == Calibration(**GIVEN["featcal"]) and default.reading == Reading()
    assert (default.upstream, default.setting, default.draw) == (
        *("task_arithmetic", "paper"),
        SampleDraw(stream="train", samples=256, batch=32, seed=42),
    )
    changes = {
        "decoder-start": {"reading": Reading(decoder="start")},
        "tokens-12": {"reading": Reading(tokens=12)},
        "modules-attention": {"settings": default.settings.but(modules=("q", "v"))},
        "samples-64": {"draw": default.draw.but(samples=64)},
    }
    assert [one.name for one in models[2:]] == list(changes)
    for one in models[2:]:
        words = {name: getattr(one, name) for name in ("name", "folder", "columns")}
        assert one == default.but(**words, **changes[one.name])
        assert one.columns["choice"] + "-" + one.columns["option"] == one.name


def default(key, **changed):
    section = SETTINGS["default"][key]
    common = shared_settings(key, SETTINGS["studied"][key], "mini", SETTINGS["featcal"])
    section = {**section, "mini": section["mini"] | changed}
    return study_run("default", key, section, "mini", {key: common})


@pytest.mark.parametrize("key", ["clip_b32-8", "flan_t5_base-glue"])
def test_fixed_settings_of_the_default_are_the_roles_and_two_more_each_once(key):
    study, role = default(key), SETTINGS["featcal"][key.rpartition("-")[0]]
    assert study.fixed["paper"] == Calibration(**role["paper"])
    assert study.fixed["suite"] == Calibration(**role["suite"])
    assert len({one.model_dump_json() for one in study.fixed.values()}) == len(study.fixed)
    assert list(study.fixed) == ["paper", "suite", "large anchor", "best"]
    once = default(key, suite=dict(study.fixed["large anchor"]))  # as MiniLM's tuned settings are
    assert list(once.fixed) == ["paper", "suite", "best"]
    assert (study.reading is None) == (study.pool == 8)
