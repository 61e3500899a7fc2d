"""Convert CLIP models between open_clip's and transformers' form.

Tensors are renamed, split, joined or transposed, so a round trip is bit-exact. Both libraries must
then compute the same features. In names, `ours` is of transformers and `theirs` of open_clip.
"""

import copy
import re
import shutil
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

from featcal.data.images import Preprocess
from featcal.errors import BadFile, BadSetting, as_bad_file, optional_package
from featcal.files import atomic_folder, read_json, write_json
from featcal.models.checkpoint import no_safetensors, read_safetensors
from featcal.models.load import OPEN_CLIP as CONFIG
from featcal.models.load import TOKENIZER, copy_other_files, quiet_transformers, require_replaceable

WEIGHTS = "open_clip_model.safetensors"
# files that open_clip looks for, in its order
WEIGHT_FILES = (WEIGHTS, "open_clip_pytorch_model.safetensors", "model.safetensors")
NAMES = {  # parts of names: open_clip's, transformers'
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1": "vision_model.embeddings.patch_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.proj": "visual_projection.weight",
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "visual.transformer.resblocks": "vision_model.encoder.layers",
    "token_embedding": "text_model.embeddings.token_embedding",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "text_projection": "text_projection.weight",
    "ln_final": "text_model.final_layer_norm",
    "transformer.resblocks": "text_model.encoder.layers",
    ".ln_1.": ".layer_norm1.",
    ".ln_2.": ".layer_norm2.",
    ".attn.out_proj.": ".self_attn.out_proj.",
    ".mlp.c_fc.": ".mlp.fc1.",
    ".mlp.c_proj.": ".mlp.fc2.",
}
TRANSPOSED = ("visual.proj", "text_projection")
# keys of the configurations: open_clip's, transformers'
SIZES = {"width": "hidden_size", "layers": "num_hidden_layers"}
VISION_KEYS = SIZES | {"image_size": "image_size", "patch_size": "patch_size"}
TEXT_KEYS = SIZES | {"heads": "num_attention_heads", "vocab_size": "vocab_size"}
TEXT_KEYS |= {"context_length": "max_position_embeddings"}
VOCABULARY, END = 49408, 49407  # of CLIP's own tokenizer, open_clip's default
ARGMAX = 2  # with this eos_token_id transformers pools at the highest token id, as open_clip does
ONLY = "only CLIPs of open_clip's own ViT and its own text transformer can be converted"
SAME = 1e-3  # relative difference of features that differ only in the order of sums
MODES, RESAMPLE = ("shortest", "squash"), {"bicubic": 3, "bilinear": 2}  # PIL's filters


def tensor_names(ours: Iterable[str]) -> dict[str, list[str]]:
    """Return for each tensor of open_clip its names in transformers: one, or those of q, k, v."""
    names: dict[str, list[str]] = {}
    # q, k and v are joined in this order
    for name in sorted(ours, key=lambda name: ("v_proj." in name, "k_proj." in name)):
        theirs = re.sub(r"self_attn\.[qkv]_proj\.", "attn.in_proj_", name)
        for their_part, our_part in NAMES.items():
            theirs = theirs.replace(our_part, their_part)
        names.setdefault(theirs, []).append(name)
    return names


def to_their_names(clip: CLIPModel) -> dict[str, Tensor]:
    """Return the tensors of a CLIPModel, which may be on meta, under open_clip's names."""
    state, renamed = clip.state_dict(), {}
    for theirs, names in tensor_names(state).items():
        tensor = state[names[0]] if len(names) == 1 else torch.cat([state[n] for n in names])
        renamed[theirs] = (tensor.T if theirs in TRANSPOSED else tensor).contiguous()
    return renamed


def clip_config(cfg: Mapping[str, Any]) -> CLIPConfig:
    """Return the CLIPConfig of an open_clip model configuration; open_clip rejects unknown keys."""
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg

    def of_tower(tower: Any, keys: Mapping[str, str]) -> dict[str, Any]:
        if tower.act_kwargs:
            raise ValueError("act_kwargs change the activation")
        return {ours: getattr(tower, name) for name, ours in keys.items()} | {
            "intermediate_size": int(tower.width * tower.mlp_ratio),  # rounded down, as there
            "layer_norm_eps": (tower.norm_kwargs or {}).get("eps", 1e-5),
            "hidden_act": "quick_gelu" if cfg.get("quick_gelu") else "gelu",
            "projection_dim": cfg["embed_dim"],
        }

    theirs, their_text = CLIPVisionCfg(**cfg["vision_cfg"]), CLIPTextCfg(**cfg["text_cfg"])
    vision, text = of_tower(theirs, VISION_KEYS), of_tower(their_text, TEXT_KEYS)
    vision["num_attention_heads"] = theirs.width // theirs.head_width
    for key in ("image_size", "patch_size"):
        vision[key] = vision[key] if isinstance(vision[key], int) else vision[key][0]
    end = END if their_text.vocab_size == VOCABULARY else ARGMAX
    text["eos_token_id"] = their_text.eos_id if their_text.pool_type == "eos" else end
    if end == ARGMAX:
        text |= {"bos_token_id": None, "pad_token_id": None}
    return CLIPConfig(vision_config=vision, text_config=text, projection_dim=cfg["embed_dim"])


def model_config(config: Any) -> dict[str, Any]:
    """Return the open_clip model configuration of a CLIPConfig. Raises: BadSetting."""
    vision, text = config.vision_config, config.text_config
    if vision.hidden_act not in ("gelu", "quick_gelu") or text.hidden_act != vision.hidden_act:
        expected = "must be gelu, or quick_gelu, in both towers to have a counterpart in open_clip"
        raise BadSetting("hidden_act", f"{vision.hidden_act}, {text.hidden_act}", expected)
    cfg = {"embed_dim": config.projection_dim, "quick_gelu": vision.hidden_act == "quick_gelu"}
    for name, tower, keys in (("vision_cfg", vision, VISION_KEYS), ("text_cfg", text, TEXT_KEYS)):
        cfg[name] = {theirs: getattr(tower, ours) for theirs, ours in keys.items()}
        cfg[name]["mlp_ratio"] = (tower.intermediate_size + 0.5) / tower.hidden_size  # rounded down
        cfg[name]["norm_kwargs"] = {"eps": tower.layer_norm_eps}
    cfg["vision_cfg"]["head_width"] = vision.hidden_size // vision.num_attention_heads
    if text.eos_token_id not in (ARGMAX, END if text.vocab_size == VOCABULARY else ARGMAX):
        cfg["text_cfg"] |= {"pool_type": "eos", "eos_id": text.eos_token_id}
    return cfg


def counterpart(cfg: Any, clip: CLIPModel | None, source: object) -> tuple[Any, CLIPModel]:
    """Return open_clip's model of a configuration, without weights, and the matching CLIPModel."""
    library = optional_package("open_clip.model", "openclip", "open_clip models")
    with as_bad_file(source, "open_clip and transformers do not build the same CLIP", ONLY):
        if cfg["vision_cfg"].get("timm_model_name") or cfg["text_cfg"].get("hf_model_name"):
            raise ValueError("timm_model_name and hf_model_name name models of other libraries")
        with torch.device("meta"):
            clip = clip or CLIPModel(clip_config(cfg))
            options = {key: value for key, value in cfg.items() if value is not False}
            model = library.CLIP(**options).eval()
            model.load_state_dict(to_their_names(clip), assign=True)  # compares names and shapes
    if model.attn_mask is not None:  # the causal mask, which is not stored
        model.attn_mask = torch.full(model.attn_mask.shape, -torch.inf).triu(1)
    return model, clip


@torch.no_grad()
def require_same_features(ours: Any, theirs: Any, source: object) -> None:
    """Raise BadFile unless both libraries' models give the same features of one random batch."""
    text, side = ours.config.text_config, ours.config.vision_config.image_size
    random, length = torch.Generator().manual_seed(0), text.max_position_embeddings
    pixels = torch.randn(2, 3, side, side, generator=random)
    ids = torch.randint(3, text.vocab_size - 1, (2, length), generator=random)
    if text.eos_token_id < text.vocab_size:
        ids[:, length // 2] = text.eos_token_id
    for output, features in (
        (ours.get_image_features(pixel_values=pixels), theirs.encode_image(pixels)),
        (ours.get_text_features(input_ids=ids), theirs.encode_text(ids)),
    ):
        difference = float((output.pooler_output - features).abs().max() / features.abs().max())
        if not difference <= SAME:
            problem = f"open_clip and transformers compute features that differ by {difference:.1g}"
            raise BadFile(source, problem, ONLY)


def processor_of(cfg: Mapping[str, Any], side: int, source: object) -> CLIPImageProcessorPil:
    """Return the processor that prepares pictures as open_clip does. Raises: BadFile."""
    from open_clip.transform import PreprocessCfg

    full = PreprocessCfg(**{key: value for key, value in cfg.items() if value is not None})
    mode, kind = full.resize_mode, full.interpolation.replace("random", "bicubic")
    if mode not in MODES or kind not in RESAMPLE:
        problem = f"resize_mode {mode!r} with interpolation {kind!r} has no counterpart"
        raise BadFile(source, problem, f"use one of {', '.join(MODES)} and {', '.join(RESAMPLE)}")
    mean, std = ([v] * 3 if isinstance(v, int | float) else [*v] for v in (full.mean, full.std))
    square = {"height": side, "width": side}
    size = {"shortest_edge": side} if mode == "shortest" else square
    how = {"resample": RESAMPLE[kind], "image_mean": mean, "image_std": std}
    return CLIPImageProcessorPil(size=size, crop_size=square, **how)


def preprocess_config(folder: Path, side: int) -> dict[str, Any]:
    """Return the preprocess_cfg with which open_clip makes the pixels of a folder's processor."""
    ours = Preprocess.from_folder(folder).processor
    noise = np.random.default_rng(0).integers(0, 256, (side + 9, side + 21, 3), dtype=np.uint8)
    mean, std = (list(value or [0.5] * 3) for value in (ours.image_mean, ours.image_std))
    for mode, kind in product(MODES, RESAMPLE):
        cfg = {"mean": mean, "std": std, "interpolation": kind, "resize_mode": mode}
        processors = (ours, processor_of(cfg, side, folder))
        if np.array_equal(*(np.asarray(p(noise)["pixel_values"][0]) for p in processors)):
            return cfg
    problem = f"its image processor does not resize to {side} pixels and scale to [0, 1]"
    way_out = "open_clip can do nothing else for this model: change preprocessor_config.json"
    raise BadFile(folder, problem, way_out)


def read_open_clip(folder: Path) -> CLIPModel:
    """Return the CLIPModel that computes what open_clip does, in float32 and evaluation mode."""
    path, cfg = folder / CONFIG, read_json(folder / CONFIG)
    cfg = cfg.get("model_cfg", cfg) if isinstance(cfg, dict) else cfg
    theirs, empty = counterpart(cfg, None, path)
    weights = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if weights is None:
        raise no_safetensors(folder, WEIGHTS)
    # a training on several GPUs, or torch.compile, may have put these before all names
    stored = read_safetensors(weights).items()
    state = {re.sub(r"^(module\.|_orig_mod\.)+", "", n): t.float() for n, t in stored}
    with as_bad_file(weights, f"the weights do not fit {path}", "check the configuration"):
        theirs.load_state_dict(state, assign=True)
    # not of `state`, in which older files have a logit_scale of shape (1,)
    tensors, ours = theirs.state_dict(), {}
    for name, names in tensor_names(empty.state_dict()).items():
        tensor = tensors[name].T if name in TRANSPOSED else tensors[name]
        parts = tensor.chunk(len(names)) if tensor.dim() else [tensor]
        copies = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        ours |= dict(zip(names, copies, strict=True))
    with quiet_transformers():  # given all tensors, it draws no random ones
        clip: Any = CLIPModel.from_pretrained(None, config=empty.config, state_dict=ours)
    clip = clip.float().eval()
    require_same_features(clip, theirs, path)
    return clip


def write_open_clip(clip: CLIPModel, folder: str | Path, like: str | Path | None = None) -> Path:
    """Write a folder that open_clip loads, with processor and tokenizer of the folder `like`."""
    require_replaceable(Path(folder), CONFIG)
    source, cfg, state = like or "this CLIP", model_config(clip.config), to_their_names(clip)
    theirs, _ = counterpart(cfg, clip, source)
    require_same_features(copy.deepcopy(clip).float().eval(), theirs.float(), source)
    preprocess = {}
    if like is not None:
        preprocess = preprocess_config(Path(like), cfg["vision_cfg"]["image_size"])
        if cfg["text_cfg"]["vocab_size"] != VOCABULARY and (Path(like) / TOKENIZER).is_file():
            cfg["text_cfg"]["hf_tokenizer_name"] = "."  # the one in this folder, not CLIP's own
    with atomic_folder(folder, needed=sum(tensor.nbytes for tensor in state.values())) as hidden:
        copy_other_files(like, hidden)
        write_json(hidden / CONFIG, {"model_cfg": cfg, "preprocess_cfg": preprocess})
        save_file(state, hidden / WEIGHTS, metadata={"format": "pt"})
        # safetensors writes files that only their owner can read
        shutil.copymode(hidden / CONFIG, hidden / WEIGHTS)
    return Path(folder)
