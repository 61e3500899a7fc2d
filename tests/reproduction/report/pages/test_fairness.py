"""Adapters on test images they saw and on others: by hand, and from the flags on file."""

import math

import numpy as np
import pytest
from synthetic_correct import COUNT

from pipeline import ROOT
from reproduction.experiments import load_experiments
from reproduction.report.pages.differences import adapters_on_samples, compared, mean_margin


def flags(**tasks):
    return {task: np.array([one == "1" for one in text]) for task, text in tasks.items()}


# the first two of the four images of task a were shown, and of the six of task b
SHOWN = {"42": flags(a="1100", b="110000")}
SURGERY = {"42": flags(a="1100", b="100100")}
FEATCAL = {"42": flags(a="1011", b="101011")}


def test_accuracies_are_means_over_tasks_of_their_own_images():
    means, _, _ = compared(FEATCAL, SURGERY, SHOWN)
    assert means == pytest.approx([75, 12.5])


def test_differences_are_paired_image_by_image():
    _, on, off = compared(FEATCAL, SURGERY, SHOWN)
    b = 100**2 * 1 / 4  # s²/n of the differences 1, -1, 1, 1; those of the other task are all 1
    assert mean_margin([off["42"]]) == pytest.approx((75, 2 * math.sqrt(b / 4)))
    a = 100**2 * 0.5 / 2  # differences 0, 1; those of the other task are all 0
    assert on["42"] == pytest.approx((-25, a / 4))


def test_equal_answers_leave_no_difference_and_no_noise():
    _, on, off = compared(SURGERY, SURGERY, SHOWN)
    assert on["42"] == off["42"] == (0, 0)


def test_seeds_add_their_spread_and_do_not_make_images_more():
    assert mean_margin([(10.0, 4.0), (20.0, 6.0)]) == (15, 2 * math.sqrt(5 + 50 / 2))
    assert mean_margin([(10.0, 4.0)]) == (10, 4) and mean_margin([]) is None


def test_where_all_images_were_shown_or_seeds_differ_nothing_is_compared():
    means, _, off = compared(FEATCAL, SURGERY, {"42": flags(a="1111", b="111111")})
    assert means[1] is None and not off
    _, on, off = compared({"43": FEATCAL["42"]}, SURGERY, SHOWN)
    assert not on and not off


def test_numbers_on_the_page_are_those_of_the_flags_on_file(ours):
    right, seen, wanted = ours.table("scores.correct"), ours.table("seen"), []
    own = right[(right.upstream == "task_arithmetic") & (right.setting == "suite")]
    own, seen = own[own.method == "surgery"], seen[seen.samples == 256]
    for seed in ("42", "43", "44"):
        each = []
        for task in ours.tasks:
            text = own[(own.seed == seed) & (own.task == task)].correct.item()
            mask = seen[(seen.seed == seed) & (seen.task == task)].seen.item()
            answers, shown = (f"{int(one, 16):0{4 * len(one)}b}"[:COUNT] for one in (text, mask))
            others = [a == "1" for a, s in zip(answers, shown, strict=True) if s == "0"]
            each.append(100 * sum(others) / len(others))
        wanted.append(sum(each) / len(each))
    lines = adapters_on_samples("mini").text.splitlines()
    line = next(one for one in lines if one.startswith("Surgery  Task Arithmetic, smaller"))
    assert f"  {sum(wanted) / 3:.1f}  " in line


@pytest.mark.parametrize("suite", ["mini", "paper"])
def test_every_adapter_on_test_images_has_a_twin_on_training_images(suite):
    main = {"mini": "suite", "paper": "paper"}[suite]
    runs = load_experiments(ROOT / "params.yaml", suite).adapt.values()
    compared_with = [run.settings for run in runs if run.role.startswith("clip") and run.settings]
    assert len(compared_with) == 6 * 5 * 3  # sizes and pools, mergers, adapters and the mean shift
    for settings in compared_with:
        own, twin = settings[main], settings[f"{main}_train"]
        assert (own.draw.split, twin.draw.split) == ("test", "train")
        assert own.training == twin.training
        assert own.draw.samples == twin.draw.samples and set(twin.seeds) <= set(own.seeds)
