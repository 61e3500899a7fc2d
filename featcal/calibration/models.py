"""What `calibrate` is given as modules, and what it makes as a folder: loading, copying, evaluation mode, writing."""

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from featcal.calibration.record import BlockRecord
from featcal.settings import Calibration
from featcal.storage.atomic import atomic_folder


def as_module(model: nn.Module | str | Path, device: str | torch.device | None = None) -> nn.Module:
    """A module as it is; a checkpoint folder loaded in float32 onto the device, of a whole CLIP its vision tower."""
    if isinstance(model, nn.Module):
        return model
    from transformers import CLIPModel, CLIPVisionModel

    from featcal.models.load import load_model, load_vision, model_class

    load = load_vision if model_class(model) in (CLIPModel, CLIPVisionModel) else load_model
    return load(model).to(device or "cpu")


def label(role: str, model: nn.Module | str | Path) -> str:
    """How errors call a model: its role, and its folder where it has one."""
    return role if isinstance(model, nn.Module) else f"{role} ({model})"


def student_of(merged: nn.Module, given: object) -> nn.Module:
    """The model to calibrate: a copy of a module that was given, the loaded one itself for a folder."""
    return copy.deepcopy(merged) if merged is given else merged


@contextmanager
def evaluation_mode(models: Sequence[nn.Module]) -> Iterator[None]:
    """Without dropout and without gradients inside the `with`; every module's own mode is restored.

    `no_grad`, not `inference_mode`: the version counters that show overwritten inputs exist only in the former.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def write_calibrated(
    student: nn.Module, out: str | Path, like: object, settings: Calibration, blocks: Sequence[BlockRecord]
) -> Path:
    """The Hugging Face folder with featcal.json beside the weights; it appears complete or not at all."""
    from featcal.models.save import save_model

    record = {"settings": asdict(settings), "blocks": [asdict(block) for block in blocks]}
    with atomic_folder(out) as folder:
        save_model(student, folder, like=like if isinstance(like, str | Path) else None)
        text = json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False)
        (folder / "featcal.json").write_text(text + "\n", encoding="utf-8")
    return Path(out)
