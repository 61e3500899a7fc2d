"""What a batch of data must be before a model is run on it, and which of its tokens are padding."""

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

# samples on which a plan is checked: whether blocks replay a model does not depend on how many
# there are
PROVING = 2
IGNORED = -100  # transformers' label of a token without a target


def check_tasks(experts: Mapping[str, Any], batches: Mapping[str, Any]) -> None:
    """Raise BadBatches unless experts and batches have the same tasks, at least one, each with a
    list of batches.

    Raises: BadSetting for what is no dictionary by task.
    """
    for name, given in (("experts", experts), ("batches", batches)):
        if not isinstance(given, Mapping):
            raise BadSetting(name, type(given).__name__, "must be a dictionary by task")
    if not experts:
        raise BadBatches("*", "no experts were given; at least one is needed, with its batches")
    for task in sorted(experts):
        if task not in batches:
            raise BadBatches(
                task, f"is missing for an expert of that name; {nearest(task, batches)}"
            )
    for task in sorted(batches):
        if task not in experts:
            raise BadBatches(task, f"has no expert of that name; {nearest(task, experts)}")
        if isinstance(batches[task], Mapping | Tensor | str) or not isinstance(
            batches[task], Iterable
        ):
            kind = type(batches[task]).__name__
            raise BadBatches(
                task,
                f"is a {kind}; expected a list of mappings such as [{{'pixel_values': tensor}}, ...]",
            )


def check_batch(task: str, number: int, batch: object, model: nn.Module) -> None:
    """Raise BadBatches unless the batch is a mapping with the model's main input whose numbers are
    finite.
    """
    if not isinstance(batch, Mapping):
        kind = type(batch).__name__
        raise BadBatches(
            task,
            f"batch {number} is a {kind}; expected a mapping such as {{'pixel_values': tensor}}",
        )
    main = getattr(
        model, "main_input_name", None
    )  # of transformers' models; others are asked nothing
    if main not in batch and main is not None:
        raise BadBatches(
            task,
            f"batch {number} has no {main!r} (it holds: {', '.join(map(str, batch)) or 'nothing'})",
        )
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.numel() == 0:
            raise BadBatches(task, f"{name!r} of batch {number} is empty; leave the batch out")
        if (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and not torch.isfinite(value).all()
        ):
            raise BadBatches(
                task, f"{name!r} of batch {number} holds NaN or Inf; repair or leave out the sample"
            )
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if isinstance(ids, Tensor) and (ids.is_floating_point() or ids.dim() < 2):
        found = f"'input_ids' of batch {number} are {ids.dtype} of shape {tuple(ids.shape)}"
        raise BadBatches(task, f"{found}; expected whole numbers, (samples, tokens)")
    if (
        isinstance(ids, Tensor)
        and isinstance(mask, Tensor)
        and mask.dim() == 2
        and mask.shape != ids.shape[:2]
    ):
        raise BadBatches(
            task,
            f"'attention_mask' of batch {number} is {tuple(mask.shape)}, but 'input_ids' {tuple(ids.shape)}",
        )


def first_samples(batch: Mapping[str, Any]) -> dict[str, Any]:
    """So many samples of a batch as a plan is checked on; what is no tensor with a row for every
    sample stays as it is.
    """
    shapes = [tuple(value.shape) for value in batch.values() if isinstance(value, Tensor)]
    count = shapes[0][0] if shapes and shapes[0] else 0
    alike = {
        name
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.shape[:1] == (count,)
    }
    return {name: value[:PROVING] if name in alike else value for name, value in batch.items()}


def single_samples(batches: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every sample of the batches as a batch of one."""
    found = []
    for batch in batches:
        count = next((len(value) for value in batch.values() if isinstance(value, Tensor)), 0)
        for i in range(count):
            found.append(
                {
                    k: v[i : i + 1] if isinstance(v, Tensor) and len(v) == count else v
                    for k, v in batch.items()
                }
            )
    return found


def out_of_memory(error: Exception) -> bool:
    """Whether an error of torch says that memory was short, which is neither a batch's fault nor a
    plan's.
    """
    return "memory" in f"{type(error).__name__} {error}".lower()


@contextmanager
def naming(task: str, number: int) -> Iterator[None]:
    """Turns a model's refusal of a batch (an unknown keyword, another image size, no image at all)
    into BadBatches.
    """
    try:
        yield
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:300]
        raise BadBatches(task, f"batch {number} is refused by the model ({reason})") from error


def padding_mask(
    batch: Mapping[str, Any],
    hidden: Tensor,
    keyword: str = "attention_mask",
    pad: int | None = None,
) -> Tensor | None:
    """The batch's own mask where it has one entry per token of `hidden` (batch, tokens, d), else
    None: every token counts.

    A decoder without a mask of its own counts where there is a label, or a token that does not pad;
    its first token always counts, as many decoders start with the padding token. With the keyword
    "labels" tokens with a label count.
    """
    mask = batch.get(keyword)
    if isinstance(mask, Tensor) and keyword == "labels":
        mask = mask != IGNORED
    if mask is None and keyword == "decoder_attention_mask":
        mask = decoder_mask(batch, pad)
    if isinstance(mask, Tensor) and mask.shape == hidden.shape[:2]:
        return mask.to(hidden.device)
    return None


def pad_token(model: nn.Module) -> int | None:
    """The token that pads, of transformers' models that have one."""
    pad: int | None = getattr(getattr(model, "config", None), "pad_token_id", None)
    return pad


def decoder_mask(batch: Mapping[str, Any], pad: int | None) -> Tensor | None:
    """Padding of a decoder told from its tokens; a token that is read while a label is due is
    none.
    """
    inputs, labels = batch.get("decoder_input_ids"), batch.get("labels")
    if isinstance(inputs, Tensor):
        mask = inputs != pad if pad is not None else torch.ones_like(inputs, dtype=torch.bool)
        mask[:, 0] = True
        return mask
    if isinstance(labels, Tensor):
        return (labels != IGNORED) & (labels != pad) if pad is not None else labels != IGNORED
    return None
