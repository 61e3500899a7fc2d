"""The gap that FeatCal and adapters recover by the number of tasks: parts of a pool, merged anew.

n samples · p width of a feature · K classes of all tasks of a pool.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from zlib import crc32

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Calibration, require
from reproduction.engine.context import Setup
from reproduction.engine.samples import load_split
from reproduction.engine.score import TaskScores
from reproduction.engine.spec import ModelSpec, compared_models, merged_model
from reproduction.engine.study import StudyResult, score_parts
from reproduction.experiments import ADAPTER_BATCH, ADAPTERS, SPLITS, Comparison, Each, Study
from reproduction.results import TASK_COUNTS, Row

if TYPE_CHECKING:
    from torch import Tensor


class TaskCountsStudy(Study):
    """Settings of the study.

    counts: of tasks that are merged.   shuffles: how often the pool is cut into parts of every count.
    samples: of each task; adapters see test samples and, separately, FeatCal's.
    """

    tables: ClassVar = {"task_counts": TASK_COUNTS}
    upstreams: tuple[str, ...]
    comparison: Comparison
    counts: Each[PositiveInt]
    shuffles: PositiveInt
    samples: PositiveInt
    seed: NonNegativeInt
    at_papers: Calibration | None = None

    def parts(self, tasks: Sequence[str]) -> dict[tuple[int, int], tuple[str, ...]]:
        """Return the pool cut into parts, by count and number of the part. Raises: BadSetting."""
        import numpy as np

        parts = {}
        for count in self.counts:
            expected = f"must be at most {len(tasks)}, the number of tasks in the pool"
            require(count <= len(tasks), f"task_counts.{self.key}.counts", count, expected)
            cut: list[tuple[str, ...]] = []
            for shuffle in range(self.shuffles if count < len(tasks) else 1):
                generator = np.random.default_rng([self.seed, crc32(b"task_counts"), shuffle])
                order = generator.permutation(len(tasks)).tolist()
                starts = range(0, len(tasks) - count + 1, count)
                cut += [tuple(tasks[i] for i in sorted(order[s : s + count])) for s in starts]
            parts |= {(count, draw): part for draw, part in enumerate(cut)}
        return parts

    def models(self, setup: Setup, upstream: str) -> list[ModelSpec]:
        """Return a merged model with what is compared after it; without `upstream`, the experts."""
        if not upstream:
            return [ModelSpec("expert", None, "expert")]
        compared = partial(compared_models, self, setup.folder("made"), upstream=upstream)
        adapters = compared(*ADAPTERS, streams=self.comparison.streams)
        return [merged_model(setup, upstream), *compared("featcal"), *adapters]

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        context, parts = setup.context, self.parts(setup.tasks).items()
        expected = "must be mergers that look at no data"
        for upstream in self.upstreams:
            looks = merged_model(setup, upstream).draw is not None
            require(not looks, f"{self.label}.upstreams", upstream, expected)
        experts = {task: (self, setup, task, folder) for task in setup.tasks}
        context.run(f"{self.label} experts", write_expert, experts)
        # a part is a job in one process, which starts none of its own
        alone = replace(setup, context=replace(context, suite=context.suite.but(workers=0)))
        jobs = dict[str, tuple[Any, ...]]()
        units = (*product(parts, [""]), *product(parts, self.upstreams))
        for ((count, draw), tasks), upstream in units:
            name, keys = f"{count}-{draw} {upstream or 'experts'}", {"tasks": count, "draw": draw}
            models, part = partial(self.models, upstream=upstream), replace(alone, only=tasks)
            jobs[name] = (f"{self.label} {name}", part, folder / name, {}, models, keys)
        largest_first = dict(sorted(jobs.items(), key=lambda job: -len(job[1][1].tasks)))
        evaluate = partial(part_scores, study=self, experts=folder)
        rows = context.run(self.label, partial(score_parts, evaluate=evaluate), largest_first)
        return StudyResult(tables={"task_counts": [row for name in jobs for row in rows[name]]})


def write_expert(study: TaskCountsStudy, setup: Setup, task: str, experts: Path) -> None:
    """Write the features of a task's expert on its scored samples to experts/<task>.safetensors."""
    from safetensors.torch import save_file

    from reproduction.stages.measure import projected

    arguments = setup.projection(), unseen(setup, study, task), ADAPTER_BATCH
    features = projected(setup.load(setup.expert(task)), *arguments, f"expert of {task}")
    save_file({"features": features.contiguous()}, experts / f"{task}.safetensors")


def agreement(
    task: str, features: "Tensor", expert: "Tensor", head: "Tensor", rows: range, labels: "Tensor"
) -> Row:
    """Return percent right among the task's classes and among all, and the drift of unit features.

    mean_drift: squared length of the mean difference, which one constant vector would undo.
    head: class vectors of all tasks (K, p).   rows: the task's rows in it.   labels: (n,).
    """
    from featcal.evaluation.accuracy import require_finite
    from featcal.models.batch import unit_length

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


def unseen(setup: Setup, study: TaskCountsStudy, task: str) -> Any:
    """Return the test samples of a task that are in no adapter's draw. Raises: BadSetting for none."""
    import numpy as np

    from featcal.data.batches import draw_indices

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
    study: TaskCountsStudy,
    experts: Path,
) -> dict[str, TaskScores]:
    """Return the scores of one model, or of each task's own expert, and of the same with adapters.

    experts: folder of the experts' features.
    """
    import torch
    from safetensors.torch import load_file

    from featcal.baselines.adapters import Adapters
    from reproduction.stages.measure import projected

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
