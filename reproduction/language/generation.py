"""Score language models: the eight GLUE tasks by generated answers as the paper does, and chats.

An answer does not depend on its batch but for rounding: padding is masked, on the left where the
model continues its prompt, on the right where an encoder reads it. The paper's protocol for GLUE:
batches of 32, prompts of at most 512 tokens, at most 10 decoder tokens with the start token.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from os.path import commonprefix
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from featcal.data import batches
from featcal.errors import BadData
from featcal.models.load import quiet_transformers

# changes a model while it answers, given the model and the task: adapters before its head
Change = Callable[[nn.Module, str], AbstractContextManager[None]]
BATCH, MAX_NEW_TOKENS, MAX_PROMPT = 32, 9, 512
CORRELATED = "stsb"
CHATS = 16  # chats at once


@torch.no_grad()
def generate_texts(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    batch: int,
    max_new_tokens: int,
    max_prompt: int | None = None,
) -> list[str]:
    """Return the greedy answer to each prompt, without special tokens.

    batch: prompts at once, sorted by length.   max_new_tokens: of an answer, end token included.
    max_prompt: longer prompts are cut at the end; None cuts nothing.
    """
    limits = {"truncation": True, "max_length": max_prompt} if max_prompt else {}
    encoded = [tokenizer(prompt, **limits)["input_ids"] for prompt in prompts]
    pad = tokenizer.pad_token_id
    pad = tokenizer.eos_token_id if pad is None else pad  # masked, whatever it is
    encoder = bool(model.config.is_encoder_decoder)  # type: ignore[union-attr]
    answers = [""] * len(prompts)
    # longest first: a prompt that is too long for memory fails at once
    order = sorted(range(len(encoded)), key=lambda row: -len(encoded[row]))
    for start in range(0, len(encoded), batch):
        rows = order[start : start + batch]
        inputs = padded([encoded[row] for row in rows], pad, left=not encoder)
        inputs = {name: value.to(model.device) for name, value in inputs.items()}
        with quiet_transformers():  # it warns of the checkpoint's lengths, which this replaces
            new = model.generate(  # type: ignore[operator]
                **inputs, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1,
                pad_token_id=pad,
            )  # fmt: skip
        new = new if encoder else new[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(new, skip_special_tokens=True)
        for row, text in zip(rows, texts, strict=True):
            answers[row] = text
    return answers


def padded(rows: Sequence[Sequence[int]], pad: int, left: bool) -> dict[str, Tensor]:
    """Return token ids and their mask, both (n, longest), filled on the left or on the right."""
    ids, mask = batches.padded([list(row)[::-1] if left else list(row) for row in rows], pad)
    tensors = {"input_ids": ids, "attention_mask": mask}
    return {name: value.flip(1) for name, value in tensors.items()} if left else tensors


def score_glue(
    model: nn.Module,
    tokenizer: Any,
    task: str,
    samples: Sequence[tuple[str, str]],
    batch: int = BATCH,
    change: Change | None = None,
) -> tuple[float, int, list[bool] | None]:
    """Return score in percent, number of samples, and which answers are right to the character.

    samples: prompts and targets. The score of stsb is 100 times Spearman's correlation, and no
    sample is right or wrong: None.   Raises: BadData.
    """
    if not samples:
        raise BadData(task, "no sample to score", "check the split that is evaluated")
    prompts, targets = [prompt for prompt, _ in samples], [target for _, target in samples]
    with change(model, task) if change else nullcontext():
        answers = generate_texts(model, tokenizer, prompts, batch, MAX_NEW_TOKENS, MAX_PROMPT)
    if task == CORRELATED:
        values = ([number(text) for text in side] for side in (answers, targets))
        return 100 * spearman(*values), len(samples), None
    right = [a == b for a, b in zip(answers, targets, strict=True)]
    return 100 * sum(right) / len(targets), len(samples), right


def metric_of(task: str) -> str:
    return "spearman" if task == CORRELATED else "accuracy"


def number(text: str) -> float:
    """Return a text as a number; 0.0, as in the paper's code, for one that is no finite number."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if np.isfinite(value) else 0.0


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's correlation, or 0.0 where one side is constant and scipy returns nan."""
    from scipy.stats import spearmanr

    constant = len(set(a)) == 1 or len(set(b)) == 1
    return 0.0 if constant else float(spearmanr(a, b).statistic)


@torch.no_grad()
def right_answers(
    model: Any, tokenizer: Any, rows: Sequence[tuple[str, str]], options: Sequence[str]
) -> tuple[list[bool], list[bool]]:
    """Return which answers are right by likelihood over `options`, and which by greedy exact match.

    rows: prompts with a word and the end of the message. One pass decides both: an answer is greedy
    if each of its tokens is the likeliest. The prefix of all prompts is read once.
    """
    ids = [tokenizer(prompt + answer)["input_ids"] for prompt, answer in rows]
    choices = torch.tensor([tokenizer(word)["input_ids"][0] for word in options])
    # an answer is two tokens, the word and the end of the message; the one before predicts the word
    shared = commonprefix([row[:-3] for row in ids])
    prefix = None
    if shared:
        prefix = model.base_model(torch.tensor([shared], device=model.device)).past_key_values
    likely, exact = [False] * len(ids), [False] * len(ids)
    order = sorted(range(len(ids)), key=lambda row: len(ids[row]))
    for start in range(0, len(order), CHATS):
        batch = order[start : start + CHATS]
        suffixes = [ids[row][len(shared) :] for row in batch]
        cache = copy.deepcopy(prefix)
        if cache is not None:
            cache.batch_repeat_interleave(len(suffixes))
        # causal: padding on the right changes nothing before it, so that no mask is needed
        tokens = padded(suffixes, 0, left=False)["input_ids"].to(model.device)
        hidden = model.base_model(tokens, past_key_values=cache).last_hidden_state
        last = torch.tensor([len(row) for row in suffixes])
        before = torch.stack([last - 3, last - 2], dim=1)  # predict the word and the end
        rows_before = hidden[torch.arange(len(suffixes))[:, None], before]
        scores = model.get_output_embeddings()(rows_before).cpu()
        best = choices[scores[:, 0, choices].argmax(1)]
        greedy = scores.argmax(2)
        for number, row in enumerate(batch):
            likely[row] = int(best[number]) == ids[row][-2]
            exact[row] = greedy[number].tolist() == ids[row][-2:]
    return likely, exact


@torch.no_grad()
def log_likelihood(model: Any, tokenizer: Any, texts: Sequence[str]) -> float:
    """Return the mean log-likelihood, in nats, of all tokens but the first of every text."""
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor(tokenizer(text)["input_ids"])
        if len(ids) < 2:
            continue
        log_p = model(ids[None, :-1].to(model.device)).logits[0].double().log_softmax(-1).cpu()
        total += float(log_p.gather(1, ids[1:, None]).sum())
        count += len(ids) - 1
    return total / max(count, 1)


def answer(model: Any, tokenizer: Any, question: str, new_tokens: int) -> str:
    """Return the greedy answer to a user's question, put by the tokenizer's chat template."""
    message = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return generate_texts(model, tokenizer, [prompt], 1, new_tokens)[0]
