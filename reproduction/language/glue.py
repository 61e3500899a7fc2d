"""Scores of the eight GLUE tasks as the paper counts them, from generated text: exact answers, and
rank correlation for stsb.

The paper's protocol: greedy, batches of 32, prompts of at most 512 tokens, at most 10 decoder
tokens, the start token among them.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from torch import nn

from featcal.errors import BadData
from reproduction.language.generation import Change, generate_texts

BATCH = 32
MAX_NEW_TOKENS = 9
MAX_PROMPT = 512
CORRELATED = "stsb"


def score_glue(
    model: nn.Module,
    tokenizer: Any,
    task: str,
    samples: Sequence[tuple[str, str]],
    batch: int = BATCH,
    max_new_tokens: int = MAX_NEW_TOKENS,
    change: Change | None = None,
) -> tuple[float, int, list[bool] | None]:
    """Score in percent, number of samples, and of each whether it is right: exact answers, or for
    stsb Spearman's correlation.

    samples: prompt and wanted answer.   change: what is done to the model while it answers, given
    model and task.
    Returns: for a correlation no sample is right or wrong: None.
    Raises:  BadData without samples.
    """
    if not samples:
        raise BadData(task, "no sample to score", "check the split that is evaluated")
    with change(model, task) if change else nullcontext():
        answers = generate_texts(
            model, tokenizer, [prompt for prompt, _ in samples], batch, max_new_tokens, MAX_PROMPT
        )
    targets = [target for _, target in samples]
    right = None if task == CORRELATED else exact(answers, targets)
    return score_answers(task, answers, targets), len(samples), right


def score_answers(task: str, answers: Sequence[str], targets: Sequence[str]) -> float:
    """Percent of answers that equal their target to the character; for stsb 100 times Spearman's
    correlation.
    """
    if task == CORRELATED:
        return 100 * spearman(
            [number(text) for text in answers], [number(text) for text in targets]
        )
    return 100 * sum(exact(answers, targets)) / len(targets)


def exact(answers: Sequence[str], targets: Sequence[str]) -> list[bool]:
    """Which answers equal their target to the character."""
    return [a == b for a, b in zip(answers, targets, strict=True)]


def metric_of(task: str) -> str:
    """What the results call a task's score."""
    return "spearman" if task == CORRELATED else "accuracy"


def number(text: str) -> float:
    """A text as a number; 0.0, as in the paper's code, for one that is none (and for nan and
    infinity, which have no rank).
    """
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if np.isfinite(value) else 0.0


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's ρ: Pearson's correlation of ranks, equal values sharing their mean rank.

    0.0 where one side is constant: such answers tell nothing. (scipy gives nan there, which would
    make every average nan.)
    """
    x, y = (
        ranks(side) - (len(side) + 1) / 2 for side in (a, b)
    )  # centred: ranks 1…n have the mean (n + 1) / 2
    length = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / length) if length else 0.0


def ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks from 1, equal values sharing the mean of theirs."""
    _, place, count = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]
