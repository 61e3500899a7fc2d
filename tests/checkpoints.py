"""Small CLIP models, processors, tokenizers and folders, in the layouts found on the hub."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers as tf
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from featcal.data.images import Preprocess
from featcal.models.load import save_model

WORDS = ("[pad]", "[start]", "[end]", "[unk]", *"a photo of the cat dog ship red .".split())
SIZES = {"num_hidden_layers": 2}
VISION = SIZES | {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
VISION |= {"image_size": 32, "patch_size": 8}
TEXT = SIZES | {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
TEXT |= {"vocab_size": len(WORDS), "max_position_embeddings": 12, "pad_token_id": 0}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2}


def clip(seed: int = 0) -> tf.CLIPModel:
    """Two blocks, width 32, its own weights for every seed."""
    config = tf.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=8)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return tf.CLIPModel(config).eval()


def vision(seed: int = 0) -> tf.CLIPVisionModel:
    return clip(seed).vision_model.eval()


def tokenizer() -> tf.PreTrainedTokenizerFast:
    """Splits at blanks and punctuation, sets [start] and [end] around, knows a few words."""
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[unk]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    ends, around = [("[start]", 1), ("[end]", 2)], "[start] $A [end]"
    inner.post_processor = processors.TemplateProcessing(single=around, special_tokens=ends)
    names = {"pad_token": "[pad]", "bos_token": "[start]", "eos_token": "[end]"}
    names["unk_token"] = "[unk]"
    return tf.PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=12, **names)


def processor(side: int = 32) -> tf.CLIPImageProcessorPil:
    square = {"height": side, "width": side}
    return tf.CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=square)


def plain(size: int = 0, crop: int = 0, mean: float = 0.5) -> Preprocess:
    """A preparation that resizes to a square, then crops; 0 leaves a step out."""
    how = {"do_resize": size > 0, "do_center_crop": crop > 0}
    sides = {"size": {"height": size, "width": size}, "crop_size": {"height": crop, "width": crop}}
    how |= {"image_mean": [mean] * 3, "image_std": [0.5] * 3}
    return Preprocess(tf.CLIPImageProcessorPil(**how, **sides))


def clip_folder(folder: Path, seed: int = 0) -> Path:
    """A whole CLIPModel with processor and tokenizer, as OpenAI's is laid out."""
    save_model(clip(seed), folder)
    processor().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def vision_folder(folder: Path, seed: int = 0) -> Path:
    save_model(vision(seed), folder)
    processor().save_pretrained(folder)
    return folder


def legacy_folder(folder: Path, seed: int = 0) -> Path:
    """A CLIPVisionModel as before transformers 5: names prefixed, the position counter stored."""
    module = vision(seed)
    renamed(save_model(module, folder), "vision_model.{}".format)
    with_tensors(folder, {"vision_model.embeddings.position_ids": torch.arange(17)[None]})
    own = {"architectures": ["CLIPVisionModel"], "transformers_version": "4.37.2"}
    (folder / "config.json").write_text(json.dumps(module.config.to_diff_dict() | own))
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def with_tensors(
    folder: Path, changed: dict[str, torch.Tensor | None], file: str = "model.safetensors"
) -> Path:
    """Replaces tensors of a folder's one safetensors file; None removes one."""
    state = load_file(folder / file) | changed
    kept = {name: tensor for name, tensor in state.items() if tensor is not None}
    save_file(kept, folder / file, metadata={"format": "pt"})
    return folder


def renamed(folder: Path, name: Callable[[str], str]) -> None:
    state = {name(old): tensor for old, tensor in tensors(folder).items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def picture(mode: str = "RGB", size: tuple[int, int] = (40, 32), seed: int = 0) -> Image.Image:
    """Coloured noise, (width, height)."""
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    image = Image.fromarray(noise, "RGBA")
    return image if mode == "RGBA" else image.convert("RGB").convert(mode)


def pictures(folder: Path, seed: int, counts: dict[str, int]) -> None:
    """Noise in class folders: as many pictures as is said for each `split/class`."""
    draw = np.random.default_rng(seed)
    for place, count in counts.items():
        (folder / place).mkdir(parents=True)
        for i in range(count):
            noise = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(noise).save(folder / place / f"{i:03d}.png")
