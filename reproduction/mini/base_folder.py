"""A base as a Hugging Face folder: float16 weights, tokenizer, image processor, model card."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import CLIPImageProcessor, CLIPModel, PreTrainedTokenizerFast

from featcal.files import atomic_folder
from reproduction.mini.augment import MEAN, STD
from reproduction.mini.canvas import SIDE

MODELS = Path(__file__).parent / "models"  # the bases that come with the package
CARD = """---
license: mit
library_name: transformers
pipeline_tag: zero-shot-image-classification
---
# {role} of the mini suite

A small CLIP model ({layers} vision layers of width {hidden}, {side}x{side} pictures in patches of {patch}) that plays the part of
{role} in the mini suite of `featcal`. Pre-trained from a seed on pictures drawn by `reproduction.mini`, without any download:
`python -m reproduction.mini.pretrain {role}`. Its captions name the classes of twenty drawn tasks, and its tokenizer knows
only their words. Weights are stored in float16 and load in float32. Of no use outside the suite.
"""


def image_processor() -> CLIPImageProcessor:
    """Pictures of 32x32 pass unchanged but for the normalisation; others are resized and cropped as
    CLIP does.
    """
    return CLIPImageProcessor(
        size={"shortest_edge": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        rescale_factor=1 / 255,
        image_mean=[MEAN] * 3,
        image_std=[STD] * 3,
    )


def write_base(model: CLIPModel, tokenizer: PreTrainedTokenizerFast, role: str, out: Path) -> None:
    """The whole folder at once; float16 halves what git holds, and the config makes it load in
    float32.
    """
    vision = model.config.vision_config
    with atomic_folder(out) as folder:
        model.config.architectures = ["CLIPModel"]
        for part in (model.config, vision, model.config.text_config):
            part.dtype = torch.float32
        model.config.save_pretrained(folder)
        weights = {
            name: value.detach().half().contiguous() for name, value in model.named_parameters()
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save_pretrained(folder)
        image_processor().save_pretrained(folder)
        sizes = {
            "layers": vision.num_hidden_layers,
            "hidden": vision.hidden_size,
            "patch": vision.patch_size,
        }
        (folder / "README.md").write_text(CARD.format(role=role, side=SIDE, **sizes))
