"""Captions of the twenty tasks, and a word-level tokenizer that knows every word in them.

The tokenizer is an ordinary Hugging Face one, saved beside the model: nothing of this file is
needed to use it.
"""

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from reproduction.mini.tasks import TASKS

PAD, UNK, BOS, EOS = "<pad>", "<unk>", "<bos>", "<eos>"
SPECIALS = (
    PAD,
    UNK,
    BOS,
    EOS,
)  # in this order: the end must not be id 2, which CLIP takes for its legacy pooling
LONGEST = 16  # tokens; the longest caption has 10
TEMPLATES = 3


def captions(template: int) -> list[str]:
    """One caption per class of every task, task by task, in the given one of the three
    templates.
    """
    return [
        task.templates[template].format(name) for task in TASKS.values() for name in task.classes
    ]


def first_caption() -> dict[str, int]:
    """The place of each task's class 0 in `captions`."""
    places, place = {}, 0
    for key, task in TASKS.items():
        places[key] = place
        place += len(task.classes)
    return places


def vocabulary() -> dict[str, int]:
    """Special tokens, then every word of every caption in order of first occurrence."""
    words = dict.fromkeys(
        word
        for template in range(TEMPLATES)
        for text in captions(template)
        for word in text.split()
    )
    return {word: number for number, word in enumerate((*SPECIALS, *words))}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Lower case, split at white space, one id per word, <bos> ... <eos> around."""
    known = vocabulary()
    backend = Tokenizer(models.WordLevel(known, unk_token=UNK))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=[(BOS, known[BOS]), (EOS, known[EOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=UNK,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=LONGEST,
        model_input_names=["input_ids", "attention_mask"],
    )


def caption_tokens(tokenizer: PreTrainedTokenizerFast, template: int) -> dict[str, Tensor]:
    """All captions of a template: input_ids and attention_mask, padded to the longest."""
    return dict(tokenizer(captions(template), padding=True, return_tensors="pt"))
