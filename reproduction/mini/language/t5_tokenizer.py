"""The tokenizer of the small T5 models: byte-level pairs merged on the drawn prompts, so that no
text is unknown.

Words, numbers and punctuation are never merged with each other. The unchanging parts of the eight
prompts are tokens of their
own, as the marks of a chat are: that more than halves every sequence. Ids of padding, end and
unknown are those of T5.
"""

import re
from collections.abc import Iterable

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from reproduction.mini.language.glue_rows import WEB, WORLDS, draw_rows
from reproduction.prepare.text_tasks import GLUE, prompted

SPECIAL = ("<pad>", "</s>", "<unk>")
LARGEST = 1400  # so that every word of the drawn texts is one token
ROWS = 400  # per task; after so many no new word comes
LONGEST = 512  # of FLAN-T5
PIECES = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """The tokenizer trained on prompts and answers of the web split; </s> ends every text."""
    inner = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(PIECES), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True) for token in SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=LARGEST,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(_texts(seed), trainer)
    inner.add_tokens([AddedToken(part, normalized=False) for part in prompt_parts()])
    inner.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    pad, end, unknown = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=pad,
        eos_token=end,
        unk_token=unknown,
        model_max_length=LONGEST,
        padding_side="right",
    )


def prompt_parts() -> list[str]:
    """What stands before, between and behind the texts in any of the prompts."""
    return sorted({part for task in GLUE.values() for part in re.split(r"\{\w+\}", task.prompt)})


def _texts(seed: int) -> Iterable[str]:
    for key in WORLDS:
        for row in draw_rows(key, WEB, ROWS, seed):
            yield from (row[name] for name in GLUE[key].columns)
            yield prompted(key, row)[1]
