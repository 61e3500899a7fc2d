"""Base, zero-shot heads and experts of a role as folders: fine-tuned here or fetched from the hub.

Each function is one job of a worker process: plain arguments in, files out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.suites.recipe import FineTune

FINE_TUNE = "fine_tune"
HEADS = "heads.safetensors"


@dataclass(frozen=True)
class ExpertJob:
    """One expert: its task, `fine_tune` or a hub pattern with {task}, and how it is trained."""

    task: str
    experts: str
    fine_tune: FineTune
    seed: int
    device: str


def write_base_and_heads(
    clip: Path, data: Path, tasks: Sequence[str], kind: str, device: str, store: Path
) -> None:
    """Write store/base/ (the vision tower in float32) and store/heads.safetensors (projection,
    logit scale, a head per task).
    """
    from safetensors.torch import save_file

    from featcal.files import atomic_path
    from featcal.models.load import load_clip, load_tokenizer, load_vision, torch_device
    from featcal.models.save import save_model
    from reproduction.suites.heads import head_of

    save_model(load_vision(clip), store / "base", like=clip)
    place = torch_device(device)
    model, vision = load_clip(clip).to(place), load_vision(clip).to(place)
    tokenizer = load_tokenizer(clip)
    tensors = {
        "visual_projection": model.visual_projection.weight.detach().cpu().contiguous(),  # (p, h)
        "logit_scale": model.logit_scale.detach().cpu(),
    }
    for task in tasks:
        tensors[f"head/{task}"] = head_of(
            model, vision, tokenizer, data, store / "base", task, kind
        ).cpu()  # (classes, p)
    with atomic_path(store / HEADS) as hidden:
        save_file(tensors, hidden)


def write_expert(job: ExpertJob, data: Path, store: Path, pins: Path) -> None:
    """Write store/experts/<task>/, fine-tuned from store/base/ or fetched."""
    from featcal.models.load import load_vision
    from featcal.models.save import save_model

    base = store / "base"
    if job.experts != FINE_TUNE:
        from reproduction.suites.hub import fetch

        expert = load_vision(fetch(job.experts.format(task=job.task), pins))
    else:
        expert = _fine_tuned(job, data, store)
    save_model(expert, store / "experts" / job.task, like=base)


def _fine_tuned(job: ExpertJob, data: Path, store: Path) -> Any:
    from safetensors.torch import load_file

    from featcal.models.load import load_vision, torch_device
    from reproduction.suites.fine_tune import fine_tune_on
    from reproduction.suites.load_task import load_task

    tensors = load_file(store / HEADS)
    images = load_task(data, job.task, "train", store / "base")
    base = load_vision(store / "base").to(torch_device(job.device))
    return fine_tune_on(images, base, tensors, job.fine_tune, job.task, job.seed).cpu()
