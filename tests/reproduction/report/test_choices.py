"""The study of unstated choices: its variants, its refusals, and its page against numbers counted
by hand.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from featcal.errors import BadSetting, UnknownKey
from featcal.settings import Calibration
from reproduction.experiments import Reading, study_run
from reproduction.report import choices
from reproduction.report.evidence import Evidence
from reproduction.studies.choices import ChoicesStudy

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
DRAWN = 1 + 1 / 3  # the draws of the invented results deviate by 1, around 80
TESTED = [
    (80 * 20 + value * (100 - value)) / 400 for value in (70.0, 79.5, 82.0)
]  # 400 texts of one task
NOISE = [2 * math.sqrt(DRAWN + tested) for tested in TESTED]


def study(**more) -> ChoicesStudy:
    entry = {"mini": GIVEN | more}
    return study_run("choices", "flan_t5_base-glue", entry, "mini")


def test_every_option_changes_one_thing_and_the_default_stands_at_every_seed():
    variants = list(study().variants())
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
    model = next(m for m in study().models(Path()) if m.name == "decoder-start")
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
        study(**more)
    assert said in str(refused.value)


def test_a_misspelt_reading_is_refused_with_the_nearest_name():
    with pytest.raises(UnknownKey, match="did you mean 'decoder'"):
        study(reading={"decodr": "start"})


def test_a_change_is_held_against_what_another_draw_and_other_test_texts_may_do(results):
    found = {
        (one.choice, one.option): one
        for one in choices.moved(Evidence("mini", "llama_3b", "mergebench"))
    }
    assert list(found) == [
        ("tokens", "12"),
        ("modules", "attention"),
        ("samples", "64"),
    ]  # the order of the file
    assert [round(one.change, 6) for one in found.values()] == [-10.0, -0.5, 2.0]
    # paired row by row, so less than what two independent draws of test texts would differ by
    assert all(
        0 < one.noise < unpaired for one, unpaired in zip(found.values(), NOISE, strict=True)
    )
    assert [one.clear for one in found.values()] == [True, False, False]


def test_words_of_the_page_come_from_the_settings_of_the_study(results):
    text = choices.values("mini").text
    assert (
        "longest text: 12 tokens" in text
        and "what the model takes" in text
        and "moves the score" in text
    )
    assert "draws 79.0, 80.0, 81.0" in text
    told = choices.summary("mini").text
    assert "Beyond noise: longest text 12 tokens instead of what the model takes (-10.0)." in told
    assert (
        "Within it: texts per task 64 instead of 256; linears solved attention instead of all."
        in told
    )
    assert (
        "10⁻⁵" in choices.settings("mini").text and "split train" in choices.settings("mini").text
    )


def test_one_draw_tells_no_noise_and_counts_as_not_run(results):
    path = results / "choices/flan_t5_base-glue/choices.csv"
    lines = [
        line for line in path.read_text().splitlines() if ",43," not in line and ",44," not in line
    ]
    path.write_text("\n".join(lines) + "\n")
    assert (
        "not run" in choices.panel("flan_t5_base", "mini").text
        and "FLAN-T5-base" in choices.values("mini").text
    )
