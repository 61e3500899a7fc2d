"""Pre-train the two T5 bases on all eight synthetic tasks together, with the web split's answers.

Every step has rows of its own, which are seen once. No split of the tasks themselves is read.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, processors
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from featcal.data.batches import collate
from featcal.data.texts import Reader, input_of
from reproduction.mini import training
from reproduction.mini.language.domains import WEB, draw_rows, draw_samples
from reproduction.mini.language.worlds import WORLDS
from reproduction.prepare.tasks import GLUE, prompted

BLOCKS = ("encoder.block", "decoder.block")
SPECIAL = ("<pad>", "</s>", "<unk>")  # with T5's ids
IDS: dict[str, int] = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
LARGEST = 1400  # so that every word of the drawn texts is one token
ROWS = 400  # per task; further ones add no new word
LONGEST = 512  # of FLAN-T5
PIECES = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"


@dataclass(frozen=True)
class T5Recipe:
    """All settings that a base's bytes depend on.

    layers: of encoder and decoder each.   inner: width of the gated part.   rows: a task and step.
    """

    width: int
    layers: int
    heads: int
    head_width: int
    inner: int
    steps: int
    seed: int = 0
    rows: int = 6
    every: int = 250  # steps between two state files


class T5Pretraining(training.Pretraining):
    """A base in training. Loss: teacher-forced cross-entropy of the answers."""

    recipes = {
        "flan_t5_base": T5Recipe(128, layers=3, heads=4, head_width=24, inner=192, steps=2000),
        "flan_t5_large": T5Recipe(144, layers=4, heads=4, head_width=24, inner=192, steps=1600),
    }

    def __init__(self, recipe: T5Recipe):
        tokenizer = make_tokenizer(recipe.seed)
        super().__init__(recipe, new_model(recipe, len(tokenizer)), BLOCKS)
        longest = tokenizer.model_max_length
        self.reader = Reader(tokenizer, input_of(self.model), longest, Path(training.STATE))

    def step(self) -> float:
        rows, seed = self.recipe.rows, self.recipe.seed
        first, tokens = self.done * rows, []
        for key in WORLDS:
            samples = draw_samples(key, WEB, rows, seed, first)
            tokens += [self.reader.tokens(sample) for sample in samples]
        loss = self.model(**collate(tokens, self.reader.pad, self.reader.inputs)).loss
        loss.backward()
        return float(loss.detach())

    def write(self, role: str, out: Path) -> None:
        card = training.CARDS["t5"].format(role=role, **vars(self.recipe))
        # a new tokenizer: the one in use keeps its last padding
        tokenizer = make_tokenizer(self.recipe.seed)
        training.write_base(self.model, out, card, tokenizer, GenerationConfig(**IDS))


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Return byte-level BPE trained on prompts and answers of the web split; </s> ends every text.

    Words, numbers and punctuation are never merged with each other. The unchanging parts of the
    eight prompts are tokens of their own, which more than halves every sequence.
    """
    inner = training.byte_level_bpe(_texts(seed), Regex(PIECES), LARGEST, SPECIAL)
    inner.add_tokens([AddedToken(part, normalized=False) for part in prompt_parts()])
    inner.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    pad, end, unknown = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=pad, eos_token=end, unk_token=unknown,
        model_max_length=LONGEST, padding_side="right",
    )  # fmt: skip


def prompt_parts() -> list[str]:
    """Return the texts before, between and after the columns in any of the prompts."""
    return sorted({part for task in GLUE.values() for part in re.split(r"\{\w+\}", task.prompt)})


def _texts(seed: int) -> Iterable[str]:
    for key in WORLDS:
        for row in draw_rows(key, WEB, ROWS, seed):
            yield from (row[name] for name in GLUE[key].columns)
            yield prompted(key, row)[1]


def new_model(recipe: T5Recipe, vocabulary: int) -> T5ForConditionalGeneration:
    """Return a T5 like FLAN-T5, without dropout, with drawn first weights spread as T5's."""
    # transformers 5 ties every new T5; `tie_word_embeddings=False` only keeps it from scaling
    special_ids: dict[str, Any] = {"tie_word_embeddings": False, **IDS}
    config = T5Config(
        vocab_size=vocabulary, d_model=recipe.width, d_kv=recipe.head_width, d_ff=recipe.inner,
        num_heads=recipe.heads, num_layers=recipe.layers, num_decoder_layers=recipe.layers,
        relative_attention_num_buckets=32, relative_attention_max_distance=64,
        feed_forward_proj="gated-gelu", dropout_rate=0.0, **special_ids,
    )  # fmt: skip

    def first_value(name: str, parameter: Tensor, generator: np.random.Generator) -> Tensor:
        if parameter.ndim == 1:
            return torch.ones_like(parameter)
        noise = torch.from_numpy(generator.standard_normal(tuple(parameter.shape))).float()
        if name == "shared.weight":
            return noise
        inputs = {  # of q, with attention's missing division by √(width of a head)
            "q": recipe.width * recipe.head_width, "wo": recipe.inner,
            "o": recipe.heads * recipe.head_width,
        }  # fmt: skip
        return noise * inputs.get(name.split(".")[-2], recipe.width) ** -0.5

    return training.with_first_weights(T5ForConditionalGeneration, config, recipe.seed, first_value)
