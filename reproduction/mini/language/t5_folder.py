"""A small T5 as a Hugging Face folder: float16 weights that load in float32, tokenizer, how it
generates, model card.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedTokenizerFast, T5ForConditionalGeneration

from featcal.files import atomic_folder
from reproduction.mini.language.t5_models import END, PAD

CARD = """---
license: mit
library_name: transformers
pipeline_tag: text-generation
---
# {role} of the mini suite

A small T5 ({layers} blocks of width {width} in encoder and decoder) that plays the part of {role} in the mini suite of
`featcal`. Pre-trained from a seed on texts drawn by `reproduction.mini.language`, without any download:
`featcal stage pretrain {role}`. It answers the prompts of eight drawn tasks in the columns and wordings of GLUE. Weights are
stored in float16 and load in float32. Of no use outside the suite.
"""


def write_t5(
    model: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, role: str, out: Path
) -> None:
    """The whole folder at once."""
    config = model.config
    config.architectures, config.dtype = ["T5ForConditionalGeneration"], torch.float32
    kept = {name: value.detach().half().contiguous() for name, value in model.named_parameters()}
    with atomic_folder(out) as folder:
        config.save_pretrained(folder)
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save_pretrained(folder)
        GenerationConfig(
            pad_token_id=PAD, eos_token_id=END, decoder_start_token_id=PAD
        ).save_pretrained(folder)
        (folder / "README.md").write_text(
            CARD.format(role=role, layers=config.num_layers, width=config.d_model)
        )
