"""The images of one task that are encoded where adapters are scored on what they have not seen, and how features are scored.

n images · p width of a feature · K classes of all tasks of a pool.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from featcal.settings import require
from reproduction.experiments.studies import ADAPTER_BATCH, TaskCountsStudy
from reproduction.stages.context import Context

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from featcal.data.images import ImageSet

STREAMS = ("test_unlabelled", "train")  # those that adapters are trained on, in the order of their rows
UNSEEN = "unseen"  # test images that are in no adapter's draw
Row = dict[str, Any]


@dataclass(frozen=True)
class Chosen:
    """Some images of a set, in the order of their indices."""

    images: "ImageSet"
    indices: "np.ndarray[Any, np.dtype[np.int64]]"

    def batches(self, _: None, size: int) -> Iterator[dict[str, "Tensor"]]:
        return self.images.batches(self.indices, size)


@dataclass(frozen=True)
class Judge:
    """How the unseen images of one task are scored.

    head:   class vectors of all tasks, (K, p).   span: the first and the one behind the last row of this task's.
    labels: of the images within their task, (n,).   expert: its unit-length features of them, (n, p).
    """

    task: str
    head: "Tensor"
    span: tuple[int, int]
    labels: "Tensor"
    expert: "Tensor"

    def row(self, features: "Tensor") -> Row:
        """Percent right among the task's own classes and among all, and the drift of unit-length features from the expert's.

        drift: mean over images of the squared difference.   mean_drift: squared length of the mean difference, which is the part
        that one constant vector would undo.
        """
        from featcal.evaluation.features import require_finite, unit_length

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


def images_of(context: Context, study: TaskCountsStudy, task: str) -> dict[str, Chosen]:
    """The images of one task that are encoded: both draws, as `adapt` makes them, and the test images outside of the first.

    Raises: BadSetting where no test image is left.
    """
    import numpy as np

    from featcal.data.sampling import draw_indices
    from reproduction.suites.load_task import load_task

    base = context.layout.base(study.role, study.pool)
    found = {}
    for name in STREAMS:
        split = replace(study.rivals, stream=name).draw("surgery", study.samples, study.seed).split  # type: ignore[arg-type]
        images = load_task(context.layout.data_of(study.role), task, split, base)
        found[name] = Chosen(images, draw_indices(task, len(images.labels), study.samples, study.seed))
    test = found["test_unlabelled"]
    left = np.setdiff1d(np.arange(len(test.images.labels)), test.indices)
    fewer = f"must be less than {len(test.images.labels)}, the number of test images of {task}: some have to be left to score"
    require(len(left) > 0, f"task_counts.{study.role}-{study.pool}.samples", study.samples, fewer)
    return found | {UNSEEN: Chosen(test.images, left)}


def encoded(
    context: Context,
    study: TaskCountsStudy,
    model: "nn.Module",
    task: str,
    place: str,
    images: Mapping[str, Chosen] | None = None,
) -> dict[str, "Tensor"]:
    """Features (n, p) of a model as they leave the projection, by the name of the images; of all there are."""
    from safetensors.torch import load_file

    from reproduction.stages.final_features import projected

    projection = load_file(context.layout.heads(study.role, study.pool)).get("visual_projection")
    chosen = images_of(context, study, task) if images is None else images
    named = f"{place}, images of {task}"
    return {name: projected(model, projection, those, ADAPTER_BATCH, named) for name, those in chosen.items()}  # type: ignore[arg-type]


def judge_of(context: Context, study: TaskCountsStudy, task: str, expert: "Tensor") -> Judge:
    """What scores features (n, p) of the unseen images of a task; expert: its own, (n, p)."""
    import torch

    from featcal.evaluation.features import unit_length

    head, spans = spans_of(context, study)
    unseen = images_of(context, study, task)[UNSEEN]
    labels = torch.as_tensor(unseen.images.labels[unseen.indices])
    return Judge(task, head, spans[task], labels, unit_length(expert.cpu()))


def spans_of(context: Context, study: TaskCountsStudy) -> tuple["Tensor", dict[str, tuple[int, int]]]:
    """The class vectors of all tasks below each other, and which rows are a task's."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(context.layout.heads(study.role, study.pool))
    heads = {task: tensors[f"head/{task}"] for task in context.suite.tasks_of(study.role, study.pool)}
    ends = torch.tensor([len(head) for head in heads.values()]).cumsum(0).tolist()
    return torch.cat(list(heads.values())), {
        task: (end - len(head), end) for (task, head), end in zip(heads.items(), ends, strict=True)
    }
