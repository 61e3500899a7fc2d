"""Text samples as batches of token ids for a model's forward: tokenised, cut to a length, padded on
the right.

A causal model reads a prompt and its completion as one text, an encoder the prompt alone; a model
with a decoder needs both. Samples of like length share a batch, so that there is little to pad.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from featcal.data.batches import Batch, Batches
from featcal.data.inputs import Input
from featcal.data.text import Sample, Samples
from featcal.errors import BadData, BadFile, BadSetting
from featcal.models.load import load_tokenizer

# BERT and T5 were trained on no longer ones, and what calibration keeps of a sample grows with it
USUAL = 512
VOCABULARIES = (
    "tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "spm.model", "tokenizer.model", "sentencepiece.bpe.model",
)  # fmt: skip
# computed tokens for each one that counts, at most: below, more batches take longer than padding
# does
PADDED = 1.2
IGNORED = -100  # transformers' label of a token without a target


@dataclass(frozen=True)
class Tokens:
    """Token ids of one sample, and of its target where the model has a decoder."""

    ids: list[int]
    target: list[int] | None = None

    @property
    def count(self) -> int:
        """Of both."""
        return len(self.ids) + len(self.target or ())


@dataclass(frozen=True)
class Reader:
    """A tokenizer, what the model takes, and at most how many tokens of a text it is given."""

    tokenizer: Any
    takes: Input
    length: int
    folder: Path  # where the tokenizer comes from

    @property
    def pad(self) -> int:
        """The token that pads; Llama has none and ends texts with another, which the mask hides
        just as well.
        """
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(token for token in known if token is not None)

    def tokens(self, sample: Sample) -> Tokens:
        """One sample in tokens. Raises: BadData naming it; BadFile for a tokenizer of another
        model.
        """
        if self.takes.kind == "pair":
            if sample.target is None or sample.messages is not None:
                way_out = 'give "input" and "target", or "prompt" and "completion"; the decoder reads the target'
                raise BadData(sample.place, "has no target", way_out)
            return Tokens(
                self.ids(sample, sample.text), self.ids(sample, sample.target, target=True)
            )
        if sample.messages is not None:
            return Tokens(self.ids(sample, self.rendered(sample), add_special_tokens=False))
        follows = sample.target if self.takes.continued else None
        return Tokens(self.ids(sample, sample.text + (follows or "")))

    def rendered(self, sample: Sample) -> str:
        """A chat as the one text that the tokenizer's own template makes of it. Raises: BadFile,
        BadData.
        """
        if not self.tokenizer.chat_template:
            problem = f"its tokenizer has no chat template, but {sample.place} is a chat"
            raise BadFile(
                self.folder, problem, 'put chat_template.jinja there, or give the samples as "text"'
            )
        try:
            text: str = self.tokenizer.apply_chat_template(sample.messages, tokenize=False)
        except (TemplateError, TypeError, ValueError) as error:
            raise BadData(
                sample.place,
                f"the chat template refuses it ({error})",
                "mend the roles or their order",
            ) from None
        return text

    def ids(self, sample: Sample, text: str, target: bool = False, **more: bool) -> list[int]:
        """Token ids of one text, at most `length`. Raises: BadData for a text without tokens;
        BadFile.
        """
        given = {"text_target": text} if target else {"text": text}
        found: list[int] = self.tokenizer(**given, truncation=True, max_length=self.length, **more)[
            "input_ids"
        ]
        if not found:
            raise BadData(sample.place, "holds no text", "leave it out, or fill it")
        largest, known = max(found), self.takes.vocabulary
        if known is not None and largest >= known:
            problem = f"its tokenizer gives token {largest} ({sample.place}), but the model has {known} tokens"
            raise BadFile(self.folder, problem, "give the tokenizer that belongs to this model")
        return found

    def plain_ids(self, text: str, length: int | None = None) -> list[int]:
        """Token ids of one text, cut to `length` where it is given."""
        how = {} if length is None else {"truncation": True, "max_length": min(length, self.length)}
        found: list[int] = self.tokenizer(text, **how)["input_ids"]
        return found


def reader_for(folders: Sequence[Path], takes: Input, tokens: int | None) -> Reader:
    """The tokenizer of the first folder that has one. `tokens`: at most so many of a text; None for
    the usual 512 or the model's.

    Raises: BadFile where no folder has a tokenizer; BadSetting for more tokens than the model has
    positions for.
    """
    folder = next(
        (folder for folder in folders if any((folder / name).is_file() for name in VOCABULARIES)),
        None,
    )
    if folder is None:
        problem = f"no tokenizer in this folder ({', '.join(VOCABULARIES[:3])}, ...)"
        raise BadFile(folders[0], problem, "copy the tokenizer's files of the base model there")
    tokenizer = load_tokenizer(folder)
    limit = takes.positions
    if limit is not None:
        limit = min(limit, tokenizer.model_max_length)
    if tokens is not None and limit is not None and tokens > limit:
        raise BadSetting(
            "tokens", tokens, f"must be at most {limit}, the positions that the model has"
        )
    usual = USUAL if limit is None else min(USUAL, limit)
    return Reader(tokenizer, takes, tokens or usual, folder)


def token_batches(
    samples: Samples, chosen: Sequence[int], reader: Reader, size: int, most: float = PADDED
) -> Batches:
    """The chosen samples in batches, longest first, so that a batch too large for the memory fails
    at once.

    size: samples of a batch, at most.   most: so many tokens are computed for each one that counts,
    at most.
    """
    found = [reader.tokens(samples[i]) for i in chosen]
    ordered = sorted(
        found, key=lambda tokens: (-len(tokens.ids), -len(tokens.target or ()))
    )  # stable: the draw decides on ties
    parts = cut(ordered, size, most)

    def made() -> Iterator[Batch]:
        for part in parts:
            yield batch(part, reader.pad, reader.takes)

    return Batches(len(ordered), max(max(len(t.ids), len(t.target or ())) for t in ordered), made)


def cut(ordered: Sequence[Tokens], size: int, most: float) -> list[list[Tokens]]:
    """Samples in their order, in batches of at most `size` that compute at most so many tokens for
    each one that counts.
    """
    parts: list[list[Tokens]] = []
    for each in ordered:
        together = [*parts[-1], each] if parts else []
        longest = max((len(t.ids) for t in together), default=0) + max(
            (len(t.target or ()) for t in together), default=0
        )
        if 0 < len(together) <= size and len(together) * longest <= most * sum(
            t.count for t in together
        ):
            parts[-1] = together
        else:
            parts.append([each])
    return parts


def batch(tokens: Sequence[Tokens], pad: int, takes: Input) -> Batch:
    """Samples in one batch: (samples, longest) ids and masks; labels are -100 at padding."""
    ids, mask = padded([t.ids for t in tokens], pad)
    made = {"input_ids": ids, "attention_mask": mask}
    if takes.kind != "pair":
        return made
    targets = [t.target or [] for t in tokens]
    if takes.labels:
        labels, known = padded(targets, pad)
        return made | {"labels": labels.masked_fill(known == 0, IGNORED)}
    shifted, known = padded([[takes.start or 0, *target[:-1]] for target in targets], pad)
    return made | {"decoder_input_ids": shifted, "decoder_attention_mask": known}


def padded(rows: Sequence[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Rows of token ids as one (rows, longest) tensor, filled on the right, and its mask: 1 at
    tokens, 0 at padding.
    """
    longest = max(len(row) for row in rows)
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids, mask
