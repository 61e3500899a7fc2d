"""α and the length of a step, chosen by how near a block's output comes to the experts' on samples that were held out."""

from collections.abc import Mapping, Sequence

from torch import nn

from featcal.blocks.replay import step
from featcal.calibration.observe import BlockView
from featcal.calibration.ranks import Ranks
from featcal.calibration.tracks import Tracks
from featcal.core.drift import Drift
from featcal.core.weighting import token_weights

GRID = (0.0, 0.25, 0.5, 0.75, 1.0)


def held_out_error(student: nn.Module, tracks: Tracks, view: BlockView) -> float:
    """‖H − H_exp‖² / ‖H_exp‖² of what the block puts out, over one task's tokens held out, weighed as the last block's are."""
    drift = Drift()
    for number in sorted(tracks.held):
        out, target = step(student, view.stack, *tracks.student[number])[0], tracks.teacher[number][0]
        drift.add(out, target, token_weights(view.rule, "", view.last, out, tracks.masks[number]))
    return drift.difference / drift.reference if drift.reference else 0.0


def least(errors: Mapping[str, Sequence[float]], ranks: Ranks) -> int:
    """Which of some candidates has the smallest mean over all tasks of its errors; of equals the first."""
    means = [sum(each) / len(each) for each in zip(*ranks.gathered(errors).values(), strict=True)]
    return means.index(min(means))
