"""What of a block is solved together: all of it, or with order "sites" one norm or one tensor's linears after the other.

Both that order and the linears that write into the residual stream are seen from one batch, not told by names of modules.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from featcal.blocks.capture import module_inputs, residual_streams
from featcal.blocks.replay import step
from featcal.calibration.observe import BlockView
from featcal.calibration.sites import Modules, calibrated_modules
from featcal.calibration.tokens import same_memory
from featcal.calibration.tracks import Tracks
from featcal.errors import BadSetting
from featcal.settings import Calibration


def block_parts(student: nn.Module, tracks: Mapping[str, Tracks], view: BlockView, settings: Calibration) -> list[BlockView]:
    """The parts in the order in which they are solved, each as a view of its own; of the paper's method the block itself."""
    first = next(iter(tracks.values()))
    if view.residual:
        view = replace(view, writers=residual_writers(student, first, view))
    if settings.order != "sites":
        return [view]
    return [replace(view, modules=modules) for modules in in_forward_order(student, first, view)]


def residual_writers(student: nn.Module, tracks: Tracks, view: BlockView) -> tuple[str, ...]:
    """The linears to be solved whose outputs are added to the residual stream. Raises: BadSetting where there are none."""
    linears = calibrated_modules(student, norm=False).linears
    hidden, arguments = tracks.student[0]
    with residual_streams(student, linears, hidden) as seen:
        step(student, view.stack, hidden, arguments)
    writers = tuple(name for name in view.modules.linears if name in seen)
    if not writers:
        reason = "no linear that is solved here puts its output into the residual stream as it is"
        raise BadSetting("calibrate.residual", view.residual, f"must be 0 for {view.name} of this model: {reason}")
    return writers


def in_forward_order(student: nn.Module, tracks: Tracks, view: BlockView) -> list[Modules]:
    """Norms one by one and linears with all others that read the same tensor, as one batch runs through them."""
    found: list[tuple[list[str], Tensor]] = []
    norms = []
    hidden, arguments = tracks.student[0]
    with module_inputs(student, view.modules.linears + view.modules.norms) as seen:
        step(student, view.stack, hidden, arguments)
    for name, x in seen.items():
        together = next((names for names, read in found if name not in view.modules.norms and same_memory(x, read)), None)
        if name in view.modules.norms:
            norms.append(name)
        if together is None or together[0] in norms:
            found.append(([name], x))
        else:
            together.append(name)
    order = view.modules.linears.index
    return [
        Modules((), tuple(names)) if names[0] in norms else Modules(tuple(sorted(names, key=order)), ()) for names, _ in found
    ]
