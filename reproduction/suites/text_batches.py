"""Texts of one task as the batches that a language model is calibrated on, or its adapters are
trained on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from featcal.data.batches import IGNORED, Batch, draw_indices, token_batches
from featcal.data.texts import Reader, Sample, input_of, reader_for
from featcal.models.families import plan_for
from featcal.models.load import skeleton
from featcal.models.plan import BlockPlan
from reproduction.experiments.runs import Reading
from reproduction.suites.fine_tune_text import lesson_batch, tokenized_example
from reproduction.suites.texts import load_texts

COUNTED = "labels"  # the keyword of a batch that tells which tokens count: those with a label


def text_batches(
    base: Path, texts: Path, task: str, samples: int, seed: int, size: int, reading: Reading
) -> list[Batch]:
    """Drawn texts of one task, read as `reading` says, in batches of `size`; all of the split where
    it has fewer samples.

    base: the folder of the model's base, whose tokenizer reads them.
    Raises: whatever opening the texts raises; BadData for a text that is cut before its answer.
    """
    takes = input_of(skeleton(base)[0])
    reader = reader_for([base], takes, reading.tokens)
    prompts = load_texts(texts, task, reading.split)
    chosen = draw_indices(task, len(prompts), min(samples, len(prompts)), seed).tolist()
    whole = float(
        "inf"
        # batches of `size` whatever is padded: others would move the last bits of the suite's numbers
    )
    if takes.kind == "pair":
        batches = list(token_batches(prompts, chosen, reader, size, whole))
        return (
            [_started(batch, takes.start or 0) for batch in batches]
            if reading.decoder == "start"
            else batches
        )
    if reading.counted == "all":
        return list(token_batches(prompts, chosen, reader, size, whole))
    return list(_counted([prompts[index] for index in chosen], reader, size, reading.counted))


def plan_of_reading(base: Path, reading: Reading) -> BlockPlan | None:
    """The plan whose sums count the tokens that `reading` says; None for the model's own."""
    if reading.counted == "all":
        return None
    plan = plan_for(skeleton(base)[0])
    return BlockPlan(
        *(replace(stack, mask=COUNTED) for stack in plan.stacks), token_rule=plan.token_rule
    )


def _started(batch: Batch, start: int) -> Batch:
    """The batch with a decoder that reads its start token and nothing else."""
    given: dict[str, Any] = {name: value for name, value in batch.items() if name != COUNTED}
    count = len(given["input_ids"])
    ones = torch.ones(count, 1, dtype=torch.long)
    return given | {"decoder_input_ids": ones * start, "decoder_attention_mask": ones}


def _counted(samples: Sequence[Sample], reader: Reader, size: int, counted: str) -> Iterator[Batch]:
    """Prompts and answers as one text, with labels where tokens count. Longest first, so that there
    is little to pad.
    """
    lessons = sorted(
        (tokenized_example(sample, reader) for sample in samples),
        key=lambda lesson: -len(lesson.ids),
    )
    for begin in range(0, len(lessons), size):
        batch = lesson_batch(lessons[begin : begin + size], reader.pad)
        if counted == "prompt":
            unread = (batch["attention_mask"] == 0) | (batch["labels"] != IGNORED)
            batch["labels"] = batch["input_ids"].masked_fill(unread, IGNORED)
        yield batch
