"""Split a block into the parts that are solved together: the whole block, or with order "sites" one
norm or one site after the other.

Both that order and the linears that write into the residual stream are read off one batch's
forward, not from module names.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from featcal.blocks.capture import Arguments, module_inputs
from featcal.blocks.plan import Stack
from featcal.blocks.replay import step
from featcal.blocks.residual import residual_streams
from featcal.calibration.observe import BlockView
from featcal.calibration.sites import Modules, calibrated_modules
from featcal.calibration.tokens import same_memory
from featcal.calibration.tracks import Tracks
from featcal.errors import BadSetting
from featcal.settings import Calibration


def block_parts(
    student: nn.Module, tracks: Mapping[str, Tracks], view: BlockView, settings: Calibration
) -> list[BlockView]:
    """Return the parts in the order in which they are solved; for the paper's method the whole
    block.
    """
    first = next(iter(tracks.values()))
    if view.residual:
        view = replace(view, writers=residual_writers(student, first, view))
    if settings.order != "sites":
        return [view]
    return [replace(view, modules=modules) for modules in in_forward_order(student, first, view)]


def last_with_teacher(parts: Sequence[BlockView]) -> int:
    """Return the number of the part with which the teacher's track moves on: the last part that has
    linears.
    """
    return max((n for n, part in enumerate(parts) if part.modules.linears), default=len(parts) - 1)


def residual_writers(student: nn.Module, tracks: Tracks, view: BlockView) -> tuple[str, ...]:
    """Return the solved linears whose outputs are added to the residual stream. Raises: BadSetting
    where there are none.
    """
    found = written(student, view.stack, *tracks.student[0])
    writers = tuple(name for name in view.modules.linears if name in found)
    if not writers:
        reason = "no linear that is solved here puts its output into the residual stream as it is"
        raise BadSetting(
            "calibrate.residual",
            view.residual,
            f"must be 0 for {view.name} of this model: {reason}",
        )
    return writers


def written(block: nn.Module, stack: Stack, hidden: Tensor, arguments: Arguments) -> set[str]:
    """Return all linears of a block whose outputs are added to the residual stream."""
    with residual_streams(block, calibrated_modules(block, norm=False).linears, hidden) as seen:
        step(block, stack, hidden, arguments)
    return set(seen)


def in_forward_order(student: nn.Module, tracks: Tracks, view: BlockView) -> list[Modules]:
    """Return norms one by one, and linears with all others that read the same tensor, in forward
    order.
    """
    linears, norms = view.modules.linears, view.modules.norms
    hidden, arguments = tracks.student[0]
    with module_inputs(student, linears + norms) as seen:
        step(student, view.stack, hidden, arguments)
    found = reading_alike(seen, linears)
    return [
        Modules(*(tuple(name for name in kind if name in names) for kind in (linears, norms)))
        for names in found
    ]


def reading_alike(seen: Mapping[str, Tensor], linears: Collection[str]) -> list[list[str]]:
    """Group linears that read the same tensor; keep the forward order."""
    found: list[list[str]] = []
    for name, x in seen.items():
        alike = [
            names
            for names in found
            if names[0] in linears and name in linears and same_memory(x, seen[names[0]])
        ]
        if alike:
            alike[0].append(name)
        else:
            found.append([name])
    return found
