"""Check that a batch of data suits a model; know its padding, and pool over its tokens."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featcal.errors import BadBatches, BadSetting, nearest

Model = nn.Module | str | Path  # a module or a checkpoint folder
Batch = Mapping[str, Any]  # keyword arguments of a model's forward
Batches = Iterable[Batch]  # of one task
TaskBatches = Mapping[str, Batches]  # by task

PROVING = (
    2  # samples that prove a plan: whether blocks replay a model does not depend on their count
)
IGNORED = -100  # transformers' label of a token without a target


def check_tasks(experts: Mapping[str, Any], batches: Mapping[str, Any]) -> None:
    """Raise BadBatches unless each of at least one expert has a list of batches under its name.

    Raises: BadSetting for anything but dictionaries.
    """
    for name, given in (("experts", experts), ("batches", batches)):
        if not isinstance(given, Mapping):
            raise BadSetting(name, type(given).__name__, "must be a dictionary by task")
    if not experts:
        raise BadBatches("*", "no experts were given; at least one is needed, with its batches")
    for task in sorted(experts):
        if task not in batches:
            near = nearest(task, batches)
            raise BadBatches(task, f"is missing for the expert of that name; {near}")
    for task in sorted(batches):
        if task not in experts:
            raise BadBatches(task, f"has no expert of that name; {nearest(task, experts)}")
        given = batches[task]
        if isinstance(given, Mapping | Tensor | str) or not isinstance(given, Iterable):
            wanted = "a list of mappings such as [{'pixel_values': tensor}, ...]"
            raise BadBatches(task, f"is a {type(given).__name__}; expected {wanted}")


def check_batch(task: str, number: int, batch: object, model: nn.Module) -> None:
    """Raise BadBatches unless a batch is a mapping with the model's input and finite values."""
    if not isinstance(batch, Mapping):
        wanted = "a mapping such as {'pixel_values': tensor}"
        raise BadBatches(task, f"batch {number} is a {type(batch).__name__}; expected {wanted}")
    main = getattr(model, "main_input_name", None)  # only transformers' models have it
    if main is not None and main not in batch:
        keys = ", ".join(map(str, batch)) or "nothing"
        raise BadBatches(task, f"batch {number} has no {main!r} (it holds: {keys})")
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            continue
        if value.numel() == 0:
            raise BadBatches(task, f"{name!r} of batch {number} is empty; remove the batch")
        if value.is_floating_point() and not torch.isfinite(value).all():
            problem = f"{name!r} of batch {number} holds NaN or Inf; repair or remove the sample"
            raise BadBatches(task, problem)
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(ids, Tensor):
        return
    if ids.is_floating_point() or ids.dim() < 2:
        problem = f"'input_ids' of batch {number} are {ids.dtype} of shape {tuple(ids.shape)}"
        raise BadBatches(task, f"{problem}; expected integers, (samples, tokens)")
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape != ids.shape[:2]:
        problem = f"'attention_mask' of batch {number} is {tuple(mask.shape)}"
        raise BadBatches(task, f"{problem}, but 'input_ids' {tuple(ids.shape)}")


def first_samples(batch: Batch) -> dict[str, Any]:
    """Return the few samples of a batch that prove a plan; other values stay as they are."""
    return _samples(batch, slice(PROVING))


def single_samples(batches: Batches) -> list[dict[str, Any]]:
    """Return every sample of the batches as a batch of one."""
    return [
        _samples(batch, slice(i, i + 1)) for batch in batches for i in range(_sample_count(batch))
    ]


def _samples(batch: Batch, rows: slice) -> dict[str, Any]:
    """Return some samples of a batch: rows of its tensors with one row per sample."""
    count = _sample_count(batch)
    return {
        name: value[rows] if isinstance(value, Tensor) and value.shape[:1] == (count,) else value
        for name, value in batch.items()
    }


def _sample_count(batch: Batch) -> int:
    shapes = (value.shape for value in batch.values() if isinstance(value, Tensor))
    return next((shape[0] for shape in shapes if shape), 0)


def out_of_memory(error: Exception) -> bool:
    """Return whether an error of torch is lack of memory, which no batch or plan can help."""
    return "memory" in f"{type(error).__name__} {error}".lower()


@contextmanager
def naming(task: str, number: int) -> Iterator[None]:
    """Raise a model's errors about a batch (unknown keyword, wrong image size) as BadBatches."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:300]
        raise BadBatches(task, f"batch {number} is refused by the model ({reason})") from error


def padding_mask(
    batch: Batch, hidden: Tensor, keyword: str = "attention_mask", pad: int | None = None
) -> Tensor | None:
    """Return the mask (batch, tokens), 0 at padding, of `hidden` (batch, tokens, d).

    It is None, and every token counts, unless the batch has a mask of that shape. The keyword
    "labels" masks tokens without a label; "decoder_attention_mask" may be inferred from the tokens.
    """
    mask = batch.get(keyword)
    if isinstance(mask, Tensor) and keyword == "labels":
        mask = mask != IGNORED
    if mask is None and keyword == "decoder_attention_mask":
        mask = decoder_mask(batch, pad)
    if isinstance(mask, Tensor) and mask.shape == hidden.shape[:2]:
        return mask.to(hidden.device)
    return None


def decoder_mask(batch: Batch, pad: int | None) -> Tensor | None:
    """Return the padding mask of a decoder from its tokens or labels, or None without either.

    The first token always counts, as many decoders start with the padding token.
    """
    inputs, labels = batch.get("decoder_input_ids"), batch.get("labels")
    if isinstance(inputs, Tensor):
        mask = inputs != pad if pad is not None else torch.ones_like(inputs, dtype=torch.bool)
        mask[:, 0] = True
        return mask
    if isinstance(labels, Tensor):
        return (labels != IGNORED) & (labels != pad) if pad is not None else labels != IGNORED
    return None


def pad_token(model: nn.Module) -> int | None:
    """Return the padding token of a transformers model, or None."""
    return getattr(getattr(model, "config", None), "pad_token_id", None)


def pooled_output(model: nn.Module, output: Any, batch: Batch) -> Tensor | None:
    """Return the pooled features (n, h) of a model's output, or None if nothing is pooled.

    Texts are pooled as sentence encoders do, by the mean over tokens that are no padding; CLIP's
    text tower and other models pool themselves. Source: Reimers and Gurevych, Sentence-BERT, 2019;
    all-MiniLM-L6-v2's 1_Pooling/config.json (pooling_mode_mean_tokens).
    """
    mask, hidden = batch.get("attention_mask"), getattr(output, "last_hidden_state", None)
    kind = getattr(getattr(model, "config", None), "model_type", None)
    tokens = (
        isinstance(mask, Tensor) and isinstance(hidden, Tensor) and mask.shape == hidden.shape[:2]
    )
    if tokens and kind != "clip_text_model":
        return token_mean(hidden, mask)
    return getattr(output, "pooler_output", None)


def token_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the mean (n, h) of hidden (n, tokens, h) over tokens where mask (n, tokens) is 1."""
    weights = mask.to(hidden)[..., None]
    return (hidden * weights).sum(1) / weights.sum(1)
