"""Fine-tuning an expert of a sentence encoder from the base; the heads, embeddings of class names,
stay as they are.

Knows neither files nor where the texts come from.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from featcal.evaluation.zero_shot import unit_length
from featcal.models.batch import token_mean
from reproduction.data.sentences import SentenceSet
from reproduction.suites.descent import descend
from reproduction.suites.sentence_recipe import FineTuneSentences

WINDOW = 8  # batches that are drawn together and cut by length


def fine_tune_sentences(
    encoder: nn.Module,
    head: Tensor,
    texts: SentenceSet,
    settings: FineTuneSentences,
    task: str,
    seed: int,
) -> nn.Module:
    """An expert of `task`: a fine-tuned copy of `encoder` in float32, ready for evaluation.

    Minimises the cross-entropy of head · f / |f| / temperature, f the mean over the tokens of a
    text.

    head: (K, h), rows of unit length.   texts: the training rows.
    Batches and dropout are keyed by (task, seed), so an expert does not depend on which others are
    made.
    Raises: Diverged with task and step when the loss is not finite.
    """

    def lesson(step: int) -> TrainingTexts:
        chosen = similar_lengths(task, len(texts), settings.batch, step, seed)
        return TrainingTexts(
            task, texts.batch(chosen), torch.from_numpy(texts.labels[chosen]), head
        )

    return trained(encoder, lesson, settings, f"{task} {seed}")


@dataclass(frozen=True)
class TrainingTexts:
    """What one step is trained on."""

    task: str
    batch: dict[str, Tensor]  # input_ids and attention_mask, (batch, tokens)
    labels: Tensor  # (batch,)
    head: Tensor  # (K, h), rows of unit length


def trained(
    encoder: nn.Module,
    lesson: Callable[[int], TrainingTexts],
    settings: FineTuneSentences,
    drawn: str,
) -> nn.Module:
    """A copy of `encoder` after settings.steps steps, ready for evaluation; lesson(step) is what a
    step is trained on.

    drawn: keys dropout.   Raises: Diverged with task and step when the loss is not finite.
    """
    learner = copy.deepcopy(encoder).float().train()
    for name, parameter in learner.named_parameters():
        parameter.requires_grad_(not name.startswith(settings.frozen))
    learning = [parameter for parameter in learner.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(learning, lr=settings.lr, weight_decay=settings.decay)
    place = learning[0].device
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        torch.manual_seed(crc32(drawn.encode()))  # dropout
        for step in range(settings.steps):
            now = lesson(step)
            batch = {name: value.to(place) for name, value in now.batch.items()}
            features = unit_length(
                token_mean(learner(**batch).last_hidden_state, batch["attention_mask"])
            )
            loss = F.cross_entropy(
                features @ now.head.to(place).float().T / settings.temperature, now.labels.to(place)
            )
            descend(loss, optimiser, learning, settings, now.task, step, "NaN in the base")
    learner.zero_grad(set_to_none=True)
    return learner.requires_grad_(True).eval()


def similar_lengths(task: str, count: int, batch: int, step: int, seed: int) -> NDArray[np.int64]:
    """Texts of one training step, of about one length, (batch,): indices into a set whose texts
    stand shortest first.

    Every epoch is a permutation cut into windows of WINDOW batches; within a window, sorted,
    neighbours are a batch, and batches come in a drawn order, so that lengths do not rise from step
    to step. What fills no batch is left out of the epoch.
    """
    batch = min(batch, count)
    epoch, place = divmod(step, count // batch)
    generator = np.random.default_rng([seed, crc32(task.encode()), epoch])
    order = generator.permutation(count)[: count // batch * batch]
    window, within = divmod(place, WINDOW)
    drawn = np.sort(order[window * WINDOW * batch :][: WINDOW * batch]).reshape(-1, batch)
    turns = np.random.default_rng([seed, crc32(task.encode()), epoch, window]).permutation(
        len(drawn)
    )
    return drawn[turns[within]].astype(np.int64)
