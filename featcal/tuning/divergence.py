"""How far a calibrated model's answers are from its experts', without labels. Every task counts
alike, every row of a task too:

    D = 1/T Σ_t 1/n_t Σ_r KL(p_r^t ‖ p_r),    p = softmax(z).

z_r are the scores that row r leads to: of a text one row for every token (of a decoder, those it
reads), z over the vocabulary by the model's own language head; of a picture one row, z = H_t f/‖f‖
by the head of its task. Without a head for pictures there are no answers, and the summand is 1 −
cos(f_r, f_r^t) of the features instead. KL is what log-likelihood under the expert loses.

Legend: T tasks · n_t rows of task t · K scores · p width of a feature.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, kl_div, log_softmax

from featcal.baselines.features import Head, output_embeddings, rows_before_head
from featcal.blocks.batches import naming
from featcal.core.precision import SUM_DTYPE, wide
from featcal.errors import NotFinite
from featcal.models.mode import evaluation_mode

SCORES_AT_ONCE = 2**24  # numbers of one matrix of scores: a vocabulary is wide


def task_divergence(
    task: str,
    model: nn.Module,
    expert: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    head: Head = None,
    scores: Tensor | None = None,
) -> float:
    """The mean over the rows of one task.

    head:   of CLIP, the weight (p, h) of visual_projection or a function; None where the model
            projects itself, or for text.
    scores: H_t (K, p) for pictures, with the temperature in it: of CLIP its logit scale times the
    classes' unit vectors.
    Raises: NotFinite for a model that puts out NaN; BadBatches.
    """
    total = torch.zeros((), dtype=SUM_DTYPE)
    count = 0
    model, expert = comparable(model, expert)
    with evaluation_mode([model, expert]):
        for number, batch in enumerate(batches):
            with naming(task, number):
                ours, theirs = (rows_before_head(one, batch, head)[0] for one in (model, expert))
            theirs = theirs.to(ours.device)
            if scores is None and output_embeddings(model) is None:
                found = 1 - cosine_similarity(wide(ours), wide(theirs), dim=-1)  # (rows,)
            else:
                pairs = answer_pairs(scored(model, ours, scores), scored(expert, theirs, scores))
                found = torch.cat([divergences(*pair) for pair in pairs])
            total += found.sum(dtype=SUM_DTYPE).cpu()
            count += len(found)
    if not torch.isfinite(total):
        raise NotFinite(f"model, task {task}", "its answers")
    return float(total) / count


def comparable(model: nn.Module, expert: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Both as they are, or their towers where heads answer other questions: other classes, other
    words, or one has none.
    """
    kinds = {type(one) for one in (model, expert)}
    words = {getattr(output_embeddings(one), "out_features", None) for one in (model, expert)}
    if len(kinds) == len(words) == 1 and not type(expert).__name__.endswith("Classification"):
        return model, expert
    return getattr(model, "base_model", model), getattr(expert, "base_model", expert)


class Scored:
    """Rows whose scores are made a few at a time."""

    def __init__(self, rows: Tensor, head: nn.Module | None, scores: Tensor | None):
        self.rows, self._head, self._scores = rows, head, scores
        self.width = len(scores) if scores is not None else int(getattr(head, "out_features", 1))

    def between(self, start: int, end: int) -> Tensor:
        """log softmax(z) of some rows, (rows, K)."""
        rows = self.rows[start:end]
        if self._scores is not None:
            rows = wide(rows)
            z = rows / rows.norm(dim=-1, keepdim=True) @ self._scores.to(rows).T
        else:
            assert self._head is not None
            z = wide(self._head(rows))
        return log_softmax(z, dim=-1)


def scored(model: nn.Module, rows: Tensor, scores: Tensor | None) -> Scored:
    """Rows with what turns them into scores: the task's head, or the model's own language head."""
    return Scored(rows, None if scores is not None else output_embeddings(model), scores)


def answer_pairs(ours: Any, theirs: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """log softmax(z) of both, some rows at a time, (rows, K) each on one device."""
    size = max(1, SCORES_AT_ONCE // ours.width)
    for start in range(0, len(ours.rows), size):
        here = ours.between(start, start + size)
        yield here, theirs.between(start, start + size).to(here.device)


def divergences(here: Tensor, there: Tensor) -> Tensor:
    """KL(p^t ‖ p) of every row, (rows,)."""
    return kl_div(here, there, reduction="none", log_target=True).sum(-1)
