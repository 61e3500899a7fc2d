"""Adapters on test images they saw and on others: by hand, and from the flags on file."""

import math

import pandas as pd
import pytest
from synthetic_correct import COUNT

from pipeline import ROOT
from reproduction.experiments import load_experiments
from reproduction.report.pages.differences import adapters_on_samples, averages_on, mean_lead
from reproduction.report.statistics import lead
from reproduction.results import packed


def rows(column, seed="42", **tasks):
    """Return a row per task with flags in a column."""
    shared = {"seed": seed, "metric": "accuracy"}
    flags = {task: [digit == "1" for digit in text] for task, text in tasks.items()}
    rows = ({"task": t, "count": len(marks), column: packed(marks)} for t, marks in flags.items())
    return pd.DataFrame(shared | row for row in rows)


# the first two of the four images of task a were shown, and of the six of task b
SHOWN = rows("seen", a="1100", b="110000")
SURGERY = rows("correct", a="1100", b="100100")
FEATCAL = rows("correct", a="1011", b="101011")


def test_differences_are_paired_image_by_image_over_tasks_of_their_own_images():
    on, off = ({n: averages_on(model, SHOWN, shown)["42"] for n, model in (("f", FEATCAL), ("s", SURGERY))}
               for shown in (True, False))  # fmt: skip
    assert (on["s"].mean, off["s"].mean) == pytest.approx((75, 12.5))
    b = 100**2 * 1 / 4  # s²/n of the differences 1, -1, 1, 1; those of the other task are all 1
    assert lead(off["f"], off["s"]) == pytest.approx((75, 2 * math.sqrt(b / 4)))
    a = 100**2 * 0.5 / 2  # differences 0, 1; those of the other task are all 0
    assert lead(on["f"], on["s"]) == pytest.approx((-25, 2 * math.sqrt(a / 4)))
    assert lead(off["s"], off["s"]) == (0, 0)


def test_seeds_add_their_spread_and_do_not_make_images_more():
    rooms = 2 * math.sqrt(4), 2 * math.sqrt(6)
    room = 2 * math.sqrt(5 + 50 / 2)
    assert mean_lead([(10.0, rooms[0]), (20.0, rooms[1])]) == f"+15.0 ± {room:.1f}"
    assert mean_lead([(10.0, 4.0)]) == "+10.0 ± 4.0" and mean_lead([]) == "–"


def test_where_all_images_were_shown_or_seeds_differ_nothing_is_compared():
    every = rows("seen", a="1111", b="111111")
    assert averages_on(SURGERY, every, False) == {}
    assert averages_on(SURGERY, every, True)["42"].mean > 0
    assert averages_on(FEATCAL.assign(seed="43"), SHOWN, True) == {}


def test_numbers_on_the_page_are_those_of_the_flags_on_file(data):
    right, seen, expected = data.table("scores.correct"), data.table("seen"), []
    surgery = {"upstream": "task_arithmetic", "setting": "suite", "method": "surgery"}
    surgery_rows = right[(right[list(surgery)] == pd.Series(surgery)).all(axis=1)]
    merged = surgery_rows.merge(seen[seen.samples == 256], on=["task", "seed"])
    assert len(merged) == 3 * len(data.tasks)
    for texts in zip(merged.correct, merged.seen, strict=True):
        answers, shown = (f"{int(text, 16):0{4 * len(text)}b}"[:COUNT] for text in texts)
        others = [a == "1" for a, s in zip(answers, shown, strict=True) if s == "0"]
        expected.append(100 * sum(others) / len(others))
    lines = adapters_on_samples("mini").text.splitlines()
    minilm, smaller, _ = (text for text in lines if text.startswith("Surgery  Task Arithmetic"))
    assert " ± " in minilm and f"  {sum(expected) / len(expected):.1f}  " in smaller


@pytest.mark.parametrize("suite", ["mini", "paper"])
def test_every_adapter_on_test_images_has_a_twin_on_training_images(suite):
    main = {"mini": "suite", "paper": "paper"}[suite]
    runs = load_experiments(ROOT / "params.yaml", suite).adapt.values()
    compared_with = [run.settings for run in runs if run.role.startswith("clip") and run.settings]
    assert len(compared_with) == 6 * 5 * 3  # sizes and pools, mergers, adapters and the mean shift
    for settings in compared_with:
        test, twin = settings[main], settings[f"{main}_train"]
        assert (test.draw.split, twin.draw.split) == ("test", "train")
        assert test.training == twin.training
        assert test.draw.samples == twin.draw.samples and set(twin.seeds) <= set(test.seeds)
