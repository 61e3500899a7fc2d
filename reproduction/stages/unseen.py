"""The samples of one task that are encoded where adapters are scored on what they have not seen,
and how features are scored.

n samples · p width of a feature · K classes of all tasks of a pool.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from featcal.settings import require
from reproduction.experiments.comparisons import TaskCountsStudy
from reproduction.experiments.runs import ADAPTER_BATCH, SPLITS
from reproduction.stages.context import Context

if TYPE_CHECKING:
    from torch import Tensor, nn

UNSEEN = "unseen"  # test samples that are in no adapter's draw
Row = dict[str, Any]


@dataclass(frozen=True)
class Judge:
    """How the unseen samples of one task are scored.

    head:   class vectors of all tasks, (K, p).   span: the first and the one behind the last row of
            this task's.
    labels: of the samples within their task, (n,).   expert: its unit-length features of them, (n,
    p).
    """

    task: str
    head: "Tensor"
    span: tuple[int, int]
    labels: "Tensor"
    expert: "Tensor"

    def row(self, features: "Tensor") -> Row:
        """Percent right among the task's own classes and among all, and the drift of unit-length
        features from the expert's.

        drift: mean over samples of the squared difference.   mean_drift: squared length of the mean
        difference, which is the part
        that one constant vector would undo.
        """
        from featcal.evaluation.zero_shot import require_finite, unit_length

        require_finite(features, f"features of {self.task}")
        unit, (start, end), count = unit_length(features.cpu()), self.span, len(self.labels)
        answers = unit @ self.head.T  # (n, K)
        right = (answers[:, start:end].argmax(1) == self.labels).sum()
        of_all = (answers.argmax(1) == self.labels + start).sum()
        difference = (unit - self.expert).double()  # (n, p)
        return {
            "task": self.task, "value": 100 * float(right) / count, "union": 100 * float(of_all) / count,
            "drift": float(difference.square().sum(1).mean()), "mean_drift": float(difference.mean(0).square().sum()),
            "count": count,
        }  # fmt: skip


def streams_of(study: TaskCountsStudy) -> tuple[str, ...]:
    """Those that adapters are trained on, in the order of their rows."""
    return tuple(dict.fromkeys((study.rivals.stream, "train")))


def samples_of(context: Context, study: TaskCountsStudy, task: str) -> dict[str, Any]:
    """The samples of one task that are encoded: every draw, as `adapt` makes them, and the test
    samples that are in none.

    Raises: BadSetting where no test sample is left.
    """
    import numpy as np

    from featcal.data.batches import draw_indices
    from reproduction.prepare.sources import load_task

    base = context.layout.base(study.role, study.pool)
    found, test = {}, load_task(context.layout.data_of(study.role), task, "test", base)
    left = np.arange(len(test.labels))
    for name in streams_of(study):
        samples = (
            test
            if SPLITS[name] == "test"
            else load_task(context.layout.data_of(study.role), task, SPLITS[name], base)
        )
        drawn = draw_indices(task, len(samples.labels), study.samples, study.seed)
        found[name] = samples.take(drawn)
        left = np.setdiff1d(left, drawn) if samples is test else left
    fewer = f"must be less than {len(test.labels)}, the number of test samples of {task}: some have to be left to score"
    require(len(left) > 0, f"task_counts.{study.role}-{study.pool}.samples", study.samples, fewer)
    return found | {UNSEEN: test.take(left)}


def encoded(
    context: Context,
    study: TaskCountsStudy,
    model: "nn.Module",
    task: str,
    place: str,
    samples: Mapping[str, Any] | None = None,
) -> dict[str, "Tensor"]:
    """Features (n, p) of a model as they leave the projection, by the name of the samples; of all
    there are.
    """
    from safetensors.torch import load_file

    from reproduction.stages.final_features import projected

    projection = load_file(context.layout.heads(study.role, study.pool)).get("visual_projection")
    chosen = samples_of(context, study, task) if samples is None else samples
    named = f"{place}, samples of {task}"
    return {
        name: projected(model, projection, those, ADAPTER_BATCH, named)
        for name, those in chosen.items()
    }


def judge_of(context: Context, study: TaskCountsStudy, task: str, expert: "Tensor") -> Judge:
    """What scores features (n, p) of the unseen samples of a task; expert: its own, (n, p)."""
    import torch

    from featcal.evaluation.zero_shot import unit_length

    head, spans = spans_of(context, study)
    labels = torch.as_tensor(samples_of(context, study, task)[UNSEEN].labels)
    return Judge(task, head, spans[task], labels, unit_length(expert.cpu()))


def spans_of(
    context: Context, study: TaskCountsStudy
) -> tuple["Tensor", dict[str, tuple[int, int]]]:
    """The class vectors of all tasks below each other, and which rows are a task's."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(context.layout.heads(study.role, study.pool))
    heads = {
        task: tensors[f"head/{task}"] for task in context.suite.tasks_of(study.role, study.pool)
    }
    ends = torch.tensor([len(head) for head in heads.values()]).cumsum(0).tolist()
    return torch.cat(list(heads.values())), {
        task: (end - len(head), end) for (task, head), end in zip(heads.items(), ends, strict=True)
    }
