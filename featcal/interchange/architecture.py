"""What open_clip's model configuration says as a CLIPConfig, and back.

open_clip can build much that CLIPModel cannot (timm and ResNet towers, other poolings, other
attention); each such setting is refused by name, because weights that load into another
architecture give other features. Knows neither tensors nor files.
"""

from collections.abc import Mapping
from typing import Any

from transformers import CLIPConfig, CLIPTextConfig, CLIPVisionConfig

from featcal.errors import BadFile, BadSetting

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
