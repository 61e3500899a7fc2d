"""One vision tower for all tasks at once: fetched from the hub, or trained from the base as the experts are, a task at a time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.suites.recipe import FineTune


@dataclass(frozen=True)
class Shared:
    """Where the one model comes from: a hub id, or a number of steps over all tasks in turn."""

    tasks: Sequence[str]
    model: str | None
    fine_tune: FineTune  # its steps are those of all tasks together
    seed: int
    device: str


def write_multitask(job: Shared, prepared: Path, data: Path, pins: Path, out: Path) -> None:
    """Write the folder `out`. prepared: the folder with base/ and heads.safetensors of these tasks."""
    from featcal.models.load import load_vision
    from featcal.models.save import save_model

    if job.model is not None:
        from reproduction.suites.hub import fetch

        model = load_vision(fetch(job.model, pins))
    else:
        model = _trained(job, prepared, data)
    save_model(model, out, like=prepared / "base")


def _trained(job: Shared, prepared: Path, data: Path) -> Any:
    """Step s is the next batch of task s modulo T; orders of images are keyed by task and seed, and no expert's."""
    import torch
    from safetensors.torch import load_file

    from featcal.data.sampling import batch_indices
    from featcal.models.device import torch_device
    from featcal.models.load import load_vision
    from reproduction.suites.experts import HEADS
    from reproduction.suites.fine_tune import TrainingBatch, trained
    from reproduction.suites.load_task import load_task

    tensors = load_file(prepared / HEADS)
    images = {task: load_task(data, task, "train", prepared / "base") for task in job.tasks}

    def lesson(step: int) -> TrainingBatch:
        turn, place = divmod(step, len(job.tasks))
        task = job.tasks[place]
        seen = images[task]
        chosen = batch_indices(f"multitask {task}", len(seen), job.fine_tune.batch, turn, job.seed)
        pixels = seen.preprocess.normalised(seen.pixels[chosen])
        return TrainingBatch(task, pixels, torch.from_numpy(seen.labels[chosen]), tensors[f"head/{task}"])

    vision = load_vision(prepared / "base").to(torch_device(job.device))
    scale = math.exp(float(tensors["logit_scale"]))
    return trained(vision, tensors["visual_projection"], scale, lesson, job.fine_tune).cpu()
