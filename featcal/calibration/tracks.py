"""The two tracks of features of one task: the student's and the teacher's, batch by batch, just before the current block."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from featcal.blocks.capture import Features, feeding, first_inputs
from featcal.blocks.plan import Stack, blocks_of
from featcal.blocks.replay import handed_on
from featcal.calibration.tokens import pad_token, padding_mask
from featcal.errors import BadBatches


@dataclass
class Tracks:
    """What block by block calibration of one stack keeps of one task."""

    student: list[Features] = field(default_factory=list)
    teacher: list[Features] = field(default_factory=list)
    masks: list[Tensor | None] = field(default_factory=list)  # (batch, tokens), 0 at padding
    fed_masks: list[Tensor | None] = field(default_factory=list)  # of the tokens that another stack feeds

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        pairs = zip(self.student, self.masks, strict=True)
        return sum(int(mask.sum()) if mask is not None else hidden.shape[:-1].numel() for (hidden, _), mask in pairs)


@dataclass(frozen=True)
class HandedOn:
    """What one stack feeds to the next, of one task, batch by batch."""

    student: list[Tensor]  # by the calibrated stack
    teacher: list[Tensor]
    masks: list[Tensor | None]


def start_tracks(
    task: str,
    student: nn.Module,
    teacher: nn.Module,
    stack: Stack,
    batches: Iterable[Mapping[str, Any]],
    source: Stack | None = None,
    fed: HandedOn | None = None,
) -> Tracks:
    """Both tracks before the first block of a stack, which `source` feeds; batches are read once.

    Raises: BadBatches naming the task and what is wrong.
    """
    tracks = Tracks()
    for number, batch in enumerate(batches):
        check_batch(task, number, batch, student)
        with naming(task, number):
            for model, track, handed in (
                (student, tracks.student, fed and fed.student[number]),
                (teacher, tracks.teacher, fed and fed.teacher[number]),
            ):
                with feeding(model, source, stack, handed):
                    track.append(first_inputs(model, blocks_of(model, stack), batch, stack.mixed))
        tracks.masks.append(padding_mask(batch, tracks.student[-1][0], stack.mask, pad_token(student)))
        tracks.fed_masks.append(fed.masks[number] if fed else None)
    if not tracks.student or tracks.tokens == 0:
        raise BadBatches(task, "is empty; calibration needs at least one batch with at least one sample")
    return tracks


def hand_on(tracks: Tracks, student: nn.Module, teacher: nn.Module, stack: Stack) -> HandedOn | None:
    """What the stack behind whose last block the tracks are feeds to the next one."""
    if not stack.feeds:
        return None
    ours = [handed_on(student, stack, hidden) for hidden, _ in tracks.student]
    theirs = [handed_on(teacher, stack, hidden) for hidden, _ in tracks.teacher]
    return HandedOn(ours, theirs, tracks.masks)


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
    """Turns a model's refusal of a batch (an unknown keyword, another image size, no image at all) into BadBatches."""
    try:
        yield
    except (TypeError, ValueError, AttributeError) as error:
        raise BadBatches(task, f"batch {number} is refused by the model ({error})") from error
