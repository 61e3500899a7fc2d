"""A model folder in the other form: transformers' CLIPModel as open_clip's, open_clip's as
transformers'.

Which way is found from the configuration file in the folder.
"""

from pathlib import Path

from featcal.errors import BadFile, MissingPath, TensorsDiffer
from featcal.interchange.open_clip import CONFIG, WEIGHTS, read_open_clip, write_open_clip
from featcal.interchange.pictures import processor
from featcal.models.load import load_clip, load_vision, vision_part
from featcal.models.save import save_model
from featcal.storage.atomic import atomic_folder
from featcal.storage.checkpoint import no_safetensors
from featcal.storage.jsonfile import read_json, write_json

_NAMES = (
    WEIGHTS,
    "open_clip_pytorch_model.safetensors",
    "model.safetensors",
)  # in the order open_clip looks for them


def is_open_clip(folder: Path) -> bool:
    """Whether a folder holds open_clip's form, rather than transformers'. Raises: MissingPath for
    neither, BadFile for both.
    """
    theirs, ours = (folder / CONFIG).is_file(), (folder / "config.json").is_file()
    if theirs and ours:
        way_out = f"use it as it is, or give a folder with only one of {CONFIG} and config.json"
        raise BadFile(folder, "holds open_clip's form and transformers' already", way_out)
    if not (theirs or ours):
        raise MissingPath(
            folder / "config.json",
            "what model it is",
            f"give a folder with config.json or {CONFIG}",
        )
    return theirs


def to_transformers(source: Path, out: Path) -> Path:
    """An open_clip folder as a CLIPModel folder with its processor; a tokenizer is copied where
    there is one.

    Raises: as read_open_clip; BadFile when the weights are missing or a pickle.
    """
    weights = next((source / name for name in _NAMES if (source / name).is_file()), None)
    if weights is None:
        raise no_safetensors(source, WEIGHTS)
    clip = read_open_clip(weights, source / CONFIG)
    side = clip.vision_model.config.image_size
    assert isinstance(side, int)
    pictures = processor(
        read_json(source / CONFIG).get("preprocess_cfg") or {}, side, source / CONFIG
    )
    with atomic_folder(out) as folder:
        save_model(clip, folder, like=source)
        write_json(folder / "preprocessor_config.json", pictures)
    return out


def to_open_clip(source: Path, out: Path, clip: Path | None = None) -> Path:
    """A CLIPModel folder as an open_clip folder; a CLIPVisionModel needs the whole `clip` whose
    image tower it replaces.

    Raises: as load_clip and write_open_clip; TensorsDiffer for a tower of another width.
    """
    if clip is None:
        return write_open_clip(load_clip(source), out, like=source)
    vision_part(source)
    whole, vision = load_clip(clip), load_vision(source)
    name, here, there = (
        "vision width",
        vision.config.hidden_size,
        whole.vision_model.config.hidden_size,
    )
    if here != there:
        raise TensorsDiffer(name, source, here, clip, there)
    whole.vision_model, whole.config.vision_config = vision, vision.config
    return write_open_clip(whole, out, like=clip)
