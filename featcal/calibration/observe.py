"""Both tracks of one task through one block as it is now: moments per site, drift; the teacher's track moves on.

Algorithm 1 takes one snapshot per block, so nothing in here depends on what is solved within the block.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from featcal.blocks.capture import module_inputs
from featcal.blocks.linear import side_by_side
from featcal.blocks.norms import normalised
from featcal.blocks.plan import Stack
from featcal.blocks.replay import step
from featcal.calibration.sites import Modules, Site, shared_sites
from featcal.calibration.tokens import Tokens, weights
from featcal.calibration.tracks import Tracks
from featcal.core.drift import Drift
from featcal.core.moments import Moments
from featcal.core.norm import NormMoments
from featcal.core.weighting import TokenRule
from featcal.errors import BadCapture

Inputs = dict[str, Tensor]  # module name -> its input (..., d)

FOLDED_SHARE = 0.5  # fold the expert's weight into C where a site puts out less than this share of what it takes in


@dataclass(frozen=True)
class BlockView:
    """What one block is to the calibration: its name, its place, its modules and how its tokens count."""

    name: str
    stack: Stack
    last: bool
    modules: Modules
    rule: TokenRule
    fed: str = ""  # keyword of what another stack feeds to the block


@dataclass
class Observation:
    """Moments of one task in one block (Eqs. 13, 52, 56) and its drift before it is calibrated."""

    sites: dict[Site, Moments] = field(default_factory=dict)
    norms: dict[str, NormMoments] = field(default_factory=dict)
    drift: Drift = field(default_factory=Drift)


def observe(student: nn.Module, teacher: nn.Module, tracks: Tracks, view: BlockView) -> Observation:
    """The snapshot of one task; moves the teacher's track on. Raises: BadCapture where an input cannot be trusted."""
    seen = Observation()
    names = view.modules.linears + view.modules.norms
    for number, mask in enumerate(tracks.masks):
        hidden, arguments = tracks.student[number]
        tokens = Tokens(hidden, mask, arguments[0].get(view.fed), tracks.fed_masks[number])
        with module_inputs(student, names) as x_cal:
            out_cal = step(student, view.stack, hidden, arguments)
        with module_inputs(teacher, names) as x_exp:
            out_exp = step(teacher, view.stack, *tracks.teacher[number])
        add_linears(seen, x_cal, x_exp, teacher, view, tokens)
        for name in view.modules.norms:
            add_norm(seen, name, x_cal[name], student.get_submodule(name), view, tokens)
        seen.drift.add(out_cal[0], out_exp[0], mask)
        tracks.teacher[number] = out_exp
    return seen


def add_linears(seen: Observation, x_cal: Inputs, x_exp: Inputs, teacher: nn.Module, view: BlockView, tokens: Tokens) -> None:
    """Add one batch to the moments of every site."""
    sites = shared_sites(x_cal, view.modules.linears, lambda name, x: weights(view.name, name, x, tokens, view.rule, view.last))
    if seen.sites and seen.sites.keys() != sites.keys():
        raise BadCapture([view.name], "its linears share inputs differently from one batch to the next")
    for site, w in sites.items():
        x, target = rows(x_cal[site[0]]), rows(x_exp[site[0]])  # (n, d), (n, d)
        W, _ = side_by_side(teacher.get_submodule(name) for name in site)  # (o, d)
        o, d = W.shape
        folded = o < FOLDED_SHARE * d
        if site not in seen.sites:
            seen.sites[site] = Moments.zero(d, o if folded else None, x.device)
        seen.sites[site].add(x, target, w.flatten(), W.to(x.dtype) if folded else None)


def add_norm(seen: Observation, name: str, x: Tensor, norm: nn.Module, view: BlockView, tokens: Tokens) -> None:
    """Add one batch to the moments of one norm; only the student's features enter."""
    z, w = rows(normalised(norm, x)), weights(view.name, name, x, tokens, view.rule, view.last)  # (n, d), rows of x
    if name not in seen.norms:
        seen.norms[name] = NormMoments.zero(z.shape[1], z.device)
    seen.norms[name].add(z, w.flatten())


def rows(x: Tensor) -> Tensor:
    """(..., d) as (n, d); half precision becomes float32, which holds its values and their products."""
    x = x.flatten(0, -2)
    return x if x.dtype == torch.float64 else x.float()
