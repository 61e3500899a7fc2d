"""Greedy generation in batches: texts in, texts out, in the order given.

The answer to a text does not depend on its batch (but for rounding): padding is masked, on the left
where the model continues its prompt, on the right where an encoder reads it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from featcal.models.load import quiet_transformers

# what is done to a model while it answers, given it and the task: adapters before its head
# (adapters.before_head)
Change = Callable[[nn.Module, str], AbstractContextManager[None]]


@torch.no_grad()
def generate_texts(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    batch: int,
    max_new_tokens: int,
    max_prompt: int | None = None,
) -> list[str]:
    """What the model says to each prompt, special tokens left out; the most likely token at every
    step.

    batch:          prompts at once; sorted by length first, so that little is padded.
    max_new_tokens: of an answer, its end token included.
    max_prompt:     longer prompts are cut at the end (512 for FLAN-T5); None cuts nothing.
    """
    kept = {"truncation": True, "max_length": max_prompt} if max_prompt else {}
    encoded = [tokenizer(prompt, **kept)["input_ids"] for prompt in prompts]
    pad = (
        tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    )  # masked, whatever it is
    answers = [""] * len(prompts)
    longest_first = sorted(
        range(len(encoded)), key=lambda row: -len(encoded[row])
    )  # what is too long for memory fails at once
    for start in range(0, len(encoded), batch):
        rows = longest_first[start : start + batch]
        inputs = padded([encoded[row] for row in rows], pad, left=not reads_first(model))
        new = _continued(model, inputs, max_new_tokens, pad)
        for row, text in zip(
            rows, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True
        ):
            answers[row] = text
    return answers


def reads_first(model: Any) -> bool:
    """Whether an encoder reads the prompt and a decoder begins anew."""
    return bool(model.config.is_encoder_decoder)


def padded(rows: Sequence[Sequence[int]], pad: int, left: bool) -> dict[str, Tensor]:
    """Token ids and their mask, both (n, longest)."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), pad)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        place = slice(longest - len(row), None) if left else slice(len(row))
        ids[number, place], mask[number, place] = torch.tensor(row, dtype=ids.dtype), 1
    return {"input_ids": ids, "attention_mask": mask}


def _continued(model: Any, inputs: dict[str, Tensor], max_new_tokens: int, pad: int) -> Tensor:
    """Token ids of the answers alone, (n, new tokens)."""
    here = {name: value.to(model.device) for name, value in inputs.items()}
    with (
        quiet_transformers()
    ):  # transformers warns of generation lengths that a checkpoint sets and this call replaces
        out = model.generate(
            **here, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1, pad_token_id=pad
        )
    return out if reads_first(model) else out[:, here["input_ids"].shape[1] :]
