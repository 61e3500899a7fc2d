"""A model's answers to a batch, and their divergence from an expert's.

n samples · d width of a feature · K scores of a row. An image has one row of scores, a text one for
every token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax

from featcal.calibration.report import last_outputs
from featcal.core.precision import wide
from featcal.models.batch import Batch, pad_token, padding_mask, pooled_output, token_mean
from featcal.models.blocks import model_call
from featcal.models.families import plan_for
from featcal.models.features import output_embeddings, rows_before_head
from featcal.models.plan import BlockPlan
from featcal.models.sentences import Sentences

SCORES_AT_ONCE = 2**24  # entries of one matrix of scores: a vocabulary is wide


@dataclass(frozen=True)
class Scores:
    """Scores (rows, K), or the rows that a language head makes them from, a few at a time."""

    rows: Tensor
    head: Any = None

    @property
    def width(self) -> int:
        """Return K."""
        return self.rows.shape[1] if self.head is None else int(self.head.out_features)

    def log_softmax(self, start: int, end: int) -> Tensor:
        """Return log softmax of some rows' scores, (rows, K)."""
        rows = self.rows[start:end]
        return log_softmax(wide(rows if self.head is None else self.head(rows)), dim=-1)


def kl_and_top1(ours: Scores, theirs: Scores) -> tuple[Tensor, Tensor]:
    """Return KL(p_exp ‖ p) of every row and whether both have the same largest score, (rows,) each,
    in float64 on the CPU.
    """
    kl, same = [], []
    size = max(1, SCORES_AT_ONCE // ours.width)
    for start in range(0, len(ours.rows), size):
        log_p = ours.log_softmax(start, start + size)
        log_q = theirs.log_softmax(start, start + size).to(log_p.device)
        kl.append(kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1).double().cpu())
        same.append((log_p.argmax(-1) == log_q.argmax(-1)).double().cpu())
    return torch.cat(kl), torch.cat(same)


@dataclass(frozen=True)
class Answers:
    """A model's answers to one batch: features after the last block (n, tokens, d), the mask of
    tokens that are not padding, one feature of each sample (n, p), scores if it has a head, and the
    rows of each sample (n,).
    """

    hidden: Tensor
    mask: Tensor | None
    pooled: Tensor
    scores: Scores | None
    sizes: Tensor


def answers(
    model: nn.Module,
    batch: Batch,
    given_plan: BlockPlan | None,
    sentences: Sentences | None = None,
) -> Answers:
    """Return features and scores of one forward pass.

    sentences: how an encoder's folder makes a vector of a text, if it says so.
    """
    plan, head = plan_for(model, given_plan), output_embeddings(model)
    stack, scores, pooled = plan.stacks[-1], None, None
    with last_outputs(model, plan) as outputs:
        if head is not None:
            rows, sizes = rows_before_head(model, batch, None)
            scores = Scores(rows, head)
        else:
            output: Any = model(**model_call(model, batch))
            logits = getattr(output, "logits", None)
            if isinstance(logits, Tensor) and logits.dim() == 2:
                scores = Scores(logits)
            if sentences and sentences.given:
                hidden = output.last_hidden_state
                mask = padding_mask(batch, hidden)
                every = hidden.new_ones(hidden.shape[:2], dtype=torch.long)
                pooled = sentences.vectors(hidden, every if mask is None else mask)
            else:
                pooled = pooled_output(model, output, batch)
            sizes = torch.ones(len(outputs[stack.name]), dtype=torch.long)
    hidden = outputs[stack.name]
    mask = padding_mask(batch, hidden, stack.mask, pad_token(model))
    if pooled is None:
        pooled = token_mean(hidden, hidden.new_ones(hidden.shape[:2]) if mask is None else mask)
    return Answers(hidden, mask, pooled, scores, sizes)
