"""Check that batches fit a model, find their padding, and pool features over tokens."""

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

PROVING = 2  # samples for checking a plan; the result does not depend on their number
IGNORED = -100  # transformers' label of a token without a target


def check_tasks(experts: Mapping[str, Any], batches: Mapping[str, Any]) -> None:
    """Raise BadBatches or BadSetting unless both are dictionaries with the same tasks."""
    for name, given in (("experts", experts), ("batches", batches)):
        if not isinstance(given, Mapping):
            raise BadSetting(name, type(given).__name__, "must be a dictionary by task")
    if not experts:
        raise BadBatches("*", "no experts were given; at least one is needed, with its batches")
    for task in sorted(experts.keys() | batches.keys()):
        if task not in batches:
            near = nearest(task, batches)
            raise BadBatches(task, f"is missing for the expert of that name; {near}")
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
        if isinstance(value, Tensor) and value.numel() == 0:
            raise BadBatches(task, f"{name!r} of batch {number} is empty; remove the batch")
        if isinstance(value, Tensor) and not torch.isfinite(value).all():
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
    """Return the first samples of a batch, for checking a plan."""
    return some_samples(batch, slice(PROVING))


def single_samples(batches: Batches) -> list[dict[str, Any]]:
    """Return every sample of the batches as a batch of one."""
    numbered = ((batch, i) for batch in batches for i in range(sample_count(batch)))
    return [some_samples(batch, slice(i, i + 1)) for batch, i in numbered]


def sample_count(batch: Batch) -> int:
    """Return the number of samples of a batch."""
    values = batch.values() if isinstance(batch, Mapping) else ()
    return next((len(value) for value in values if isinstance(value, Tensor) and value.dim()), 0)


def some_samples(batch: Batch, rows: slice | Tensor) -> dict[str, Any]:
    """Return some samples of a batch; values without one row per sample stay as they are."""
    count = sample_count(batch)
    return {
        name: value[rows] if isinstance(value, Tensor) and value.shape[:1] == (count,) else value
        for name, value in batch.items()
    }


def out_of_memory(error: Exception) -> bool:
    """Return whether torch raised an error for lack of memory."""
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
    """Return the padding mask (batch, tokens) of `hidden` (batch, tokens, d), 0 at padding.

    None, so that every token counts, if the batch has no mask of that shape. "labels" masks tokens
    without a label; a missing "decoder_attention_mask" is derived from the decoder's tokens.
    """
    mask, labels = batch.get(keyword), batch.get("labels")
    if isinstance(mask, Tensor) and keyword == "labels":
        mask = mask != IGNORED
    elif mask is None and keyword == "decoder_attention_mask":
        if isinstance(inputs := batch.get("decoder_input_ids"), Tensor):
            mask = inputs != (IGNORED if pad is None else pad)
            mask[:, 0] = True  # many decoders start with the padding token
        elif isinstance(labels, Tensor):
            mask = (labels != IGNORED) & (labels != (IGNORED if pad is None else pad))
    if isinstance(mask, Tensor) and mask.shape == hidden.shape[:2]:
        return mask.to(hidden.device)
    return None


def pad_token(model: nn.Module) -> int | None:
    """Return the padding token of a transformers model, or None."""
    return getattr(getattr(model, "config", None), "pad_token_id", None)


def pooled_output(model: nn.Module, output: Any, batch: Batch) -> Tensor | None:
    """Return the pooled features (n, h) of a model's output, or None if nothing is pooled.

    Images are projected where the model does so. Texts are pooled as in Sentence-BERT (Reimers and Gurevych, 2019), by the mean over tokens that
    are not padding; CLIP's text tower and other models pool themselves.
    """
    if (embedded := getattr(output, "image_embeds", None)) is not None:
        return embedded
    hidden = getattr(output, "last_hidden_state", None)
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if isinstance(hidden, Tensor) and kind != "clip_text_model":
        mask = padding_mask(batch, hidden)
        if mask is not None:
            return token_mean(hidden, mask)
    return getattr(output, "pooler_output", None)


def token_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the mean (n, h) of hidden (n, tokens, h) over tokens where mask (n, tokens) is 1."""
    weights = mask.to(hidden)[..., None]
    return (hidden * weights).sum(1) / weights.sum(1)
