"""A pool cut into parts, and scores on a part: among a task's classes and among all.

n samples · p width of a feature · K classes of all tasks of a pool.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from featcal.baselines.adapters import Adapters
from featcal.data.batches import draw_indices
from featcal.evaluation.accuracy import require_finite
from featcal.models.batch import unit_length
from featcal.settings import require
from reproduction.engine.context import Setup
from reproduction.engine.features import projected
from reproduction.engine.samples import load_split
from reproduction.engine.score import TaskScores
from reproduction.engine.spec import ModelSpec
from reproduction.experiments import ADAPTER_BATCH, SPLITS
from reproduction.results import Row


def cut(study: Any, tasks: Sequence[str]) -> dict[tuple[int, int], tuple[str, ...]]:
    """Return the pool cut into parts, by count and number of the part. Raises: BadSetting."""
    parts = {}
    for count in study.counts:
        expected = f"must be at most {len(tasks)}, the number of tasks in the pool"
        require(count <= len(tasks), f"task_counts.{study.key}.counts", count, expected)
        drawn: list[tuple[str, ...]] = []
        for shuffle in range(study.shuffles if count < len(tasks) else 1):
            generator = np.random.default_rng([study.seed, crc32(b"task_counts"), shuffle])
            order = generator.permutation(len(tasks)).tolist()
            starts = range(0, len(tasks) - count + 1, count)
            drawn += [tuple(tasks[i] for i in sorted(order[s : s + count])) for s in starts]
        parts |= {(count, draw): part for draw, part in enumerate(drawn)}
    return parts


def write_expert(study: Any, setup: Setup, task: str, experts: Path) -> None:
    """Write the features of a task's expert on its scored samples to experts/<task>.safetensors."""
    arguments = setup.projection(), unseen(setup, study, task), ADAPTER_BATCH
    features = projected(setup.load(setup.expert(task)), *arguments, f"expert of {task}")
    save_file({"features": features.contiguous()}, experts / f"{task}.safetensors")


def agreement(
    task: str, features: Tensor, expert: Tensor, head: Tensor, rows: range, labels: Tensor
) -> Row:
    """Return percent right among the task's classes and among all, and the drift of unit features.

    mean_drift: squared length of the mean difference, which one constant vector would undo.
    head: class vectors of all tasks (K, p).   rows: the task's rows in it.   labels: (n,).
    """
    require_finite(features, f"features of {task}")
    unit, count = unit_length(features.cpu()), len(labels)
    answers = unit @ head.T  # (n, K)
    right = (answers[:, rows.start : rows.stop].argmax(1) == labels).sum()
    of_all = (answers.argmax(1) == labels + rows.start).sum()
    difference = (unit - unit_length(expert.cpu())).double()  # (n, p)
    return {
        "task": task, "value": 100 * float(right) / count, "union": 100 * float(of_all) / count,
        "drift": float(difference.square().sum(1).mean()), "mean_drift": float(difference.mean(0).square().sum()),
        "count": count,
    }  # fmt: skip


def unseen(setup: Setup, study: Any, task: str) -> Any:
    """Return the test samples of a task that are in no adapter's draw. Raises: BadSetting for none."""
    test = load_split(setup, task, "test")
    count = len(test.labels)
    remaining = np.arange(count)
    if any(SPLITS[name] == "test" for name in study.comparison.streams):
        remaining = np.setdiff1d(remaining, draw_indices(task, count, study.samples, study.seed))
    expected = f"must be less than {count}, the number of test samples of {task}: some have to be left to score"
    require(len(remaining) > 0, f"task_counts.{study.key}.samples", study.samples, expected)
    return test.take(remaining)


def part_scores(
    setup: Setup,
    model: ModelSpec,
    corrected: Sequence[ModelSpec],
    study: Any,
    experts: Path,
) -> dict[str, TaskScores]:
    """Return the scores of one model, or of each task's own expert, and of the same with adapters.

    experts: folder of the experts' features.
    """
    heads, all_tasks = load_file(setup.heads), replace(setup, only=()).tasks
    student = setup.load(model.folder) if model.folder else None
    changes = {other.name: Adapters.load(other.folder).apply for other in corrected}
    changes = {model.name: lambda _, rows: rows} | changes
    scores: dict[str, TaskScores] = {name: {} for name in changes}
    head = torch.cat([heads[f"head/{task}"] for task in all_tasks])
    for task in setup.tasks:
        samples = unseen(setup, study, task)
        start = sum(len(heads[f"head/{name}"]) for name in all_tasks[: all_tasks.index(task)])
        classes = range(start, start + len(heads[f"head/{task}"]))
        features = expert = load_file(experts / f"{task}.safetensors")["features"]
        if student:
            location = f"{model.upstream} of {', '.join(setup.tasks)}, on {task}"
            features = projected(student, setup.projection(), samples, ADAPTER_BATCH, location)
        arguments = (expert, head, classes, torch.as_tensor(samples.labels))
        for name, change in changes.items():
            scores[name][task] = agreement(task, change(task, features), *arguments)
    return scores
