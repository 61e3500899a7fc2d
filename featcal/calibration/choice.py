"""α and the length of a step, chosen by how near a block's output comes to the experts' on samples
that were held out.
"""

from collections.abc import Mapping, Sequence

from torch import nn

from featcal.blocks.replay import step
from featcal.calibration.observe import BlockView
from featcal.calibration.ranks import Ranks
from featcal.calibration.sites import ends, solved_parameters
from featcal.calibration.solve import Solved, load
from featcal.calibration.tracks import Tracks
from featcal.core.drift import Drift
from featcal.core.ridge import Solution
from featcal.core.weighting import token_weights
from featcal.settings import Calibration

GRID = (0.0, 0.25, 0.5, 0.75, 1.0)


def choose(
    student: nn.Module,
    solved: Solved,
    settings: Calibration,
    tracks: Mapping[str, Tracks],
    view: BlockView,
    ranks: Ranks,
) -> None:
    """Put what was found in its place, at the α and with the part of the step that hold best on
    samples held out.

    First α of the whole step, then the step at that α: θ = θ_merged + s (θ(α) − θ_merged) with θ(α)
    = θ(0) + α (θ(1) − θ(0)).
    """
    parameters = solved_parameters(student, view.modules)
    merged = {name: p.detach().clone() for name, p in parameters.items()}

    def place(alpha: float, share: float) -> None:
        load(
            student,
            Solved({site: at(s, alpha) for site, s in solved.sites.items()}, solved.norms),
            settings,
        )
        for name, p in parameters.items() if share < 1 else ():
            p.copy_(merged[name].lerp(p, share))

    def at(solution: Solution, alpha: float) -> Solution:
        if ends(settings) == 1:
            return solution
        (W, W_end), (b, b_end) = solution.weight.chunk(2), solution.bias.chunk(2)
        return Solution(W.lerp(W_end, alpha), b.lerp(b_end, alpha), solution.conditioning)

    def nearest(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
        errors: dict[str, list[float]] = {task: [] for task in tracks}
        for point in points:
            place(*point)
            for task, track in tracks.items():
                errors[task].append(held_out_error(student, track, view))
        return points[least(errors, ranks)]

    alpha, share = 1.0, 1.0
    if ends(settings) > 1 and solved.sites:
        alpha, share = nearest([(a, 1.0) for a in GRID])
    if settings.no_harm:
        alpha, share = nearest([(alpha, s) for s in GRID])
    place(alpha, share)


def held_out_error(student: nn.Module, tracks: Tracks, view: BlockView) -> float:
    """‖H − H_exp‖² / ‖H_exp‖² of what the block puts out, over one task's tokens held out, weighed
    as the last block's are.
    """
    drift = Drift()
    for number in sorted(tracks.held):
        out, target = (
            step(student, view.stack, *tracks.student[number])[0],
            tracks.teacher[number][0],
        )
        drift.add(out, target, token_weights(view.rule, "", view.last, out, tracks.masks[number]))
    return drift.difference / drift.reference if drift.reference else 0.0


def least(errors: Mapping[str, Sequence[float]], ranks: Ranks) -> int:
    """Which of some candidates has the smallest mean over all tasks of its errors; of equals the
    first.
    """
    means = [sum(each) / len(each) for each in zip(*ranks.gathered(errors).values(), strict=True)]
    return means.index(min(means))
