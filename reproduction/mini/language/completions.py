"""Prompts with their completions as batches for a causal model: the loss counts the completion's
tokens only.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from featcal.data import batches
from featcal.data.batches import IGNORED

# a batch goes through the model in two parts, short and long texts, so that there is less padding
HALVES = 2


def encoded(
    tokenizer: PreTrainedTokenizerFast, rows: Sequence[tuple[str, str]]
) -> list[tuple[list[int], int]]:
    """Token ids of prompt and completion as one text, and how many of them belong to the prompt."""
    whole = tokenizer([prompt + completion for prompt, completion in rows])["input_ids"]
    prompts = tokenizer([prompt for prompt, _ in rows])["input_ids"]
    return [(ids, len(prompt)) for ids, prompt in zip(whole, prompts, strict=True)]


def padded(texts: Sequence[tuple[list[int], int]], pad: int) -> dict[str, Tensor]:
    """One batch, padded on the right, with labels that leave out prompts and padding."""
    ids, mask = batches.padded([text for text, _ in texts], pad)
    begins = torch.tensor([begin for _, begin in texts])[:, None]
    labels = ids.masked_fill((torch.arange(ids.shape[1]) < begins) | (mask == 0), IGNORED)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def backward(model: LlamaForCausalLM, texts: Sequence[tuple[list[int], int]], pad: int) -> float:
    """Gradients of the cross-entropy per completion token, where a text of n such tokens counts √n.
    Returns: the loss.

    With weight n a letter would be lost beside a program; with equal weights the steps of a
    calculation are learnt late.
    """
    ordered = sorted(texts, key=lambda text: len(text[0]))
    total = sum((len(ids) - begin) ** 0.5 for ids, begin in ordered)
    half, loss = -(-len(ordered) // HALVES), 0.0
    for first in range(0, len(ordered), half):
        batch = padded(ordered[first : first + half], pad)
        hidden = model.model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).last_hidden_state
        labels = batch["labels"][:, 1:]
        wanted = labels != IGNORED
        share = (wanted / wanted.sum(1, keepdim=True) ** 0.5)[wanted] / total
        part = (
            share
            * F.cross_entropy(
                model.lm_head(hidden[:, :-1][wanted]), labels[wanted], reduction="none"
            )
        ).sum()
        part.backward()
        loss += part.item()
    return loss
