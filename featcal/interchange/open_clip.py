"""open_clip's checkpoints read as transformers' CLIPModel, and written as open_clip's own folder on
the hub.

open_clip itself is not needed: its tensors are renamed and its configuration translated. Knows
nothing of tokenizers but which files to copy.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPConfig, CLIPModel

from featcal.errors import BadFile, MissingPath, NotFinite, TruncatedFile, WrongKeys
from featcal.interchange.architecture import VOCABULARY, clip_config, model_config
from featcal.interchange.pictures import DEFAULT, preprocess_cfg
from featcal.interchange.tensors import in_our_names, in_their_names
from featcal.models.load import quiet
from featcal.models.save import copy_beside
from featcal.storage.atomic import atomic_folder
from featcal.storage.checkpoint import no_safetensors
from featcal.storage.jsonfile import read_json

CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"


def read_open_clip(checkpoint: str | Path, config: Mapping[str, Any] | str | Path) -> CLIPModel:
    """A CLIPModel in float32 and evaluation mode that computes what open_clip computes with these
    weights.

    checkpoint: a safetensors file in open_clip's names.  config: open_clip's model configuration
    (embed_dim, vision_cfg,
                text_cfg, quick_gelu), or a JSON file with it; the hub's {"model_cfg": ...} will do
                too.
    Raises:     MissingPath, TruncatedFile, NotFinite, WrongKeys; BadFile for a pickle or a
                configuration that CLIPModel cannot follow.
    """
    place, content = (
        ("open_clip's configuration", config)
        if isinstance(config, Mapping)
        else (config, read_json(config))
    )
    content = content.get("model_cfg", content) if isinstance(content, Mapping) else content
    if not isinstance(content, Mapping):
        raise BadFile(
            place,
            "not a JSON object",
            "give open_clip's model configuration: embed_dim, vision_cfg, text_cfg",
        )
    ours = clip_config(content, place)
    with torch.device("meta"):
        expected = _in_their_names(CLIPModel(ours))
    state = _weights(
        Path(checkpoint), {name: tuple(tensor.shape) for name, tensor in expected.items()}, place
    )
    with quiet():  # given all tensors, it draws no random ones
        clip: CLIPModel = CLIPModel.from_pretrained(
            None, config=ours, state_dict=in_our_names(state, *_layers(ours))
        )
    return clip.float().eval()


def write_open_clip(clip: CLIPModel, folder: str | Path, like: str | Path | None = None) -> Path:
    """Writes open_clip_config.json and open_clip_model.safetensors;
    `open_clip.create_model("local-dir:FOLDER")` loads them.

    like:    a Hugging Face folder whose processor is translated and whose tokenizer is copied;
             without it OpenAI's processor.
    Returns: the folder, which appears complete or not at all.
    Raises:  BadSetting, BadFile for what open_clip cannot express; MissingPath when `like` has no
             processor; DiskFull.
    """
    theirs, state = model_config(clip.config), _in_their_names(clip)
    pictures = (
        DEFAULT if like is None else preprocess_cfg(Path(like), theirs["vision_cfg"]["image_size"])
    )
    if (
        like is not None
        and theirs["text_cfg"]["vocab_size"] != VOCABULARY
        and (Path(like) / "tokenizer_config.json").is_file()
    ):
        theirs["text_cfg"]["hf_tokenizer_name"] = (
            "."  # not CLIP's own vocabulary: the tokenizer beside the weights
        )
    with atomic_folder(folder, needed=sum(tensor.nbytes for tensor in state.values())) as hidden:
        copy_beside(like, hidden)
        text = json.dumps({"model_cfg": theirs, "preprocess_cfg": pictures}, indent=2)
        (hidden / CONFIG).write_text(text + "\n", encoding="utf-8")
        save_file(state, hidden / WEIGHTS, metadata={"format": "pt"})
        shutil.copymode(
            hidden / CONFIG, hidden / WEIGHTS
        )  # safetensors lets nobody else read what it writes
    return Path(folder)


def _in_their_names(clip: CLIPModel) -> dict[str, Tensor]:
    return in_their_names(clip.state_dict(), *_layers(clip.config))


def _layers(config: CLIPConfig) -> tuple[int, int]:
    return config.vision_config.num_hidden_layers, config.text_config.num_hidden_layers  # type: ignore[union-attr]


def _weights(
    path: Path, expected: Mapping[str, tuple[int, ...]], config: object
) -> dict[str, Tensor]:
    """All tensors of a file in float32, after their names and shapes were found to be the expected
    ones.
    """
    if not path.is_file():
        raise MissingPath(
            path, "a checkpoint of open_clip", "check the path; hub names must be fetched first"
        )
    if path.suffix != ".safetensors":
        raise no_safetensors(path.parent, WEIGHTS, path.name)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
            _require_fit(path, found, expected, config)
            state = {name: file.get_tensor(name).float() for name in found}
    except SafetensorError as error:
        raise TruncatedFile(path, error) from None
    for name, tensor in state.items():
        if not torch.isfinite(tensor).all():
            raise NotFinite(path, name)
    return state


def _require_fit(
    path: Path, found: Mapping[str, Any], expected: Mapping[str, Any], config: object
) -> None:
    missing, unexpected = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    misshapen = [
        f"{n} {found[n]} instead of {expected[n]}"
        for n in sorted(found)
        if n in expected and found[n] != expected[n]
    ]
    if missing or unexpected or misshapen:
        raise WrongKeys(path, f"the CLIP that {config} describes", missing, unexpected, misshapen)
