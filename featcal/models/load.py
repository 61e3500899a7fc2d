"""Checkpoint folders to modules: float32, evaluation mode, from safetensors only, every weight
accounted for.

Transformers fills what a file lacks with random numbers and only logs it; here that is an error.
Knows no tasks and no settings.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoTokenizer,
    CLIPModel,
    CLIPVisionModel,
    PreTrainedModel,
)
from transformers.utils import logging

from featcal.errors import BadFile, WrongKeys
from featcal.models.code import CONFIG, MODULES, TOKENIZER, refuse_adapter, refuse_code
from featcal.storage.checkpoint import LazyCheckpoint, folder_path
from featcal.storage.jsonfile import read_json

VISION = "vision_model"  # the tower of a CLIPModel that plays the vision model


def load_model(folder: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a local folder, its class read from config.json.

    Raises: MissingPath, BadFile (no safetensors, no such model class), TruncatedFile, NotFinite
    (file and tensor), WrongKeys (missing, unexpected or misshapen weights by name).
    """
    return _loaded(model_class(folder), folder, dtype, part=None)


def load_vision(folder: str | Path, dtype: torch.dtype = torch.float32) -> CLIPVisionModel:
    """The vision tower of a CLIPVisionModel or a CLIPModel folder. Raises: as load_model."""
    return _loaded(CLIPVisionModel, folder, dtype, vision_part(folder))


def load_clip(folder: str | Path) -> CLIPModel:
    """A CLIPModel with both towers and projections. Raises: as load_model; BadFile for a folder of
    another class.
    """
    if model_class(folder) is not CLIPModel:
        raise other_class(
            folder,
            model_class(folder).__name__,
            "a CLIPModel with image and text tower is needed here",
        )
    return _loaded(CLIPModel, folder, torch.float32, part=None)


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a local folder. Raises: MissingPath; BadFile when the folder has none or
    names code for it.
    """
    for name in (CONFIG, TOKENIZER):
        refuse_code(folder_path(folder), name)
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (
        OSError,
        ValueError,
        KeyError,
        ImportError,
        AttributeError,
        TypeError,
    ) as error:  # whatever its files cannot be
        first = str(error).splitlines()[0]
        raise BadFile(
            folder,
            f"no tokenizer in this folder ({first})",
            "copy tokenizer.json and its config there",
        ) from None


def model_class(folder: str | Path) -> type[PreTrainedModel]:
    """The transformers class that config.json names. Raises: MissingPath, BadFile (also for code it
    needs).
    """
    place = folder_path(folder)
    refuse_adapter(folder)
    refuse_code(folder)
    config = read_json(place / CONFIG)
    if (place / MODULES).is_file():
        return _bare_class(folder)
    architectures = config.get("architectures") if isinstance(config, dict) else None
    kind = getattr(transformers, str(architectures[0]), None) if architectures else None
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise other_class(
            folder, architectures, "one class of transformers is expected, such as CLIPVisionModel"
        )
    return kind


def _bare_class(folder: str | Path) -> type[PreTrainedModel]:
    """The class without a head, by which sentence-transformers loads its encoders whatever class
    config.json names.
    """
    try:
        return MODEL_MAPPING[type(AutoConfig.from_pretrained(folder, local_files_only=True))]
    except (KeyError, ValueError, OSError):
        raise other_class(
            folder,
            "of no model",
            "a sentence encoder's config.json names a model_type of transformers",
        ) from None


def other_class(folder: str | Path, architectures: object, expected: str) -> BadFile:
    """The error of a config.json that names another class than is needed."""
    return BadFile(Path(folder) / CONFIG, f"architectures is {architectures!r}", expected)


def vision_part(folder: str | Path) -> str | None:
    """Which part of the checkpoint is the vision tower: one of several of a CLIPModel, or all there
    is (None).
    """
    kind = model_class(folder)
    if kind not in (CLIPModel, CLIPVisionModel):
        raise other_class(folder, kind.__name__, "a CLIPModel or CLIPVisionModel is needed here")
    return VISION if kind is CLIPModel else None


@contextmanager
def quiet() -> Iterator[None]:
    """Silences transformers' loading report and progress bars, and leaves them as they were."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _loaded(kind: Any, folder: str | Path, dtype: torch.dtype, part: str | None) -> Any:
    checkpoint = LazyCheckpoint(folder, part)
    checkpoint.require_floating()
    checkpoint.check_finite()
    with quiet():
        module, info = kind.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below by name instead of by a traceback
            output_loading_info=True,
        )
    # the other parts of a whole CLIPModel are left out on purpose; position_ids is a counter that
    # older files store
    unexpected = sorted(
        n for n in info["unexpected_keys"] if not (part or n.endswith("embeddings.position_ids"))
    )
    misshapen = sorted(str(entry[0]) for entry in info["mismatched_keys"])
    if info["missing_keys"] or unexpected or misshapen:
        raise WrongKeys(folder, kind.__name__, sorted(info["missing_keys"]), unexpected, misshapen)
    loaded: nn.Module = module.eval()
    return loaded


def load_as_calibrated(folder: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """What calibration is about in a folder: of a whole CLIP the vision tower, of others the model.
    Raises: as load_model.
    """
    load = load_vision if model_class(folder) in (CLIPModel, CLIPVisionModel) else load_model
    return load(folder, dtype)
