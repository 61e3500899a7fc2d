"""Pico language models with a byte-level tokenizer, and text files to calibrate them on."""

import json
from functools import partial
from pathlib import Path

import torch
import transformers as tf
from families import CLIP_TEXT, GROUPED, T5
from tiny import TEXT, make
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from featcal.models.load import save_model

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ("<pad>", "</s>", "<s>")
VOCABULARY = len(SPECIAL) + len(BYTES)
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
POSITIONS = {"max_position_embeddings": 64}
WORDS = ("the cat sat", "a dog", "on", "ships sail far away", "red", "the end of it", "no")
WORDS += ("one more line", "two more")
CONFIGS = {
    "llama": ("LlamaForCausalLM", GROUPED | POSITIONS),
    "bert": ("BertModel", TEXT | POSITIONS),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5_bare": ("T5Model", T5),
    "t5_encoder": ("T5EncoderModel", T5),
    "clip_text": ("CLIPTextModel", CLIP_TEXT),
    "roberta": ("RobertaModel", TEXT | {"max_position_embeddings": 40}),
}


def model(kind: str) -> tf.PreTrainedModel:
    name, sizes = CONFIGS[kind]
    return getattr(tf, name)(getattr(tf, name).config_class(**sizes | {"vocab_size": VOCABULARY}))


MODELS = {kind: partial(model, kind) for kind in CONFIGS}


def tokenizer(
    pad: str | None = "<pad>", template: str | None = TEMPLATE
) -> tf.PreTrainedTokenizerFast:
    """Every byte is a token; a text ends with </s>."""
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate((*SPECIAL, *BYTES))}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    ends, how = [("</s>", 1)], {"eos_token": "</s>", "bos_token": "<s>"}
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=ends)
    made = tf.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=pad, **how)
    made.chat_template = template
    return made


def folder(path: Path, kind: str, seed: int = 0, **how) -> Path:
    save_model(make(MODELS[kind], seed, torch.float32), path)
    tokenizer(**how).save_pretrained(path)
    return path


def jsonl(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def begun_tokenizer() -> tf.PreTrainedTokenizerFast:
    """As Llama's: a text begins with <s> and does not end."""
    made = tokenizer()
    begun = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    made.backend_tokenizer.post_processor = begun
    return made
