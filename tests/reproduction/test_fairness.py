"""Adapters on test images they were shown and on others: by hand, on invented results, and on
none.
"""

import math
from pathlib import Path

import numpy as np
import pytest
from resolved import resolved
from synthetic_correct import COUNT

from reproduction.experiments import load_experiments
from reproduction.report import fairness
from reproduction.report.evidence import Evidence
from reproduction.report.page import Page
from reproduction.report.seen_images import Block, margin

ROOT = Path(__file__).parents[2]
PAGES = {
    "table01": ["clip_b32-8"], "table07": ["clip_l14-8"], "table08": ["clip_b32-14"], "table09": ["clip_l14-14"],
    "table10": ["clip_b32-20"], "table11": ["clip_l14-20"], "gain": ["clip_b32-8", "clip_l14-8"],
    "rankings": ["clip_b32-8", "clip_l14-8"],
    **dict.fromkeys(("table06", "figure4", "figure3", "table12", "table13"), ["clip_b32-8"]),
    "table02": [f"{role}-{pool}" for pool in (8, 14, 20) for role in ("clip_b32", "clip_l14")],
}  # fmt: skip


def flags(**tasks):
    return {
        task: np.array([character == "1" for character in text]) for task, text in tasks.items()
    }


def block(**changed):
    """The first two of the four images of task a were shown, and of the six of task b."""
    right = {
        "merged": {"": flags(a="0000", b="111111")},
        "surgery": {"42": flags(a="1100", b="100100")},
        "featcal": {"42": flags(a="1011", b="101011")},
    }
    return Block("TA", right | changed, {"surgery": {"42": flags(a="1100", b="110000")}}, {})


def test_seen_other_and_all_images_are_means_over_tasks_of_their_own_numbers():
    surgery, featcal, merged = (
        block().parts(method) for method in ("surgery", "featcal", "merged")
    )
    assert (surgery.seen, surgery.others, surgery.whole) == pytest.approx(
        (75, 12.5, 100 * (1 / 2 + 2 / 6) / 2)
    )
    assert (featcal.seen, featcal.others, featcal.whole) == pytest.approx(
        (50, 87.5, 100 * (3 / 4 + 4 / 6) / 2)
    )
    assert (merged.seen, merged.others, merged.whole) == (50, 50, 50)
    assert block().parts("prob_surgery") is None


def test_the_merger_is_taken_on_the_images_of_the_seeds_that_its_adapters_have():
    draws = {"42": flags(a="1100", b="110000"), "43": flags(a="0011", b="000011")}
    assert Block("TA", block().right, {"surgery": draws}, {}).parts("merged") == block().parts(
        "merged"
    )
    both = block(merged={"": flags(a="1000", b="100000")}).right
    assert (
        Block("TA", both, {"surgery": draws}, {}).parts("merged").seen == 50
    )  # of the second draw it would be 0


def test_differences_are_paired_image_by_image():
    mean, room = block().difference("surgery")
    variance_b = (
        100**2 * 1 / 4
    )  # s²/n of the differences 1, -1, 1, 1; those of the other task are all 1
    assert (mean, room) == pytest.approx((75, 2 * math.sqrt(variance_b / 4)))
    worth, room = block().worth("surgery")
    variance_seen = 100**2 * 0.5 / 2  # differences 0, 1; those of the other task are all 0
    assert (worth, room) == pytest.approx(
        (25 + 75, 2 * math.sqrt(variance_seen / 4 + variance_b / 4))
    )
    assert block().difference("prob_surgery") is None


def test_equal_answers_leave_no_difference_and_no_noise():
    same = block(featcal={"42": flags(a="1100", b="100100")})
    assert same.difference("surgery") == same.worth("surgery") == (0, 0)


def test_seeds_add_their_spread_and_do_not_make_images_more():
    assert margin([(10.0, 4.0), (20.0, 6.0)]) == (15, 2 * math.sqrt(5 + 50 / 2))
    assert margin([(10.0, 4.0)]) == (10, 4)
    assert margin([(10.0, 4.0), None]) is None is margin([])


def test_where_all_images_were_shown_nothing_is_left_to_compare():
    whole = Block("TA", block().right, {"surgery": {"42": flags(a="1111", b="111111")}}, {})
    assert whole.parts("surgery").others is None and whole.parts("surgery").seen == pytest.approx(
        100 * (1 / 2 + 2 / 6) / 2
    )
    assert whole.difference("surgery") is whole.worth("surgery") is None
    assert "none is left" in fairness.sentence([whole])


def test_only_seeds_that_both_have_are_compared():
    other = block(featcal={"43": flags(a="1011", b="101011")})
    assert other.difference("surgery") is None and other.parts("featcal") is None


@pytest.mark.parametrize("page", PAGES)
def test_every_page_that_compares_with_adapters_tells_seen_from_other_images(
    page, results, monkeypatch
):
    read = []
    with monkeypatch.context() as watched:
        own, settings = Evidence._read, Evidence.settings
        watched.setattr(
            Evidence, "_read", lambda self, kind: read.append(self.path(kind)) or own(self, kind)
        )
        watched.setattr(
            Evidence,
            "settings",
            lambda self: read.append(self.beside("scores") / "settings.json") or settings(self),
        )
        text = fairness.folded(Page(page, "mini")).text
    assert "is worth" in text and text.count("w/ FeatCal") >= len(PAGES[page])
    deps = resolved().nodes[f"page@{page}"]["deps"]
    names = [f"results/mini/{path.relative_to(results)}" for path in read]
    assert names and not [
        name for name in names if not any(name.startswith(f"{dep}/") for dep in deps)
    ], "DVC sees what is read"


def test_numbers_on_a_page_are_those_of_the_flags_on_file(ours):
    (found,) = [block for block in fairness.blocks_of(ours) if block.name == "Task Arithmetic"]
    rows, seen = ours.table("scores.correct"), ours.table("seen")
    wanted = []
    for seed in ("42", "43", "44"):
        each = []
        for task in ours.tasks:
            own = rows[
                (rows.upstream == "task_arithmetic")
                & (rows.method == "surgery")
                & (rows.setting == "suite")
            ]
            text = own[(own.seed == seed) & (own.task == task)].correct.item()
            mask = seen[
                (seen.samples == 256) & (seen.seed == seed) & (seen.task == task)
            ].seen.item()
            right, shown = (f"{int(one, 16):0{4 * len(one)}b}"[:COUNT] for one in (text, mask))
            each.append(
                100
                * sum(r == "1" for r, s in zip(right, shown, strict=True) if s == "0")
                / shown.count("0")
            )
        wanted.append(sum(each) / len(each))
    assert found.parts("surgery").others == pytest.approx(sum(wanted) / 3)
    assert found.trained["surgery"].mean == pytest.approx(70 + 0.5 * 3.5 + 0.2)
    assert ours.table("scores.correct").columns.tolist() == [
        c for c in ours.table("scores") if c not in ("value", "count")
    ]


def test_damaged_images_are_held_against_adapters_on_damaged_training_images(ours):
    blocks = {block.name: block for block in fairness.blocks_of(ours, "corrupted")}
    assert list(blocks) == ["Clean", "Gaussian noise", "Motion blur", "Fog"]
    trained = {name: block.trained["surgery"].mean for name, block in blocks.items()}
    assert trained == pytest.approx(
        {"Clean": 71.75, "Gaussian noise": 58.75, "Motion blur": 58.75, "Fog": 58.75}
    )
    assert blocks["Fog"].parts("surgery").whole == pytest.approx(59.75, abs=0.1)


def test_the_budget_of_the_main_results_borrows_their_adapters_on_training_images(results, ours):
    path = results / "scores/clip_b32-8/settings.json"
    assert "of Table 1" not in fairness.folded(Page("table12", "mini")).text
    path.write_text(path.read_text().replace('"samples": 256', '"samples": 64'))
    blocks = {block.name: block for block in fairness.blocks_of(ours, "samples")}
    assert blocks["64 images per task"].trained["surgery"].mean == pytest.approx(
        70 + 0.5 * 3.5 + 0.2
    )
    assert blocks["8 images per task"].trained == blocks["512 images per task"].trained == {}
    assert (
        "at 64 images per task those of Table 1, this study trains none"
        in fairness.folded(Page("table12", "mini")).text
    )


def test_what_is_not_there_is_not_run(results):
    for path in results.rglob("*seen.csv"):
        path.unlink()
    for page in ("table01", "figure3", "table06"):
        assert "not run: 8 tasks, smaller model" in fairness.folded(Page(page, "mini")).text


@pytest.mark.parametrize("suite", ["mini", "paper"])
def test_every_adapter_on_test_images_has_a_twin_on_training_images(suite):
    main = {"mini": "suite", "paper": "paper"}[suite]
    runs = load_experiments(ROOT / "params.yaml", suite).adapt.values()
    compared = [run.settings for run in runs if run.role.startswith("clip") and run.settings]
    assert len(compared) == 6 * 5 * 3  # sizes and pools, mergers, adapters and the mean shift
    for settings in compared:
        own, twin = settings[main], settings[f"{main}_train"]
        assert (own.draw.split, twin.draw.split) == (
            "test",
            "train",
        ) and own.training == twin.training
        assert own.draw.samples == twin.draw.samples and set(twin.seeds) <= set(own.seeds)
