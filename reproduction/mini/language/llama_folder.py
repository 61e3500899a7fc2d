"""A Llama base as a Hugging Face folder: float16 weights, tokenizer, how it generates, model
card.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from featcal.files import atomic_folder

CARD = """---
license: mit
library_name: transformers
pipeline_tag: text-generation
---
# {role} of the mini suite

A small Llama ({layers} layers of width {hidden}, {parameters} parameters) that plays the part of {role} in the mini suite of
`featcal`. Pre-trained from a seed on procedural texts of `reproduction.mini.language` (arithmetic, tiny Python functions,
instructions, facts of an invented fauna), without any download: `featcal stage pretrain {role}`. An answer ends with a line
break. Weights are stored in float16 and load in float32. Of no use outside the suite.
"""


def write_llama(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, role: str, out: Path
) -> None:
    """The whole folder at once; tied weights are stored once, and the config makes them load in
    float32.
    """
    config = model.config
    with atomic_folder(out) as folder:
        config.architectures = ["LlamaForCausalLM"]
        config.dtype = torch.float32
        config.save_pretrained(folder)
        line_break = tokenizer("\n", add_special_tokens=False)["input_ids"]
        GenerationConfig(
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=[tokenizer.eos_token_id, *line_break],
        ).save_pretrained(folder)
        weights = {
            name: value.detach().half().contiguous() for name, value in model.named_parameters()
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save_pretrained(folder)
        sizes = {
            "layers": config.num_hidden_layers,
            "hidden": config.hidden_size,
            "parameters": model.num_parameters(),
        }
        (folder / "README.md").write_text(CARD.format(role=role, **sizes))
