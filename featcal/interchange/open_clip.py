"""Tensor names of open_clip's CLIP beside those of transformers' CLIPModel, and the renaming both
ways.

open_clip keeps q, k and v of a block in one tensor and stores both projections transposed. Nothing
is computed, so no bit changes. Knows neither files nor configurations, and does not need open_clip."""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from featcal.data.images import Preprocess
from featcal.errors import (
    BadFile,
    BadSetting,
    MissingPath,
    NotFinite,
    TensorsDiffer,
    TruncatedFile,
    WrongKeys,
)
from featcal.files import atomic_folder, read_json, write_json
from featcal.models.checkpoint import no_safetensors
from featcal.models.load import load_clip, load_vision, quiet, vision_part
from featcal.models.save import copy_other_files, save_model


@dataclass(frozen=True)
class Pair:
    """One tensor of open_clip and what it is in transformers: one tensor, or q, k and v stacked
    along the first axis.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False


_PARTS = {
    "logit_scale": "logit_scale",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
}
_NORMS = {
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "ln_final": "text_model.final_layer_norm",
}
_PROJECTIONS = {
    "visual.proj": "visual_projection.weight",
    "text_projection": "text_projection.weight",
}
_IN_BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_STACKS = {
    "visual.transformer.resblocks": "vision_model.encoder.layers",
    "transformer.resblocks": "text_model.encoder.layers",
}


def pairs(vision_layers: int, text_layers: int) -> Iterator[Pair]:
    """Every tensor of a CLIP with so many blocks in its towers."""
    yield from (Pair(theirs, (ours,)) for theirs, ours in _PARTS.items())
    yield from (Pair(theirs, (ours,), transposed=True) for theirs, ours in _PROJECTIONS.items())
    for kind in ("weight", "bias"):
        yield from (
            Pair(f"{theirs}.{kind}", (f"{ours}.{kind}",)) for theirs, ours in _NORMS.items()
        )
        for (theirs, ours), layers in zip(
            _STACKS.items(), (vision_layers, text_layers), strict=True
        ):
            for i in range(layers):
                yield from (
                    Pair(f"{theirs}.{i}.{a}.{kind}", (f"{ours}.{i}.{b}.{kind}",))
                    for a, b in _IN_BLOCK.items()
                )
                fused = tuple(f"{ours}.{i}.self_attn.{letter}_proj.{kind}" for letter in "qkv")
                yield Pair(f"{theirs}.{i}.attn.in_proj_{kind}", fused)


def in_our_names(
    state: Mapping[str, Tensor], vision_layers: int, text_layers: int
) -> dict[str, Tensor]:
    """A state dict of open_clip under transformers' names; every tensor has memory of its own."""
    renamed = {}
    for pair in pairs(vision_layers, text_layers):
        tensor = state[pair.theirs].T if pair.transposed else state[pair.theirs]
        parts = tensor.chunk(len(pair.ours)) if len(pair.ours) > 1 else (tensor,)
        for name, part in zip(pair.ours, parts, strict=True):
            renamed[name] = part.clone(memory_format=torch.contiguous_format)
    return renamed


def in_their_names(
    state: Mapping[str, Tensor], vision_layers: int, text_layers: int
) -> dict[str, Tensor]:
    """A state dict of transformers' CLIPModel under open_clip's names; also of tensors that have a
    shape only (device meta).
    """
    renamed = {}
    for pair in pairs(vision_layers, text_layers):
        parts = [state[name] for name in pair.ours]
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        renamed[pair.theirs] = (tensor.T if pair.transposed else tensor).contiguous()
    return renamed


VOCABULARY, START, END = (
    49408,
    49406,
    49407,
)  # of CLIP's own tokenizer, which open_clip uses where none is named
# this eos_token_id makes transformers pool at the highest token id, as open_clip does by default
ARGMAX = 2

Config = Mapping[str, Any]

_PLAIN: dict[str, tuple[object, ...]] = {
    "ls_init_value": (None,), "act_kwargs": (None, {}), "block_type": (None, "default"), "qk_norm": (False,),
    "scaled_cosine_attn": (False,), "scale_heads": (False,), "scale_attn_inner": (False,), "scale_attn": (False,),
    "scale_fc": (False,),
}  # fmt: skip
# per section: the values with which a setting leaves the architecture that of CLIPModel
_ALIKE: dict[str, dict[str, tuple[object, ...]]] = {
    "": {
        "custom_text": (None, False), "multimodal_cfg": (None,), "init_logit_bias": (None,),
        "nonscalar_logit_scale": (None, False),
    },
    "vision_cfg.": _PLAIN | {
        "timm_model_name": (None, ""), "attentional_pool": (None, False), "no_ln_pre": (False,),
        "pos_embed_type": ("learnable",), "pool_type": ("tok",),
    },
    "text_cfg.": _PLAIN | {
        "hf_model_name": (None, ""), "embed_cls": (False,), "no_causal_mask": (False,), "pool_type": ("argmax", "eos"),
        "proj_type": ("linear",), "proj_bias": (False,),
    },
}  # fmt: skip
_READ = {
    "": {"embed_dim", "quick_gelu", "vision_cfg", "text_cfg"},
    "vision_cfg.": {
        "image_size",
        "patch_size",
        "layers",
        "width",
        "head_width",
        "mlp_ratio",
        "norm_kwargs",
    },
    "text_cfg.": {
        "context_length",
        "vocab_size",
        "layers",
        "width",
        "heads",
        "mlp_ratio",
        "norm_kwargs",
        "eos_id",
    },
}
# of training, of tokenizers, of towers that are refused above, or without effect on what CLIPModel
# computes
_WITHOUT_EFFECT = (
    "timm_", "hf_", "attn_pooler_", "tokenizer_", "patch_dropout", "output_tokens", "output_dict", "final_ln_after_pool",
    "pad_id", "init_logit_scale",
)  # fmt: skip


def clip_config(config: Config, place: object) -> CLIPConfig:
    """The CLIPConfig of an open_clip model configuration; `place` is how errors call it. Raises:
    BadFile.
    """
    sections = {
        "": config,
        "vision_cfg.": _section(config, "vision_cfg", place),
        "text_cfg.": _section(config, "text_cfg", place),
    }
    for prefix, section in sections.items():
        _refuse_what_differs(section, prefix, place)
    vision, text = sections["vision_cfg."], sections["text_cfg."]
    width = _whole(config, "embed_dim", place)
    shared = {
        "hidden_act": "quick_gelu" if config.get("quick_gelu") else "gelu",
        "projection_dim": width,
    }
    towers = _vision(vision, place) | shared, _text(text, place) | shared
    return CLIPConfig(vision_config=towers[0], text_config=towers[1], projection_dim=width)


def model_config(config: CLIPConfig) -> dict[str, Any]:
    """The open_clip model configuration of a CLIPConfig. Raises: BadSetting for what open_clip's
    CLIP cannot be.
    """
    vision, text = config.vision_config, config.text_config
    assert isinstance(vision, CLIPVisionConfig) and isinstance(text, CLIPTextConfig)
    if vision.hidden_act != text.hidden_act or vision.hidden_act not in ("quick_gelu", "gelu"):
        acts = f"{vision.hidden_act}, {text.hidden_act}"
        raise BadSetting(
            "hidden_act",
            acts,
            "must be quick_gelu or gelu, and the same in both towers, for open_clip",
        )
    for key, value in (
        ("image_size", vision.image_size),
        ("patch_size", vision.patch_size),
        ("eos_token_id", text.eos_token_id),
    ):
        if not isinstance(value, int):
            raise BadSetting(key, value, "must be one whole number for open_clip")
    theirs_vision: dict[str, Any] = {
        "image_size": vision.image_size,
        "patch_size": vision.patch_size,
        "layers": vision.num_hidden_layers,
        "head_width": vision.hidden_size // vision.num_attention_heads,
    }
    theirs_text: dict[str, Any] = {
        "context_length": text.max_position_embeddings,
        "vocab_size": text.vocab_size,
        "layers": text.num_hidden_layers,
        "heads": text.num_attention_heads,
    }
    if text.eos_token_id != ARGMAX and (text.vocab_size, text.eos_token_id) != (VOCABULARY, END):
        theirs_text |= {"pool_type": "eos", "eos_id": text.eos_token_id}
    return {
        "embed_dim": config.projection_dim,
        "quick_gelu": vision.hidden_act == "quick_gelu",
        "vision_cfg": theirs_vision | _widths(vision),
        "text_cfg": theirs_text | _widths(text),
    }


def _vision(section: Config, place: object) -> dict[str, Any]:
    width, head = _whole(section, "width", place, 768), _whole(section, "head_width", place, 64)
    return _tower(section, place, width, width // head) | {
        "image_size": _whole(section, "image_size", place, 224),
        "patch_size": _whole(section, "patch_size", place, 16),
    }


def _text(section: Config, place: object) -> dict[str, Any]:
    vocabulary = _whole(section, "vocab_size", place, VOCABULARY)
    end = END if vocabulary == VOCABULARY else ARGMAX
    if section.get("pool_type") == "eos":
        end = _whole(section, "eos_id", place, 2)
        if end == ARGMAX:
            raise _no_counterpart(place, "text_cfg.eos_id", end)
    own = {} if vocabulary == VOCABULARY else {"bos_token_id": None, "pad_token_id": None}
    return _tower(section, place, _whole(section, "width", place, 512), _whole(section, "heads", place, 8)) | own | {
        "max_position_embeddings": _whole(section, "context_length", place, 77),
        "vocab_size": vocabulary,
        "eos_token_id": end,
    }  # fmt: skip


def _tower(section: Config, place: object, width: int, heads: int) -> dict[str, Any]:
    """What both towers have, with open_clip's defaults."""
    if not heads or width % heads:
        raise BadFile(
            place,
            f"width {width} cannot be split over {heads} attention heads",
            "correct the model configuration",
        )
    norm, ratio = section.get("norm_kwargs") or {}, section.get("mlp_ratio", 4.0)
    if not isinstance(norm, Mapping) or set(norm) - {"eps"}:
        raise _no_counterpart(place, "norm_kwargs", norm)
    if not isinstance(ratio, int | float):
        raise BadFile(place, f"mlp_ratio is {ratio!r}", "it must be a number")
    return {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_hidden_layers": _whole(section, "layers", place, 12),
        "intermediate_size": int(width * ratio),  # rounded down, as open_clip does
        "layer_norm_eps": norm.get("eps", 1e-5),
    }


def _widths(tower: CLIPVisionConfig | CLIPTextConfig) -> dict[str, Any]:
    width, inner = tower.hidden_size, tower.intermediate_size
    ratio = inner / width
    exact = (
        ratio if int(width * ratio) == inner else (inner + 0.5) / width
    )  # so that rounding down gives the width again
    eps = {} if tower.layer_norm_eps == 1e-5 else {"norm_kwargs": {"eps": tower.layer_norm_eps}}
    return {"width": width, "mlp_ratio": exact} | eps


def _refuse_what_differs(section: Config, prefix: str, place: object) -> None:
    for key, value in section.items():
        alike = _ALIKE[prefix].get(key)
        if (
            value not in alike
            if alike
            else not (key in _READ[prefix] or key.startswith(_WITHOUT_EFFECT))
        ):
            raise _no_counterpart(place, f"{prefix}{key}", value)


def _no_counterpart(place: object, key: str, value: object) -> BadFile:
    problem = f"{key} is {value!r}, for which transformers' CLIPModel has no counterpart"
    return BadFile(
        place,
        problem,
        "only CLIPs of open_clip's own ViT and its own text transformer can be converted",
    )


def _section(config: Config, key: str, place: object) -> Config:
    section = config.get(key)
    if not isinstance(section, Mapping):
        raise BadFile(
            place,
            f"{key} is missing",
            "give open_clip's model configuration: embed_dim, vision_cfg, text_cfg",
        )
    return section


def _whole(section: Config, key: str, place: object, default: int | None = None) -> int:
    """A positive whole number; open_clip also writes squares as [side, side]."""
    value = section.get(key, default)
    if (
        isinstance(value, list | tuple)
        and key in ("image_size", "patch_size")
        and len(value) == 2
        and value[0] == value[1]
    ):
        value = value[0]
    if isinstance(value, list | tuple):
        raise _no_counterpart(place, key, value)
    if not isinstance(value, int) or value < 1:
        raise BadFile(place, f"{key} is {value!r}", "it must be a positive whole number")
    return value


_RESAMPLE = {
    "bicubic": 3,
    "bilinear": 2,
    "random": 3,
}  # PIL's numbers; "random" varies in training only
# what open_clip does where a configuration says nothing
DEFAULT = {
    "mean": OPENAI_CLIP_MEAN,
    "std": OPENAI_CLIP_STD,
    "interpolation": "bicubic",
    "resize_mode": "shortest",
}


def processor(theirs: Mapping[str, Any], side: int, place: object) -> dict[str, Any]:
    """The content of preprocessor_config.json. Raises: BadFile."""
    chosen = DEFAULT | {key: value for key, value in theirs.items() if value is not None}
    mode, interpolation = chosen["resize_mode"], chosen["interpolation"]
    if mode not in ("shortest", "squash") or interpolation not in _RESAMPLE:
        problem = f"pictures are resized by {mode!r} with {interpolation!r}, for which transformers has no counterpart"
        raise BadFile(
            place,
            problem,
            "resize_mode must be shortest or squash, interpolation bicubic or bilinear",
        )
    square = {"height": side, "width": side}
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": side} if mode == "shortest" else square,
        "resample": _RESAMPLE[interpolation],
        "do_center_crop": True,
        "crop_size": square,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": _three(chosen["mean"]),
        "image_std": _three(chosen["std"]),
        "do_convert_rgb": True,
    }


def preprocess_cfg(folder: Path, side: int) -> dict[str, Any]:
    """open_clip's words for what a folder's processor does. Raises: MissingPath; BadFile for what
    it cannot say.
    """
    ours = Preprocess.from_folder(folder).processor
    square, size = {"height": side, "width": side}, dict(ours.size)
    cropped = ours.do_center_crop and dict(ours.crop_size) == square
    squashed = size == square and (cropped or not ours.do_center_crop)
    shortest = size == {"shortest_edge": side} and cropped
    words = {number: word for word, number in _RESAMPLE.items() if word != "random"}
    if (
        not ours.do_resize
        or not (ours.do_rescale and ours.do_normalize)
        or not (squashed or shortest)
        or ours.resample not in words
        or abs(ours.rescale_factor * 255 - 1) > 1e-9
    ):
        problem = f"its image processor does not resize to {side} pixels, bicubic or bilinear, and scale to [0, 1]"
        raise BadFile(
            folder,
            f"{problem}, which is all that open_clip can do for this model",
            "change preprocessor_config.json",
        )
    return {
        "mean": list(ours.image_mean),
        "std": list(ours.image_std),
        "interpolation": words[ours.resample],
        "resize_mode": "squash" if squashed else "shortest",
    }


def _three(value: Any) -> list[float]:
    return list(value) if isinstance(value, list | tuple) else [value] * 3


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
        copy_other_files(like, hidden)
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
