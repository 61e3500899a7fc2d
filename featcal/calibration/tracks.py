"""The student's and the teacher's features of one task, batch by batch, before the current
block.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from featcal.blocks.batches import check_batch, naming, pad_token, padding_mask
from featcal.blocks.capture import feeding, first_inputs
from featcal.blocks.plan import Stack, blocks_of
from featcal.blocks.replay import handed_on, step
from featcal.calibration.spooled_list import SpooledList
from featcal.core.drift import Drift
from featcal.errors import BadBatches
from featcal.storage.spool import Spool


@dataclass
class Tracks:
    """Features of one task before the current block of one stack; a track holds Features, batch
    by batch.
    """

    student: SpooledList
    teacher: SpooledList
    masks: list[Tensor | None] = field(default_factory=list)  # (batch, tokens), 0 at padding
    fed_masks: list[Tensor | None] = field(
        default_factory=list
    )  # of the tokens that another stack feeds
    tokens: int = 0  # without padding


@dataclass(frozen=True)
class HandedOn:
    """Outputs of one stack that feed the next, of one task, batch by batch."""

    student: SpooledList  # by the calibrated stack
    teacher: SpooledList
    masks: list[Tensor | None]


def start_tracks(
    task: str,
    student: nn.Module,
    teacher: nn.Module,
    stack: Stack,
    batches: Iterable[Mapping[str, Any]],
    spool: Spool,
    source: Stack | None = None,
    fed: HandedOn | None = None,
) -> Tracks:
    """Return both tracks before the first block of a stack, which `source` feeds; batches are read
    once. Raises: BadBatches.
    """
    tracks = Tracks(SpooledList(spool), SpooledList(spool))
    for number, batch in enumerate(batches):
        check_batch(task, number, batch, student)
        with naming(task, number):
            for model, track, handed in (
                (student, tracks.student, fed and fed.student[number]),
                (teacher, tracks.teacher, fed and fed.teacher[number]),
            ):
                with feeding(model, source, stack, handed):
                    features = first_inputs(model, blocks_of(model, stack), batch, stack.mixed)
                track.append(features)
        mask = padding_mask(batch, features[0], stack.mask, pad_token(student))
        tracks.masks.append(mask)
        tracks.fed_masks.append(fed.masks[number] if fed else None)
        tracks.tokens += int(mask.sum()) if mask is not None else features[0].shape[:-1].numel()
    if fed:
        fed.student.clear()
        fed.teacher.clear()
    if tracks.tokens == 0:
        raise BadBatches(
            task, "is empty; calibration needs at least one batch with at least one sample"
        )
    return tracks


def advance(block: nn.Module, stack: Stack, track: SpooledList) -> None:
    """Move one track past a block."""
    for number in range(len(track)):
        track[number] = step(block, stack, *track[number])


def moved(block: nn.Module, stack: Stack, track: SpooledList) -> SpooledList:
    """Return a track past a block; the given one stays where it is."""
    result = track.empty()
    for features in track:
        result.append(step(block, stack, *features))
    return result


def advance_student(block: nn.Module, stack: Stack, tracks: Tracks) -> Drift:
    """Move the student's track past a block, and return its drift from the teacher's track."""
    drift = Drift()
    for number, mask in enumerate(tracks.masks):
        features = step(block, stack, *tracks.student[number])
        drift.add(features[0], tracks.teacher[number][0], mask)
        tracks.student[number] = features
    return drift


def hand_on(model: nn.Module, stack: Stack, track: SpooledList) -> SpooledList:
    """Return what a stack feeds to the next one, from a track past its last block, which is
    consumed.
    """
    result = track.empty()
    for hidden, _ in track:
        result.append(handed_on(model, stack, hidden))
    track.clear()
    return result
