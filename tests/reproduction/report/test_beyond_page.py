"""The page of what goes beyond the paper: pairs against adapters that saw no scored rows, what was
dropped, the study's settings.
"""

import json
from pathlib import Path

import pandas as pd
import pytest
from synthetic_correct import write_answers
from synthetic_results import write_project

from featcal.settings import Calibration
from reproduction.experiments import study_run
from reproduction.report import beyond
from reproduction.results import BEYOND

ROOT = Path(__file__).parents[3]
VALUES = {
    "merged": 60.0,
    "paper": 70.0,
    "suite": 75.0,
    "sites": 74.0,
    "both": 90.0,
    "the preset best": 60.0,
}


@pytest.fixture
def results(tmp_path, monkeypatch):
    beyond.study.cache_clear()
    folder = write_project(tmp_path, "mini")
    monkeypatch.chdir(tmp_path)
    shared = {
        "suite": "mini",
        "role": "clip_b32",
        "pool": 8,
        "upstream": "task_arithmetic",
        "metric": "accuracy",
        "count": 400,
    }
    rows = []
    for variant, value in VALUES.items():
        for samples, seed in (
            ((256, 42), (256, 43), (32, 42))
            if variant in ("the preset best", "suite")
            else ((256, 42),)
        ):
            one = shared | {
                "variant": variant,
                "method": "featcal",
                "setting": "beyond",
                "samples": samples,
                "seed": seed,
            }
            one |= (
                {"samples": 0, "seed": "", "method": "merged", "setting": ""}
                if variant == "merged"
                else {}
            )
            one |= {
                "chosen": int(variant == "both"),
                "value": value - (samples == 32) * 10,
                "validation": value,
            }
            rows += [one | {"task": task} for task in ("mnist", "dtd")]
    write_answers(folder / "beyond/clip_b32-8/beyond.csv", rows, BEYOND)
    told = {
        "study": {
            "seeds": [42, 43],
            "samples": 256,
            "few": [32, 256],
            "chosen_on": ["task_arithmetic"],
        },
        "chosen": "both",
        "validation": {"sites": 74.0, "both": 90.0, "the preset best": 80.0},
    }
    (folder / "beyond/clip_b32-8/beyond.settings.json").write_text(json.dumps(told))
    yield folder
    beyond.study.cache_clear()  # other tests read the results in git by the same names


def test_page_shows_the_chosen_variant_and_its_lead(results):
    assert (
        "ahead from 1 of 1 mergers" in beyond.summary("mini").text
        and "not run: MiniLM" in beyond.summary("mini").text
    )
    assert "+15.0" in beyond.against("mini").text
    assert "against the preset paper, one draw: -10.0" in beyond.summary("mini").text
    assert "both ← chosen" in beyond.variants("mini").text


def test_page_tells_what_did_not_work_and_every_number_of_samples(results):
    told = beyond.not_working("mini").text
    assert "from some merger: the preset best." in told and "from any: sites." in told
    rows = [line.split() for line in beyond.few("mini").text.splitlines() if line[:1].isdigit()]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        ("32", "65.0", "50.0"),
        ("256", "75.0", "60.0"),
    ]
    assert "image/svg+xml" in beyond.figure("clip_b32", "8", "mini").bundle


def test_adapters_that_saw_scored_rows_are_not_compared_with(results):
    it = beyond.study("clip_b32", "8", "mini")
    found = it.adapter("task_arithmetic", "surgery")
    assert found is None or set(found.rows["setting"]) <= {"suite_train", "paper_train"}


def test_variants_begin_with_the_suites_settings_and_a_wrong_one_is_named():
    entry = {
        "upstreams": ["average", "ties"], "chosen_on": ["average"], "samples": 8, "few": [4, 8], "batch": 2, "seeds": [1, 2],
        "paper": vars(Calibration.preset("paper")), "suite": {"ridge": 1e-3, "anchor_blend": 1.0, "interpolation": 0.9},
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
    assert study.settings("the preset best") == Calibration.preset("best")
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


def test_the_preset_best_ends_alike_from_every_merger_as_the_page_on_use_says():
    """With few texts it is above the preset paper after weak mergers and below it after strong
    ones.
    """
    table = pd.read_csv(ROOT / "results/mini/beyond/minilm-8/beyond.csv")
    one_draw = table[table.seed.isna() | ((table.samples == 64) & (table.seed == 42))]
    mean = one_draw.groupby(["variant", "upstream"])["value"].mean()
    best, paper, merged = (mean[variant] for variant in ("the preset best", "paper", "merged"))
    assert best.max() - best.min() < 1 < merged.max() - merged.min()
    weak = merged < merged.mean()
    assert weak.any() and (best > paper)[weak].all() and (best < paper)[~weak].all()


def test_dropped_ideas_are_compared_with_the_same_settings_without_them():
    """The kept rows name no variant that still runs, and a cell of the table is a plain mean."""
    kept = pd.read_csv(beyond.DROPPED, dtype={"pool": str})
    ideas = kept[kept["variant"].str.endswith(beyond.IDEAS)]
    assert len(ideas) == 322 and not ideas["chosen"].any()
    for role, pool in beyond.MODELS:
        study = json.loads(
            (ROOT / f"results/mini/beyond/{role}-{pool}/beyond.settings.json").read_text()
        )
        assert not set(ideas["variant"]) & {*study["study"]["variants"], *study["validation"]}
    one = kept[(kept["role"] == "clip_b32") & (kept["upstream"] == "wudi_closed_form")]
    means = one.groupby("variant")["value"].mean()
    together, plain = means["residual, sites, joint, α 1"], means["suite"]
    shown = {row.split("  ")[0]: row for row in beyond.dropped().text.splitlines()}
    assert f"{means['two sweeps']:.1f} ({means['two sweeps'] - plain:+.1f}" in shown["two sweeps"]
    name = "residual, sites, joint, α 1, no harm"
    assert f"{means[name]:.1f} ({means[name] - together:+.1f}" in shown[name]
