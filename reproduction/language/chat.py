"""Score a language model's answers to instructions, and its log-likelihood of plain texts."""

import copy
from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

import torch

from reproduction.language.generation import generate_texts, padded

BATCH = 16
ANSWER = 2  # tokens: one word and the end of the message


@torch.no_grad()
def right_answers(
    model: Any, tokenizer: Any, rows: Sequence[tuple[str, str]], words: Sequence[str]
) -> tuple[list[bool], list[bool]]:
    """Return which answers are right by likelihood over `words`, and which by greedy exact match.

    rows: prompts with a word and the end of the message. One pass decides both: an answer is greedy
    if each of its tokens is the likeliest. What all prompts begin with is read once.
    """
    ids = [tokenizer(prompt + answer)["input_ids"] for prompt, answer in rows]
    choices = torch.tensor([tokenizer(word)["input_ids"][0] for word in words])
    shared = commonprefix([row[: -ANSWER - 1] for row in ids])
    begun = None
    if shared:
        begun = model.base_model(torch.tensor([shared], device=model.device)).past_key_values
    likely, exact = [False] * len(ids), [False] * len(ids)
    order = sorted(range(len(ids)), key=lambda row: len(ids[row]))
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        own = [ids[row][len(shared) :] for row in chosen]
        past = copy.deepcopy(begun)
        if past is not None:
            past.batch_repeat_interleave(len(own))
        # causal: padding on the right changes nothing before it, so that no mask is needed
        tokens = padded(own, 0, left=False)["input_ids"].to(model.device)
        hidden = model.base_model(tokens, past_key_values=past).last_hidden_state
        last = torch.tensor([len(row) for row in own])
        before = torch.stack([last - 3, last - 2], dim=1)  # predict the word and the end
        rows_before = hidden[torch.arange(len(own))[:, None], before]
        scores = model.get_output_embeddings()(rows_before).cpu()
        best = choices[scores[:, 0, choices].argmax(1)]
        greedy = scores.argmax(2)
        for place, row in enumerate(chosen):
            likely[row] = int(best[place]) == ids[row][-2]
            exact[row] = greedy[place].tolist() == ids[row][-2:]
    return likely, exact


@torch.no_grad()
def log_likelihood(model: Any, tokenizer: Any, texts: Sequence[str]) -> float:
    """Return the mean log-likelihood, in nats, of all tokens but the first of every text."""
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor(tokenizer(text)["input_ids"])
        if len(ids) < 2:
            continue
        known = model(ids[None, :-1].to(model.device)).logits[0].double().log_softmax(-1).cpu()
        total += float(known.gather(1, ids[1:, None]).sum())
        count += len(ids) - 1
    return total / max(count, 1)


def answer(model: Any, tokenizer: Any, question: str, new_tokens: int) -> str:
    """Return the greedy answer to a user's question, put by the tokenizer's chat template."""
    message = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return generate_texts(model, tokenizer, [prompt], 1, new_tokens)[0]
