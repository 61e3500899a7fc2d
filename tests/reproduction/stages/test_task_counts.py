"""Random subsets of a pool's tasks: how they are drawn, and how their models are scored."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from featcal.baselines.corrections import ProbSurgery, Surgery
from featcal.errors import BadSetting
from featcal.settings import Calibration
from reproduction.experiments import Rivals
from reproduction.studies.task_counts import Judge, TaskCountsStudy

TASKS = ("a", "b", "c", "d", "e", "f", "g", "h")
RIVALS = Rivals(
    setting="suite",
    featcal=Calibration(ridge=1e-6, anchor_blend=2.0, interpolation=0.9),
    surgery=Surgery(),
    prob_surgery=ProbSurgery(),
)
STUDY = TaskCountsStudy(
    role="clip_b32",
    pool=8,
    upstreams=("average",),
    rivals=RIVALS,
    counts=(2, 4, 8),
    shuffles=3,
    samples=4,
    seed=42,
)


def test_every_task_is_in_as_many_parts_of_a_count_as_any_other_and_the_whole_pool_is_one_part():
    parts = STUDY.parts(TASKS)
    for count in (2, 4):
        own = [part for part in parts if len(part.tasks) == count]
        assert Counter(task for part in own for task in part.tasks) == dict.fromkeys(TASKS, 3)
        assert [part.draw for part in own] == list(range(3 * 8 // count))
    assert [part.tasks for part in parts if len(part.tasks) == 8] == [TASKS]


def test_parts_are_drawn_by_the_seed_and_keep_the_order_of_the_pool():
    assert STUDY.parts(TASKS) == STUDY.parts(TASKS) != STUDY.but(seed=43).parts(TASKS)
    assert all(list(part.tasks) == sorted(part.tasks) for part in STUDY.parts(TASKS))


def test_more_tasks_than_the_pool_has_are_refused_by_name():
    with pytest.raises(BadSetting, match="task_counts.clip_b32-8.counts: 4 .* at most 3"):
        STUDY.parts(TASKS[:3])


def test_a_task_s_own_classes_are_fewer_answers_than_those_of_all_tasks():
    """Four unit class vectors, the first two of another task; the second image is nearer to one of
    those than to its own.
    """
    features = torch.tensor([[0.0, 0.0, 2.0, 0.0], [0.0, 0.9, 0.0, 0.8], [0.0, 0.0, 1.0, 0.0]])
    row = Judge("b", torch.eye(4), (2, 4), torch.tensor([0, 1, 1]), torch.eye(4)[[2, 3, 3]]).row(
        features
    )
    assert (row["value"], row["union"], row["count"]) == (
        pytest.approx(200 / 3),
        pytest.approx(100 / 3),
        3,
    )


def test_drift_of_one_constant_turn_is_all_in_its_mean_and_opposite_turns_leave_nothing_there():
    expert = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    judge = Judge("a", torch.eye(2), (0, 2), torch.tensor([0, 0]), expert)
    same = judge.row(
        torch.tensor([[0.6, 0.8], [3.0, 4.0]])
    )  # of another length: only the direction counts
    assert same["drift"] == pytest.approx(0.16 + 0.64) == same["mean_drift"]
    apart = judge.row(torch.tensor([[0.6, 0.8], [0.6, -0.8]]))
    assert apart["drift"] == pytest.approx(0.8) and apart["mean_drift"] == pytest.approx(0.16)
