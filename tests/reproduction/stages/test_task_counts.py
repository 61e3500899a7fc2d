"""Random subsets of a pool's tasks: how they are drawn, and how their models are scored."""

from collections import Counter

import pytest
import torch

from featcal.baselines.corrections import ProbSurgery, Surgery
from featcal.errors import BadSetting
from featcal.settings import Calibration
from reproduction.engine.parts import agreement, cut
from reproduction.experiments import Comparison
from reproduction.studies.task_counts import TaskCountsStudy

TASKS = ("a", "b", "c", "d", "e", "f", "g", "h")
FEATCAL = Calibration(ridge=1e-6, anchor_blend=2.0, interpolation=0.9)
ADAPTERS = {"surgery": Surgery(), "prob_surgery": ProbSurgery()}
COMPARISON = Comparison(setting="suite", featcal=FEATCAL, **ADAPTERS)
GIVEN = {"role": "clip_b32", "pool": 8, "upstreams": ("average",), "samples": 4, "seed": 42}
STUDY = TaskCountsStudy(comparison=COMPARISON, counts=(2, 4, 8), shuffles=3, **GIVEN)


def test_every_task_is_in_as_many_parts_of_a_count_as_any_other_and_the_whole_pool_is_one_part():
    parts = cut(STUDY, TASKS)
    for count in (2, 4):
        subset = {draw: tasks for (size, draw), tasks in parts.items() if size == count}
        assert Counter(task for part in subset.values() for task in part) == dict.fromkeys(TASKS, 3)
        assert list(subset) == list(range(3 * 8 // count))
        assert all(len(part) == count and list(part) == sorted(part) for part in subset.values())
    assert [part for (size, _), part in parts.items() if size == 8] == [TASKS]
    assert cut(STUDY, TASKS) == parts != cut(STUDY.but(seed=43), TASKS)


def test_more_tasks_than_the_pool_has_are_refused_by_name():
    with pytest.raises(BadSetting, match="task_counts.clip_b32-8.counts: 4 .* at most 3"):
        cut(STUDY, TASKS[:3])


def test_a_task_s_own_classes_are_fewer_answers_than_those_of_all_tasks():
    """The second image is nearer to a class vector of another task than to its own."""
    features = torch.tensor([[0.0, 0.0, 2.0, 0.0], [0.0, 0.9, 0.0, 0.8], [0.0, 0.0, 1.0, 0.0]])
    labels, head = torch.tensor([0, 1, 1]), torch.eye(4)
    row = agreement("b", features, head[[2, 3, 3]], head, range(2, 4), labels)
    assert (row["value"], row["count"]) == (pytest.approx(200 / 3), 3)
    assert row["union"] == pytest.approx(100 / 3)


def test_drift_of_one_constant_turn_is_all_in_its_mean_and_opposite_turns_leave_nothing_there():
    expert = torch.tensor([[2.0, 0.0], [1.0, 0.0]])  # only the direction counts

    def drift(*features):
        head, labels = torch.eye(2), torch.tensor([0, 0])
        return agreement("a", torch.tensor(features), expert, head, range(2), labels)

    same, opposite = drift([0.6, 0.8], [3.0, 4.0]), drift([0.6, 0.8], [0.6, -0.8])
    assert same["drift"] == pytest.approx(0.16 + 0.64) == same["mean_drift"]
    assert opposite["drift"] == pytest.approx(0.8) and opposite["mean_drift"] == pytest.approx(0.16)
