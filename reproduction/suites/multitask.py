"""One encoder for all tasks at once: fetched from the hub, or trained from the base as the experts
are, a task at a time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.suites.recipe import FineTune
from reproduction.suites.sentence_recipe import FineTuneSentences


@dataclass(frozen=True)
class Shared:
    """Where the one model comes from: a hub id, or a number of steps over all tasks in turn."""

    tasks: Sequence[str]
    model: str | None
    fine_tune: FineTune | FineTuneSentences  # its steps are those of all tasks together
    seed: int
    device: str


def write_multitask(job: Shared, prepared: Path, data: Path, pins: Path, out: Path) -> None:
    """Write the folder `out`. prepared: the folder with base/ and heads.safetensors of these
    tasks.
    """
    from featcal.models.load import load_as_calibrated
    from featcal.models.save import save_model

    if job.model is not None:
        from reproduction.suites.hub import fetch

        model = load_as_calibrated(fetch(job.model, pins))
    else:
        model = _trained(job, prepared, data)
    save_model(model, out, like=prepared / "base")


def _trained(job: Shared, prepared: Path, data: Path) -> Any:
    """Step s is the next batch of task s modulo T; orders of samples are keyed by task and seed,
    and no expert's.
    """
    import torch
    from safetensors.torch import load_file

    from featcal.models.load import load_as_calibrated, torch_device
    from reproduction.suites import fine_tune, fine_tune_sentences
    from reproduction.suites.descent import batch_indices
    from reproduction.suites.experts import HEADS
    from reproduction.suites.load_task import load_task

    tensors, recipe = load_file(prepared / HEADS), job.fine_tune
    seen = {task: load_task(data, task, "train", prepared / "base") for task in job.tasks}
    encoder = load_as_calibrated(prepared / "base").to(torch_device(job.device))

    def now(step: int) -> tuple[str, Any, Any, str]:
        """The task of a step, how often it had its turn, its head and what its order is drawn
        by.
        """
        turn, place = divmod(step, len(job.tasks))
        return (
            job.tasks[place],
            turn,
            tensors[f"head/{job.tasks[place]}"],
            f"multitask {job.tasks[place]}",
        )

    def of_texts(step: int) -> fine_tune_sentences.TrainingTexts:
        task, turn, head, drawn = now(step)
        chosen = fine_tune_sentences.similar_lengths(
            drawn, len(seen[task]), recipe.batch, turn, job.seed
        )
        batch, labels = seen[task].batch(chosen), torch.from_numpy(seen[task].labels[chosen])
        return fine_tune_sentences.TrainingTexts(task, batch, labels, head)

    def of_images(step: int) -> fine_tune.TrainingBatch:
        task, turn, head, drawn = now(step)
        chosen = batch_indices(drawn, len(seen[task]), recipe.batch, turn, job.seed)
        pixels, labels = (
            seen[task].preprocess.normalised(seen[task].pixels[chosen]),
            torch.from_numpy(seen[task].labels[chosen]),
        )
        return fine_tune.TrainingBatch(task, pixels, labels, head)

    if isinstance(recipe, FineTuneSentences):
        return fine_tune_sentences.trained(encoder, of_texts, recipe, f"multitask {job.seed}").cpu()
    scale = math.exp(float(tensors["logit_scale"]))
    return fine_tune.trained(encoder, tensors["visual_projection"], scale, of_images, recipe).cpu()
