"""Features as the head receives them: of a picture its pooled and projected output, of a text one
row for every token.

n samples · rows of all samples behind each other · d width of a feature. A picture has one row.
Knows no adapters.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from featcal.blocks.batches import naming, pad_token, padding_mask
from featcal.blocks.capture import StopForward, model_call
from featcal.errors import BadBatches, BadPlan, BadSetting
from featcal.models.mode import evaluation_mode
from featcal.models.pooling import pooled

Batch = Mapping[str, Any]
Head = Tensor | Callable[[Tensor], Tensor] | Mapping[str, Tensor] | None


@dataclass(frozen=True)
class Pair:
    """Features of the same samples by two models.

    merged, expert: (rows, d).   sizes: rows of every sample, (n,).
    """

    merged: Tensor
    expert: Tensor
    sizes: Tensor

    def of(self, samples: Tensor) -> "Pair":
        """The samples with these indices, in this order."""
        if len(self.sizes) == len(self.merged):  # pictures
            rows = samples
        else:
            ends = self.sizes.cumsum(0)
            spans = zip((ends - self.sizes)[samples].tolist(), ends[samples].tolist(), strict=True)
            rows = torch.cat([torch.arange(start, end) for start, end in spans])
        rows = rows.to(self.merged.device)
        return Pair(self.merged[rows], self.expert[rows], self.sizes[samples])


def pairs_of_several(
    task: str,
    merged: Mapping[str, nn.Module],
    expert: nn.Module | Tensor,
    batches: Iterable[Batch],
    head: Head,
) -> dict[str, Pair]:
    """Features of all batches of one task, by each merged model beside the one expert; all frozen
    and without dropout.

    expert: a model, or its features, (rows, d), where they are known; it sees every batch once.
    head: what turns a vision model's pooled output into features: the weight (p, h) of
    visual_projection or a function; None
          where the model projects itself or has a language head.
    Returns: by name of the merged model.
    Raises: BadBatches for no batch, or for one that a model refuses; BadSetting for a head that
    does not fit.
    """
    with evaluation_mode([*merged.values(), *([expert] if isinstance(expert, nn.Module) else [])]):
        return frozen_features(task, merged, expert, batches, head)


@torch.no_grad()
def frozen_features(
    task: str,
    merged: Mapping[str, nn.Module],
    expert: nn.Module | Tensor,
    batches: Iterable[Batch],
    head: Head,
) -> dict[str, Pair]:
    """The same of models that are in evaluation mode already: setting every module's mode takes
    half as long as a small batch.
    """
    ours: dict[str, list[Tensor]] = {name: [] for name in merged}
    theirs, sizes = [], []
    for number, batch in enumerate(batches):
        with naming(task, number):
            for name, model in merged.items():
                rows, counts = rows_before_head(model, batch, head)
                ours[name].append(rows)
            if isinstance(expert, nn.Module):
                theirs.append(rows_before_head(expert, batch, head)[0].to(rows.device))
            sizes.append(counts)  # tokens without padding, the same for every model
    if not sizes:
        raise BadBatches(task, "is empty; an adapter needs at least one batch")
    shared = (
        torch.cat(theirs)
        if isinstance(expert, nn.Module)
        else expert.to(next(iter(ours.values()))[0].device)
    )
    counted_rows = torch.cat(sizes)
    return {name: Pair(torch.cat(own), shared, counted_rows) for name, own in ours.items()}


def rows_before_head(model: nn.Module, batch: Batch, head: Head) -> tuple[Tensor, Tensor]:
    """Rows (rows, d) of one batch and how many each of its samples has, (n,) on the CPU; padding
    has none.
    """
    language_head = output_embeddings(model)
    if language_head is None:
        features = projected(model, batch, head)
        return features, torch.ones(len(features), dtype=torch.long)
    if head is not None and head is not language_head:
        raise BadSetting(
            "head",
            type(head).__name__,
            "must be left out for a model with a language head of its own",
        )
    hidden = input_of(language_head, model, batch)  # (n, tokens, d)
    mask = counted(model, batch, hidden)
    return hidden[mask], mask.sum(1).cpu()


def output_embeddings(model: nn.Module) -> nn.Module | None:
    """The language head of transformers' models that have one."""
    found = getattr(model, "get_output_embeddings", lambda: None)()
    return found if isinstance(found, nn.Module) else None


def projected(model: nn.Module, batch: Batch, head: Head) -> Tensor:
    """Features (n, p) of one batch by a model without a language head. Raises: BadSetting,
    BadPlan.
    """
    output: Any = model(**model_call(model, batch))
    embedded = output if isinstance(output, Tensor) else getattr(output, "image_embeds", None)
    vectors = embedded if embedded is not None else pooled(model, output, batch)
    if vectors is None:
        raise BadPlan(
            type(output).__name__,
            "has neither image_embeds nor pooler_output",
            "give a model that pools its features",
        )
    weight = head.get("visual_projection") if isinstance(head, Mapping) else head
    if weight is None and head is None:
        return vectors
    if not isinstance(weight, Tensor):
        if not callable(weight):
            raise BadSetting(
                "head",
                type(head).__name__,
                "must be the weight (p, h) of visual_projection, or a function",
            )
        return weight(vectors)
    if weight.dim() != 2 or weight.shape[1] != vectors.shape[1]:
        raise BadSetting(
            "head",
            tuple(weight.shape),
            f"must have shape (p, {vectors.shape[1]}), as the weight of visual_projection",
        )
    return vectors @ weight.to(vectors).T


def input_of(module: nn.Module, model: nn.Module, batch: Batch) -> Tensor:
    """What reaches a module during the model's own forward, which stops there: scores over a
    vocabulary are never made.
    """
    seen: list[Tensor] = []

    def stop(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0])
        raise StopForward

    with suppress(StopForward), module.register_forward_pre_hook(stop):
        model(**model_call(model, batch))
    return seen[0]


def counted(model: nn.Module, batch: Batch, hidden: Tensor) -> Tensor:
    """Which tokens of hidden (n, tokens, d) are none of padding, (n, tokens)."""
    config: Any = model.config
    keyword = "decoder_attention_mask" if config.is_encoder_decoder else "attention_mask"
    mask = padding_mask(batch, hidden, keyword, pad_token(model))
    return hidden.new_ones(hidden.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
