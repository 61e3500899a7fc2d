"""The two tracks of features of one task: the student's and the teacher's, batch by batch, just before the current block."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from featcal.blocks.capture import first_inputs
from featcal.blocks.plan import BlockPlan
from featcal.errors import BadBatches

Features = tuple[Tensor, dict[str, Any]]  # hidden states (batch, tokens, d), the block's other arguments by name


@dataclass
class Tracks:
    """What block by block calibration keeps of one task; the batches themselves are not needed again."""

    student: list[Features] = field(default_factory=list)
    teacher: list[Features] = field(default_factory=list)
    masks: list[Tensor | None] = field(default_factory=list)  # (batch, tokens), 0 at padding

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        pairs = zip(self.student, self.masks, strict=True)
        return sum(int(mask.sum()) if mask is not None else hidden.shape[:-1].numel() for (hidden, _), mask in pairs)


def start_tracks(
    task: str, student: nn.Module, teacher: nn.Module, plan: BlockPlan, batches: Iterable[Mapping[str, Any]]
) -> Tracks:
    """Both tracks before the first block; batches are read once. Raises: BadBatches naming the task and what is wrong."""
    tracks = Tracks()
    first, first_teacher = plan.blocks(student)[0], plan.blocks(teacher)[0]
    for number, batch in enumerate(batches):
        check_batch(task, number, batch, student)
        with naming(task, number):
            tracks.student.append(first_inputs(student, first, batch))
            tracks.teacher.append(first_inputs(teacher, first_teacher, batch))
        tracks.masks.append(padding_mask(batch, tracks.student[-1][0]))
    if not tracks.student or tracks.tokens == 0:
        raise BadBatches(task, "is empty; calibration needs at least one batch with at least one sample")
    return tracks


def check_batch(task: str, number: int, batch: object, model: nn.Module) -> None:
    """Raise BadBatches unless the batch is a mapping with the model's main input whose numbers are finite."""
    if not isinstance(batch, Mapping):
        kind = type(batch).__name__
        raise BadBatches(task, f"batch {number} is a {kind}; expected a mapping such as {{'pixel_values': tensor}}")
    main = getattr(model, "main_input_name", None)  # of transformers' models; others are asked nothing
    if main not in batch and main is not None:
        raise BadBatches(task, f"batch {number} has no {main!r} (it holds: {', '.join(map(str, batch)) or 'nothing'})")
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.numel() == 0:
            raise BadBatches(task, f"{name!r} of batch {number} is empty; leave the batch out")
        if isinstance(value, Tensor) and value.is_floating_point() and not torch.isfinite(value).all():
            raise BadBatches(task, f"{name!r} of batch {number} holds NaN or Inf; repair or leave out the sample")


@contextmanager
def naming(task: str, number: int) -> Iterator[None]:
    """Turns a model's refusal of a batch (an unknown keyword, another image size) into BadBatches."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise BadBatches(task, f"batch {number} is refused by the model ({error})") from error


def padding_mask(batch: Mapping[str, Any], hidden: Tensor) -> Tensor | None:
    """The batch's own attention mask where it has one entry per token, else None: every token counts."""
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == hidden.shape[:-1]:
        return mask.to(hidden.device)
    return None
