"""Convert CLIP models between open_clip's and transformers' form.

One table pairs the tensors of both libraries, one their settings; both directions read them.
Tensors are renamed, split, joined or transposed, so a round trip is bit-exact.
"""

import shutil
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel
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
from featcal.models.checkpoint import all_finite, no_safetensors
from featcal.models.load import load_clip, load_vision, quiet_transformers, vision_part
from featcal.models.save import copy_other_files, save_model

CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"
# files that open_clip looks for, in its order
WEIGHT_FILES = (WEIGHTS, "open_clip_pytorch_model.safetensors", "model.safetensors")

# open_clip's tensor: transformers' tensor
TENSORS = {
    "logit_scale": "logit_scale",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "visual.proj": "visual_projection.weight",
    "text_projection": "text_projection.weight",
}
TRANSPOSED = ("visual.proj", "text_projection")
# modules with a weight and a bias
NORMS = {
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "ln_final": "text_model.final_layer_norm",
}
IN_BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}

VOCABULARY, END = 49408, 49407  # of CLIP's own tokenizer, open_clip's default
ARGMAX = 2  # with this eos_token_id transformers pools at the highest token id, as open_clip does
EPS = 1e-5
# open_clip's key: transformers' key, open_clip's default
SETTINGS = {
    "vision_cfg": {
        "image_size": ("image_size", 224),
        "patch_size": ("patch_size", 16),
        "layers": ("num_hidden_layers", 12),
        "width": ("hidden_size", 768),
    },
    "text_cfg": {
        "context_length": ("max_position_embeddings", 77),
        "vocab_size": ("vocab_size", VOCABULARY),
        "layers": ("num_hidden_layers", 12),
        "width": ("hidden_size", 512),
        "heads": ("num_attention_heads", 8),
    },
}
# values with which a key leaves the architecture that of CLIPModel
OFF = (None, False, "", {})
NEUTRAL = {
    "block_type": (None, "default"), "pos_embed_type": ("learnable",), "proj_type": ("linear",),
    "vision_cfg.pool_type": ("tok",), "text_cfg.pool_type": ("argmax", "eos"),
} | dict.fromkeys((
    "custom_text", "multimodal_cfg", "init_logit_bias", "nonscalar_logit_scale", "ls_init_value",
    "act_kwargs", "qk_norm", "scaled_cosine_attn", "scale_heads", "scale_attn_inner", "scale_attn",
    "scale_fc", "timm_model_name", "attentional_pool", "no_ln_pre", "hf_model_name", "embed_cls",
    "no_causal_mask", "proj_bias",
), OFF)  # fmt: skip
# keys that are computed from or have no effect on CLIPModel's outputs, such as those of training
OTHER = (
    "embed_dim", "quick_gelu", "vision_cfg", "text_cfg", "head_width", "mlp_ratio", "norm_kwargs",
    "eos_id", "timm_", "hf_", "attn_pooler_", "tokenizer_", "patch_dropout", "output_tokens",
    "output_dict", "final_ln_after_pool", "pad_id", "init_logit_scale",
)  # fmt: skip
ONLY = "only CLIPs of open_clip's own ViT and its own text transformer can be converted"
WANTED = "give open_clip's model configuration: embed_dim, vision_cfg, text_cfg"

MODES = ("shortest", "squash")
RESAMPLE = {"bicubic": 3, "bilinear": 2, "random": 3}  # PIL's filters; random in training only
PREPROCESS = {  # open_clip's defaults
    "mean": OPENAI_CLIP_MEAN,
    "std": OPENAI_CLIP_STD,
    "interpolation": "bicubic",
    "resize_mode": "shortest",
}


def tensor_names(config: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield each tensor's name in open_clip and its names in transformers: one, or q, k and v."""
    yield from ((theirs, [ours]) for theirs, ours in TENSORS.items())
    modules = dict(NORMS)
    for theirs, ours, tower in (
        ("visual.transformer", "vision_model", config.vision_config),
        ("transformer", "text_model", config.text_config),
    ):
        for i in range(tower.num_hidden_layers):
            there, here = f"{theirs}.resblocks.{i}", f"{ours}.encoder.layers.{i}"
            modules |= {f"{there}.{a}": f"{here}.{b}" for a, b in IN_BLOCK.items()}
            for kind in ("weight", "bias"):
                qkv = [f"{here}.self_attn.{letter}_proj.{kind}" for letter in "qkv"]
                yield f"{there}.attn.in_proj_{kind}", qkv
    for kind in ("weight", "bias"):
        yield from ((f"{theirs}.{kind}", [f"{ours}.{kind}"]) for theirs, ours in modules.items())


def to_our_names(state: Mapping[str, Tensor], config: CLIPConfig) -> dict[str, Tensor]:
    """Return open_clip's tensors under transformers' names, each in memory of its own."""
    renamed = {}
    for theirs, ours in tensor_names(config):
        tensor = state[theirs].T if theirs in TRANSPOSED else state[theirs]
        parts = tensor.chunk(len(ours)) if len(ours) > 1 else (tensor,)
        for name, part in zip(ours, parts, strict=True):
            renamed[name] = part.clone(memory_format=torch.contiguous_format)
    return renamed


def to_their_names(clip: CLIPModel) -> dict[str, Tensor]:
    """Return the tensors of a CLIPModel, which may be on meta, under open_clip's names."""
    state, renamed = clip.state_dict(), {}
    for theirs, ours in tensor_names(clip.config):
        tensor = torch.cat([state[name] for name in ours]) if len(ours) > 1 else state[ours[0]]
        renamed[theirs] = (tensor.T if theirs in TRANSPOSED else tensor).contiguous()
    return renamed


def clip_config(config: Any, source: object) -> CLIPConfig:
    """Return the CLIPConfig of an open_clip model configuration read from `source`.

    Raises: BadFile naming the key that is wrong or that CLIPModel has no counterpart for.
    """
    if not isinstance(config, Mapping):
        raise BadFile(source, "not a JSON object", WANTED)
    _refuse_other_keys("", config, source)
    width, towers = _positive(config, "embed_dim", None, source), {}
    for section, keys in SETTINGS.items():
        cfg = config.get(section)
        if not isinstance(cfg, Mapping):
            raise BadFile(source, f"{section} is missing", WANTED)
        _refuse_other_keys(f"{section}.", cfg, source)
        tower: dict[str, Any] = {
            ours: _positive(cfg, theirs, default, source)
            for theirs, (ours, default) in keys.items()
        }
        hidden, norm = tower["hidden_size"], cfg.get("norm_kwargs")
        if section == "vision_cfg":
            tower["num_attention_heads"] = hidden // _positive(cfg, "head_width", 64, source)
        heads = tower["num_attention_heads"]
        if not heads or hidden % heads:
            problem = f"width {hidden} cannot be split over {heads} attention heads"
            raise BadFile(source, problem, "correct the model configuration")
        if norm and (not isinstance(norm, Mapping) or set(norm) != {"eps"}):
            raise _no_counterpart(source, f"{section}.norm_kwargs", norm)
        ratio = cfg.get("mlp_ratio", 4.0)
        if not isinstance(ratio, int | float):
            raise BadFile(source, f"mlp_ratio is {ratio!r}", "it must be a number")
        towers[section] = tower | {
            "intermediate_size": int(hidden * ratio),  # rounded down, as open_clip does
            "layer_norm_eps": norm["eps"] if norm else EPS,
            "hidden_act": "quick_gelu" if config.get("quick_gelu") else "gelu",
            "projection_dim": width,
        }
    text = towers["text_cfg"]
    text["eos_token_id"] = END
    if text["vocab_size"] != VOCABULARY:
        text |= {"eos_token_id": ARGMAX, "bos_token_id": None, "pad_token_id": None}
    if config["text_cfg"].get("pool_type") == "eos":
        text["eos_token_id"] = _positive(config["text_cfg"], "eos_id", ARGMAX, source)
        if text["eos_token_id"] == ARGMAX:
            raise _no_counterpart(source, "text_cfg.eos_id", ARGMAX)
    return CLIPConfig(vision_config=towers["vision_cfg"], text_config=text, projection_dim=width)


def model_config(config: Any) -> dict[str, Any]:
    """Return the open_clip model configuration of a CLIPConfig.

    Raises: BadSetting naming the key that open_clip has no counterpart for; BadFile.
    """
    towers = {"vision_cfg": config.vision_config, "text_cfg": config.text_config}
    quick = config.vision_config.hidden_act == "quick_gelu"
    cfg: dict[str, Any] = {"embed_dim": config.projection_dim, "quick_gelu": quick}
    for section, tower in towers.items():
        keys, ratio = SETTINGS[section], tower.intermediate_size / tower.hidden_size
        if int(tower.hidden_size * ratio) != tower.intermediate_size:
            ratio = (tower.intermediate_size + 0.5) / tower.hidden_size  # is rounded down
        cfg[section] = {theirs: getattr(tower, ours) for theirs, (ours, _) in keys.items()}
        cfg[section]["mlp_ratio"] = ratio
        if tower.layer_norm_eps != EPS:
            cfg[section]["norm_kwargs"] = {"eps": tower.layer_norm_eps}
    vision, text = towers.values()
    cfg["vision_cfg"]["head_width"] = vision.hidden_size // vision.num_attention_heads
    if text.eos_token_id not in (ARGMAX, END if text.vocab_size == VOCABULARY else ARGMAX):
        cfg["text_cfg"] |= {"pool_type": "eos", "eos_id": text.eos_token_id}
    back = clip_config(cfg, "the configuration of this CLIP")
    for tower, same in ((vision, back.vision_config), (text, back.text_config)):
        for key in ("hidden_act", "image_size", "patch_size", "num_attention_heads"):
            value, expected = getattr(tower, key, None), getattr(same, key, None)
            if value != expected:
                expectation = f"must be {expected!r} to have a counterpart in open_clip"
                raise BadSetting(key, value, expectation)
    return cfg


def _refuse_other_keys(prefix: str, cfg: Mapping[str, Any], source: object) -> None:
    for key, value in cfg.items():
        neutral = NEUTRAL.get(f"{prefix}{key}") or NEUTRAL.get(key)
        known = key in SETTINGS.get(prefix[:-1], ()) or key.startswith(OTHER)
        if not (any(value == v and type(value) is type(v) for v in neutral) if neutral else known):
            raise _no_counterpart(source, f"{prefix}{key}", value)


def _no_counterpart(source: object, key: str, value: object) -> BadFile:
    problem = f"{key} is {value!r}, for which transformers' CLIPModel has no counterpart"
    return BadFile(source, problem, ONLY)


def _positive(cfg: Mapping[str, Any], key: str, default: int | None, source: object) -> int:
    """Return a positive whole number; open_clip also writes a square as [side, side]."""
    value = cfg.get(key, default)
    if key in ("image_size", "patch_size") and isinstance(value, list | tuple):
        value = value[0] if len({*map(str, value)}) == 1 else value
    if not isinstance(value, int) or value < 1:
        raise BadFile(source, f"{key} is {value!r}", "it must be a positive whole number")
    return value


def processor_config(cfg: Mapping[str, Any], side: int, source: object) -> dict[str, Any]:
    """Return the settings of a CLIPImageProcessor that prepares pictures as open_clip does.

    Raises: BadFile for a way to resize that transformers has no counterpart for.
    """
    cfg = PREPROCESS | {key: value for key, value in cfg.items() if value is not None}
    mode, kind, square = cfg["resize_mode"], cfg["interpolation"], {"height": side, "width": side}
    if mode not in MODES or kind not in RESAMPLE:
        problem = f"resize_mode {mode!r} with interpolation {kind!r} has no counterpart"
        raise BadFile(source, problem, f"use one of {', '.join(MODES)} and {', '.join(RESAMPLE)}")
    mean, std = ([v] * 3 if isinstance(v, int | float) else [*v] for v in (cfg["mean"], cfg["std"]))
    return {
        "size": {"shortest_edge": side} if mode == "shortest" else square,
        "crop_size": square,
        "resample": RESAMPLE[kind],
        "image_mean": mean,
        "image_std": std,
    }


def preprocess_config(folder: Path, side: int) -> dict[str, Any]:
    """Return the preprocess_cfg with which open_clip makes the pixels of a folder's processor.

    Raises: MissingPath; BadFile for a processor that open_clip has no counterpart for.
    """
    ours = Preprocess.from_folder(folder).processor
    noise = np.random.default_rng(0).integers(0, 256, (side + 9, side + 21, 3), dtype=np.uint8)
    pixels = np.asarray(ours(noise)["pixel_values"][0])
    mean, std = (list(value or [0.5] * 3) for value in (ours.image_mean, ours.image_std))
    for mode, kind in product(MODES, ("bicubic", "bilinear")):
        cfg = {"mean": mean, "std": std, "interpolation": kind, "resize_mode": mode}
        theirs = CLIPImageProcessorPil(**processor_config(cfg, side, folder))
        if np.array_equal(pixels, np.asarray(theirs(noise)["pixel_values"][0])):
            return cfg
    problem = (
        f"its image processor does not resize to {side} pixels, bicubic or bilinear, and scale to "
        "[0, 1]"
    )
    way_out = "open_clip can do nothing else for this model: change preprocessor_config.json"
    raise BadFile(folder, problem, way_out)


def read_open_clip(folder: Path) -> CLIPModel:
    """Return the CLIPModel that computes what open_clip does, in float32 and evaluation mode.

    Raises: MissingPath, TruncatedFile, NotFinite, WrongKeys; BadFile for a pickle or a
        configuration that CLIPModel has no counterpart for.
    """
    path, content = folder / CONFIG, read_json(folder / CONFIG)
    content = content.get("model_cfg", content) if isinstance(content, Mapping) else content
    ours = clip_config(content, path)
    weights = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if weights is None:
        raise no_safetensors(folder, WEIGHTS)
    with torch.device("meta"):
        expected = {name: tuple(t.shape) for name, t in to_their_names(CLIPModel(ours)).items()}
    try:
        state = load_file(weights)
    except SafetensorError as error:
        raise TruncatedFile(weights, error) from None
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    missing, unexpected = sorted(expected.keys() - shapes), sorted(shapes.keys() - expected)
    misshapen = [
        f"{name} {shape} instead of {expected[name]}"
        for name, shape in sorted(shapes.items())
        if shape != expected.get(name, shape)
    ]
    if missing or unexpected or misshapen:
        raise WrongKeys(weights, f"the CLIP that {path} describes", missing, unexpected, misshapen)
    bad = next((name for name, tensor in state.items() if not all_finite(tensor)), None)
    if bad is not None:
        raise NotFinite(weights, bad)
    state = {name: tensor.float() for name, tensor in state.items()}
    with quiet_transformers():  # given all tensors, it draws no random ones
        clip: CLIPModel = CLIPModel.from_pretrained(
            None, config=ours, state_dict=to_our_names(state, ours)
        )
    return clip.float().eval()


def write_open_clip(clip: CLIPModel, folder: str | Path, like: str | Path | None = None) -> Path:
    """Write a folder that `open_clip.create_model("local-dir:FOLDER")` loads.

    Args:
        like: transformers folder whose processor is converted and whose tokenizer is copied.
            Default: OpenAI's processor, no tokenizer.
    Returns: the folder, which appears complete or not at all.
    Raises: BadSetting, BadFile for what open_clip has no counterpart for; MissingPath when `like`
        has no processor; DiskFull.
    """
    cfg, state = model_config(clip.config), to_their_names(clip)
    preprocess = PREPROCESS
    if like is not None:
        preprocess = preprocess_config(Path(like), cfg["vision_cfg"]["image_size"])
        tokenizer = (Path(like) / "tokenizer_config.json").is_file()
        if tokenizer and cfg["text_cfg"]["vocab_size"] != VOCABULARY:
            cfg["text_cfg"]["hf_tokenizer_name"] = "."  # the one in this folder, not CLIP's own
    with atomic_folder(folder, needed=sum(tensor.nbytes for tensor in state.values())) as hidden:
        copy_other_files(like, hidden)
        write_json(hidden / CONFIG, {"model_cfg": cfg, "preprocess_cfg": preprocess})
        save_file(state, hidden / WEIGHTS, metadata={"format": "pt"})
        # safetensors writes files that only their owner can read
        shutil.copymode(hidden / CONFIG, hidden / WEIGHTS)
    return Path(folder)


def is_open_clip(folder: Path) -> bool:
    """Return whether a folder is in open_clip's form, else it is in transformers'.

    Raises: MissingPath for neither, BadFile for both.
    """
    theirs, ours = (folder / CONFIG).is_file(), (folder / "config.json").is_file()
    if theirs and ours:
        way_out = f"use it as it is, or give a folder with only one of {CONFIG} and config.json"
        raise BadFile(folder, "already holds both open_clip's and transformers' form", way_out)
    if not (theirs or ours):
        way_out = f"give a folder with config.json or {CONFIG}"
        raise MissingPath(folder / "config.json", "the model's configuration", way_out)
    return theirs


def to_transformers(source: Path, out: Path) -> Path:
    """Convert an open_clip folder to a CLIPModel folder with processor and, if any, tokenizer.

    Raises: as read_open_clip and processor_config; DiskFull.
    """
    clip = read_open_clip(source)
    preprocess = read_json(source / CONFIG).get("preprocess_cfg") or {}
    side: Any = clip.config.vision_config.image_size  # type: ignore[union-attr]
    processor = CLIPImageProcessorPil(**processor_config(preprocess, side, source / CONFIG))
    with atomic_folder(out) as folder:
        save_model(clip, folder, like=source)
        processor.save_pretrained(folder)
    return out


def to_open_clip(source: Path, out: Path, clip: Path | None = None) -> Path:
    """Convert a CLIPModel folder to an open_clip folder.

    A CLIPVisionModel replaces the image tower of the whole `clip`.
    Raises: as load_clip and write_open_clip; TensorsDiffer for a tower of another width.
    """
    if clip is None:
        return write_open_clip(load_clip(source), out, like=source)
    vision_part(source)
    whole, vision = load_clip(clip), load_vision(source)
    ours, theirs = vision.config.hidden_size, whole.vision_model.config.hidden_size
    if ours != theirs:
        raise TensorsDiffer("vision width", source, ours, clip, theirs)
    whole.vision_model, whole.config.vision_config = vision, vision.config
    return write_open_clip(whole, out, like=clip)
