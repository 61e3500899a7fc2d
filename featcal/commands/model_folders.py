"""Model folders of the command line, tried before anything heavy begins: does transformers make a model of their config.json?"""

from pathlib import Path
from typing import TYPE_CHECKING

from featcal.errors import BadFile, MissingPath, UnknownModelClass

if TYPE_CHECKING:
    from torch import nn

# what transformers and its validation of configurations raise for a value they cannot use; the last is the parent of their own
_UNUSABLE = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)


def skeleton(folder: Path) -> "nn.Module":
    """The model of config.json without its numbers; of a whole CLIP its vision tower.

    Raises: MissingPath, BadFile, UnknownModelClass for a config.json that makes no model.
    """
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, CLIPModel, CLIPVisionModel

    from featcal.models.load import model_class

    path = folder / "config.json"
    require_names(path)
    kind = model_class(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if kind is CLIPModel:
            kind, config = CLIPVisionModel, config.vision_config
        with torch.device("meta"):
            model: nn.Module = kind(config)
    except (*_UNUSABLE, StrictDataclassError) as error:
        problem = f"transformers makes no {kind.__name__} of it ({' '.join(str(error).split())})"
        raise BadFile(path, problem, "give the config.json that was saved with these weights") from None
    return model


def require_names(path: Path) -> None:
    """A config.json that lists the names of its classes."""
    from featcal.storage.results import read_json

    if not path.is_file():
        raise MissingPath(path, "what model it is", "give a model's folder: config.json and safetensors")
    config = read_json(path)
    if not isinstance(config, dict):
        raise BadFile(path, "not a mapping of settings", "give the config.json that was saved with these weights")
    names = config.get("architectures")
    if not (isinstance(names, list) and names):
        raise UnknownModelClass(path.parent, names, "a list with one class of transformers is expected, such as CLIPVisionModel")
