"""Base and experts of a language model as folders: fine-tuned here or fetched from the hub.

Each function is one job of a worker process: plain arguments in, files out.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.suites.text_recipe import FineTuneText

FINE_TUNE = "fine_tune"
ADAPTERS = "adapters"  # of experts that are trained or published as low-rank adapters


@dataclass(frozen=True)
class TextExpert:
    """One expert: its task, `fine_tune` or a hub pattern with {task}, how it is trained, and in
    which precision it is kept.
    """

    task: str
    experts: str
    fine_tune: FineTuneText
    seed: int
    device: str
    dtype: str


def write_text_base(folder: Path, dtype: str, store: Path) -> None:
    """Write store/base/, weights and tokenizer."""
    from featcal.models.save import save_model

    save_model(_model(folder, dtype), store / "base", like=folder)


def write_text_expert(job: TextExpert, texts: Path, store: Path, pins: Path) -> None:
    """Write store/experts/<task>/, a dense model; where it is made of low-rank adapters, these to
    store/adapters/<task>/ too.
    """
    from featcal.models.save import save_model

    base = store / "base"
    if job.experts == FINE_TUNE:
        expert = _fine_tuned(job, texts, store)
    else:
        from reproduction.suites.hub import fetch

        expert = _fetched(fetch(job.experts.format(task=job.task), pins), base, job.dtype)
    save_model(expert, store / "experts" / job.task, like=base)


def _fetched(folder: Path, base: Path, dtype: str) -> Any:
    """A published expert: a whole model, or adapters that are added to the base."""
    from featcal.models.lora import CONFIG, dense_model

    if (folder / CONFIG).is_file():
        return dense_model(base, folder)
    return _model(folder, dtype)


def _fine_tuned(job: TextExpert, texts: Path, store: Path) -> Any:
    from reproduction.suites.fine_tune_text import fine_tune_text
    from reproduction.suites.texts import load_texts

    samples = load_texts(texts, job.task, "train")
    adapters = store / ADAPTERS / job.task if job.fine_tune.lora else None
    return fine_tune_text(
        store / "base", samples, job.fine_tune, job.task, job.seed, adapters, job.device
    )


def _model(folder: Path, dtype: str) -> Any:
    import torch

    from featcal.models.load import load_model

    return load_model(folder, getattr(torch, dtype))
