"""Pico models of the families that calibration knows or infers, with padded batches."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import tiny
import torch
import transformers as tf
from tiny import SIZES, TEXT, VISION, images, make, seeded

GROUPED = TEXT | {"num_key_value_heads": 2, "head_dim": 8}
MIXED = GROUPED | {"num_hidden_layers": 3, "sliding_window": 4, "max_position_embeddings": 32}
SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
T5 = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0}
GPT2 = {"vocab_size": 97, "bos_token_id": 0, "eos_token_id": 1, "n_embd": 32, "n_layer": 2}
GPT2 |= {"n_head": 4}
OPT = SIZES | {"vocab_size": 97, "ffn_dim": 64, "max_position_embeddings": 32}
CLIP_TEXT = TEXT | {"max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1}
WIDE = VISION | {"intermediate_size": 64}


def tokens(seed, count=6, length=7, shortest=4):
    """Token ids and the mask of right padding; every sequence has at least `shortest` tokens."""
    ids = torch.randint(2, 97, (count, length), generator=seeded(seed))
    lengths = torch.randint(shortest, length + 1, (count, 1), generator=seeded(seed + 1))
    lengths[0] = length
    mask = (torch.arange(length)[None] < lengths).long()
    return ids * mask, mask


def text(seed, batch=3, end=False):
    ids, mask = tokens(seed)
    if end:  # with 1, as T5's classifier needs
        ids.scatter_(1, mask.sum(1, keepdim=True) - 1, 1)
    parts = zip(ids.split(batch), mask.split(batch), strict=True)
    return [{"input_ids": i, "attention_mask": m} for i, m in parts]


def translations(seed, batch=3):
    labels, mask = tokens(seed + 50, length=5, shortest=2)
    targets = zip(text(seed, batch), labels.masked_fill(mask == 0, -100).split(batch), strict=True)
    return [of_text | {"labels": part} for of_text, part in targets]


def pairs(seed, batch=3):
    return [a | b for a, b in zip(images(seed, batch=batch), text(seed, batch), strict=True)]


@dataclass(frozen=True)
class Family:
    """How a model is built, what it is fed, and where its blocks are."""

    build: Callable
    batches: Callable
    stacks: dict  # stack name -> path of its blocks
    offset: int = 0  # what is added to the weight of a norm


def family(class_name, config, path, name="blocks", batches=text, **more):
    kind = getattr(tf, class_name)
    stacks = path if isinstance(path, dict) else {name: path}
    return Family(lambda: kind(kind.config_class(**config)), batches, stacks, **more)


ended = partial(text, end=True)
T5_STACKS = {"encoder": "encoder.block", "decoder": "decoder.block"}
CLIP_STACKS = {"vision": "vision_model.encoder.layers", "text": "text_model.encoder.layers"}
BELOW = {name: f"transformer.{path}" for name, path in T5_STACKS.items()}
WHOLE_CLIP = {"text_config": CLIP_TEXT, "vision_config": WIDE, "projection_dim": 16}
GATED = T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
FAMILIES = {
    "t5": family("T5ForConditionalGeneration", T5, T5_STACKS, batches=translations),
    "t5_gated": family("T5ForConditionalGeneration", GATED, T5_STACKS, batches=translations),
    "t5_classifier": family("T5ForSequenceClassification", T5, BELOW, batches=ended),
    "t5_encoder": family("T5EncoderModel", T5, "encoder.block", "encoder"),
    "t5_tagger": family("T5ForTokenClassification", T5, BELOW["encoder"], "encoder"),
    "clip": family("CLIPModel", WHOLE_CLIP, CLIP_STACKS, batches=pairs),
    "clip_text": family("CLIPTextModel", CLIP_TEXT, "encoder.layers", "text"),
    "llama": family("LlamaForCausalLM", GROUPED, "model.layers", "decoder"),
    "bert": family("BertModel", TEXT, "encoder.layer"),
    "roberta": family("RobertaModel", TEXT | {"max_position_embeddings": 16}, "encoder.layer"),
    "gpt2": family("GPT2LMHeadModel", GPT2, "transformer.h"),
    "gpt2_answers": family("GPT2ForQuestionAnswering", GPT2, "transformer.h"),  # makes a cache
    "qwen2": family("Qwen2ForCausalLM", GROUPED, "model.layers"),
    "qwen3": family("Qwen3ForCausalLM", GROUPED, "model.layers"),
    "mistral": family("MistralModel", GROUPED, "layers"),
    "gemma": family("GemmaModel", GROUPED, "layers", offset=1),
    "gemma2": family("Gemma2ForCausalLM", MIXED | SLIDING, "model.layers", offset=1),
    "gemma3": family("Gemma3ForCausalLM", MIXED | SLIDING, "model.layers", offset=1),
    "opt": family("OPTForCausalLM", OPT, "model.decoder.layers"),
    "vit": family("ViTModel", WIDE, "layers", "vision", images),
    "dinov2": family("Dinov2Model", VISION | {"mlp_ratio": 2}, "encoder.layer", "vision", images),
    "siglip": family("SiglipVisionModel", WIDE, "encoder.layers", batches=images),
}
# Of each way through the code one: a stack that feeds another, two towers, norms behind the sum,
# turned linears, grouped heads without biases, and layers of several kinds.
KINDS = ("t5", "clip", "bert", "gpt2", "llama", "gemma3")


def exact_rms(module, x):
    """An RMSNorm wholly in the precision of its input; transformers' own pass through float32."""
    eps = getattr(module, "variance_epsilon", None) or module.eps
    scale = module.weight + 1 if type(module).__name__.startswith("Gemma") else module.weight
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * scale


def without_float32(monkeypatch, model):
    """Lets every RMSNorm of the model's kind compute in float64, so that 1e-9 can be asked for."""
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "T5LayerNorm")):
            monkeypatch.setattr(type(module), "forward", exact_rms)


def experiment(family, dtype=torch.float64, experts=("a", "b"), **batching):
    """Arguments of `featcal.calibrate`: base, experts, their average and batches."""
    batches = {task: family.batches(100 + 10 * i, **batching) for i, task in enumerate(experts)}
    for batch in (batch for own in batches.values() for batch in own):
        batch |= {k: v.to(dtype) for k, v in batch.items() if v.is_floating_point()}
    given = tiny.experiment(tasks=experts, build=partial(make, family.build), dtype=dtype)
    return given | {"batches": batches}
