"""What a model answers to a batch: features behind the last block, and scores where it has a head,
beside another model's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from featcal.baselines.features import output_embeddings, rows_before_head
from featcal.blocks.batches import pad_token, padding_mask
from featcal.blocks.capture import model_call
from featcal.blocks.plan import BlockPlan
from featcal.blocks.plans import plan_for
from featcal.calibration.drift import last_outputs
from featcal.core.precision import wide
from featcal.tuning.divergence import Scored, answer_pairs, divergences


@dataclass(frozen=True)
class Answers:
    """Of one batch: features behind the last block (n, tokens, d), which tokens count, and the
    scores of n samples' rows.
    """

    hidden: Tensor
    mask: Tensor | None
    scores: "Scored | Table | None"
    sizes: Tensor  # rows of each sample, (n,)


@dataclass(frozen=True)
class Table:
    """Scores that the model made itself, (rows, K)."""

    rows: Tensor

    @property
    def width(self) -> int:
        return self.rows.shape[1]

    def between(self, start: int, end: int) -> Tensor:
        """log softmax of some rows."""
        return log_softmax(wide(self.rows[start:end]), dim=-1)


def answered(model: nn.Module, batch: Mapping[str, Any], given: BlockPlan | None) -> Answers:
    """Features and scores of one forward; of a vocabulary the scores are made when they are asked
    for, a few rows at a time.
    """
    plan, language = plan_for(model, given), output_embeddings(model)
    stack = plan.stacks[-1]
    with last_outputs(model, plan) as seen:
        if language is not None:
            rows, sizes = rows_before_head(model, batch, None)
            scores: Scored | Table | None = Scored(rows, language, None)
        else:
            out = model(**model_call(model, batch))
            made = getattr(out, "logits", None)
            scores = Table(made) if isinstance(made, Tensor) and made.dim() == 2 else None
            sizes = torch.ones(len(seen[stack.name]), dtype=torch.long)
    hidden = seen[stack.name]
    return Answers(hidden, padding_mask(batch, hidden, stack.mask, pad_token(model)), scores, sizes)


def scored_alike(ours: Scored | Table, theirs: Scored | Table) -> tuple[Tensor, Tensor]:
    """KL(p_exp ‖ p) of every row and whether both have one largest score, (rows,) each, on the
    CPU.
    """
    kl, same = [], []
    for here, there in answer_pairs(ours, theirs):
        kl.append(divergences(here, there).double().cpu())
        same.append((here.argmax(-1) == there.argmax(-1)).double().cpu())
    return torch.cat(kl), torch.cat(same)
