"""Settings of the studies of choices, of what goes beyond the paper, and of searches: variants and refusals."""

from pathlib import Path

import pytest

import pipeline
from featcal.errors import BadSetting, UnknownKey
from featcal.settings import Calibration
from reproduction.experiments import Reading, shared_settings, study_run
from reproduction.studies.beyond import BEST
from reproduction.studies.choices import ChoicesStudy

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


def choices(**more) -> ChoicesStudy:
    entry = {"mini": GIVEN | more}
    return study_run("choices", "flan_t5_base-glue", entry, "mini")


def test_every_option_changes_one_thing_and_the_default_stands_at_every_seed():
    variants = list(choices().variants())
    found = {(one.choice, one.option): one for one in variants[2:]}
    default = variants[0]
    assert [one.seed for one in variants] == [42, 43, 44, 42, 42, 42, 42]
    assert (default.calibration, default.reading, default.samples) == (
        Calibration(**GIVEN["featcal"]),
        Reading(),
        256,
    )
    assert found["decoder", "start"] == default._replace(
        choice="decoder", option="start", reading=Reading(decoder="start")
    )
    assert found["tokens", "12"] == default._replace(
        choice="tokens", option="12", reading=Reading(tokens=12)
    )
    assert found["samples", "64"] == default._replace(choice="samples", option="64", samples=64)
    solved = default.calibration.but(modules=("q", "v"))
    assert found["modules", "attention"] == default._replace(
        choice="modules", option="attention", calibration=solved
    )
    model = next(m for m in choices().models(Path()) if m.name == "decoder-start")
    keys = (model.upstream, model.setting, model.seed, model.draw.samples, model.draw.batch)
    assert keys == ("task_arithmetic", "paper", 42, 256, 32)
    assert model.reading == Reading(decoder="start")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"setting": "ours"}, "choices.flan_t5_base-glue.mini.setting"),
        ({"vary": {"decodr": ["start"]}}, "must be one of split, decoder"),
        ({"vary": {"decoder": ["answer"]}}, "is the default itself"),
        ({"vary": {"decoder": ["begin"]}}, "'answer' or 'start'"),
        ({"vary": {"counted": ["prompt"]}}, "of the pool mergebench alone"),
        ({"vary": {"modules": {"none": []}}}, "at least 1 item"),
        ({"vary": {"samples": [256]}}, "is the default itself"),
    ],
)
def test_a_study_that_cannot_be_is_refused_with_its_place(more, said):
    with pytest.raises(BadSetting, match="choices") as refused:
        choices(**more)
    assert said in str(refused.value)


def test_a_misspelt_reading_is_refused_with_the_nearest_name():
    with pytest.raises(UnknownKey, match="did you mean 'decoder'"):
        choices(reading={"decodr": "start"})


def test_variants_begin_with_the_suites_settings_and_a_wrong_one_is_named():
    entry = {
        "upstreams": ["average", "ties"], "chosen_on": ["average"], "samples": 8, "few": [4, 8], "batch": 2, "seeds": [1, 2],
        "paper": vars(Calibration()), "suite": {"ridge": 1e-3, "anchor_blend": 1.0, "interpolation": 0.9},
        "variants": {"both": {"residual": 1.0}},
    }  # fmt: skip
    study = study_run("beyond", "clip_b32-8", {"mini": entry}, "mini")
    assert study.settings("both") == Calibration(
        ridge=1e-3, anchor_blend=1.0, interpolation=0.9, residual=1.0
    )
    assert [variant for _, variant, _, _ in study.first()] == [
        "merged",
        "paper",
        "suite",
        "both",
        "the preset best",
    ]
    assert study.settings("the preset best") == Calibration(**BEST)
    more = study.further("both")
    draws = {(v, samples, seed) for u, v, samples, seed in more if u == "average"}
    assert draws == {("both", 8, 2), ("suite", 8, 2), ("the preset best", 4, 1), ("suite", 4, 1)}
    others = [(v, seed) for u, v, _, seed in more if u == "ties"]
    assert others == [
        *((v, 1) for v in ("merged", "paper", "suite", "the preset best", "both")),
        ("both", 2),
        ("suite", 2),
    ]
    with pytest.raises(Exception, match=r"residul|residual"):
        study_run(
            "beyond",
            "clip_b32-8",
            {"mini": entry | {"variants": {"both": {"residul": 1.0}}}},
            "mini",
        )


def search(key, suite="mini", **changed):
    section, common = (
        SETTINGS["tune"][key],
        shared_settings(key, SETTINGS["studied"][key], suite, SETTINGS["featcal"]),
    )
    return study_run(
        "tune", key, {**section, "mini": section["mini"] | changed}, suite, {key: common}
    )


def test_the_studies_of_params_begin_at_the_papers_settings_and_read_texts_as_the_calibration_does():
    for key in ("clip_b32-8", "flan_t5_base-glue"):
        made = search(key)
        assert (made.paper.ridge, made.suite.ridge) == (
            (0.05, 1e-6) if "clip" in key else (1e-5, 1.0)
        )
        assert (made.reading is None) == ("clip" in key)
        assert search(key, "paper").suite is None
        assert search(key, "files") is None


@pytest.mark.parametrize(
    ("key", "changed", "words"),
    [
        ("clip_b32-8", {"holdout": 1}, "holdout"),
        ("clip_b32-8", {"trials": 0}, "trials"),
        ("clip_b32-8", {"reading": {"split": "train"}}, "texts alone"),
        ("llama_3b-mergebench", {"reading": None}, "must be given for texts"),
        (
            "clip_b32-8",
            {"paper": {"ridge": 0.0, "anchor_blend": 1.0, "interpolation": 0.3}},
            "tune.clip_b32-8.mini.paper.ridge",
        ),
    ],
)
def test_what_a_study_cannot_be_is_refused_by_name(key, changed, words):
    with pytest.raises(BadSetting, match=words):
        search(key, **changed)
