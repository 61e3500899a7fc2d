"""Run both tracks of one task through a block as it is now: sum its moments per site and move the
teacher's track on.

Algorithm 1 takes one snapshot per block, so nothing here depends on what is solved in the block.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from featcal.blocks.capture import module_inputs, module_outputs
from featcal.blocks.experts import following, routed
from featcal.blocks.linear import side_by_side, weight_of
from featcal.blocks.norms import normalised
from featcal.blocks.plan import Stack
from featcal.blocks.replay import step
from featcal.blocks.residual import residual_streams
from featcal.calibration.sites import Modules, Site, shared_sites
from featcal.calibration.tokens import Tokens, weights
from featcal.calibration.tracks import Tracks
from featcal.core.moments import Moments
from featcal.core.norm import NormMoments
from featcal.core.precision import HALF, product, wide
from featcal.core.weighting import TokenRule
from featcal.errors import BadCapture

Inputs = dict[str, Tensor]  # module name -> its input (..., d)

# take C against the expert's output where a site puts out less than this share of what it takes in
FOLDED_SHARE = 0.5


@dataclass(frozen=True)
class BlockView:
    """One block, or a part of it, as calibration sees it."""

    name: str
    stack: Stack
    last: bool
    modules: Modules
    rule: TokenRule
    fed: str = ""  # keyword of what another stack feeds to the block
    residual: float = 0.0  # β
    writers: tuple[
        str, ...
    ] = ()  # linears whose outputs are added to the residual stream, where β > 0


@dataclass
class Observation:
    """Moments of one task in one block (Eqs. 13, 52, 56)."""

    sites: dict[Site, Moments] = field(default_factory=dict)
    norms: dict[str, NormMoments] = field(default_factory=dict)
    experts: dict[str, int] = field(
        default_factory=dict
    )  # of a mixture: tokens without padding that each is given


def observe(
    student: nn.Module,
    teacher: nn.Module,
    tracks: Tracks,
    view: BlockView,
    last: bool = True,
    proving: bool = True,
) -> Observation:
    """Return the moments of one task.

    Args:
        last: move the teacher's track on; otherwise the teacher stops at the last input needed.
        proving: run the first batch through the student's whole block, to prove that no captured
            input is overwritten later. All other passes stop at the last input needed.

    Raises: BadCapture where an input cannot be trusted.
    """
    seen = Observation()
    linears, names = view.modules.linears, view.modules.linears + view.modules.norms
    writers = [name for name in linears if name in view.writers]
    narrow = narrow_linears(teacher, linears, writers)
    for number, mask in enumerate(tracks.masks):
        hidden, arguments = tracks.student[number]
        with watching(student, names, (), writers, hidden, whole=proving and number == 0) as cal:
            step(student, view.stack, hidden, arguments)
        tokens = Tokens(
            hidden, mask, arguments[0].get(view.fed), tracks.fed_masks[number], routed(student)
        )
        with (
            following(teacher, student),
            watching(teacher, linears, narrow, writers, hidden, whole=last) as exp,
        ):
            if linears or last:
                out_exp = step(teacher, view.stack, *tracks.teacher[number])
        if exp.r.keys() != set(writers) or cal.r.keys() != set(writers):
            raise BadCapture(
                writers,
                "their outputs are not added to the residual stream in every batch and model",
            )
        gaps = {name: view.residual * (wide(exp.r[name]) - wide(cal.r[name])) for name in writers}
        for expert, chosen in tokens.routed.items():
            counted = chosen if mask is None else mask.flatten()[chosen].nonzero()
            seen.experts[expert] = seen.experts.get(expert, 0) + len(counted)
        add_linears(seen, cal.x, Expert(teacher, exp.x, exp.y, gaps), view, tokens)
        for name in view.modules.norms:
            add_norm(seen, name, cal.x[name], student.get_submodule(name), view, tokens)
        if last:
            tracks.teacher[number] = out_exp
        del cal, exp, gaps  # the largest tensors of a batch, before the next one brings its own
    return seen


@dataclass(frozen=True)
class Seen:
    """Tensors captured during one forward of a block."""

    x: Inputs  # inputs of modules
    y: Inputs  # outputs of linears
    r: Inputs  # residual streams that outputs of linears are added to


@contextmanager
def watching(
    block: nn.Module,
    names: Sequence[str],
    narrow: Sequence[str],
    writers: Sequence[str],
    hidden: Tensor,
    whole: bool,
) -> Iterator[Seen]:
    """Capture tensors during the next forward, which unless `whole` stops once all are seen."""

    def enough() -> bool:
        return (
            not whole and len(x) == len(names) and len(y) == len(narrow) and len(r) == len(writers)
        )

    with ExitStack() as opened:
        x = opened.enter_context(module_inputs(block, names, enough))
        y = opened.enter_context(module_outputs(block, narrow, enough)) if narrow else {}
        r = (
            opened.enter_context(residual_streams(block, writers, hidden, enough))
            if writers
            else {}
        )
        yield Seen(x, y, r)


def narrow_linears(
    teacher: nn.Module, linears: Sequence[str], writers: Collection[str] = ()
) -> list[str]:
    """Return the linears whose outputs may serve in folded moments; in half precision none, as
    rounding would enter.
    """
    found = [(name, weight_of(teacher.get_submodule(name))) for name in linears]
    folded = [
        (name, W) for name, W in found if name in writers or W.shape[0] < FOLDED_SHARE * W.shape[1]
    ]
    return [name for name, W in folded if W.dtype not in HALF]


@dataclass(frozen=True)
class Expert:
    """Inputs of the linears of an expert's block for one batch, and the outputs of some."""

    block: nn.Module
    x: Inputs
    y: Inputs
    gaps: Inputs  # β (r_exp − r_cal) of linears that write into the residual stream

    def outputs(self, site: Site) -> Tensor:
        """Return W x + b (n, o) of a site's linears side by side, computed only where not
        captured.
        """
        if all(name in self.y for name in site):
            return (
                torch.cat([rows(self.y[name]) for name in site], dim=1)
                if site[1:]
                else rows(self.y[site[0]])
            )
        W, b = side_by_side(self.block.get_submodule(name) for name in site)
        y = product(rows(self.x[site[0]]), W.T)  # (n, o)
        return y + b.to(y.dtype)

    def residual_gap(self, site: Site, like: Tensor) -> Tensor:
        """Return the gaps (n, o) of a site; 0 in the columns of linears that do not write into the
        residual stream.
        """
        widths = {name: len(weight_of(self.block.get_submodule(name))) for name in site}
        parts = [
            rows(self.gaps[n]) if n in self.gaps else like.new_zeros(len(like), width)
            for n, width in widths.items()
        ]
        return torch.cat(parts, dim=1)


def add_linears(
    seen: Observation, x_cal: Inputs, expert: Expert, view: BlockView, tokens: Tokens
) -> None:
    """Add one batch to the moments of every site."""
    sites = shared_sites(
        x_cal,
        view.modules.linears,
        lambda name, x: weights(view.name, name, x, tokens, view.rule, view.last),
    )
    if seen.sites and seen.sites.keys() != sites.keys():
        raise BadCapture(
            [view.name], "its linears share inputs differently from one batch to the next"
        )
    for site, w in sites.items():
        x, target = rows(x_cal[site[0]]), rows(expert.x[site[0]])  # (n, d), (n, d)
        has_gap = any(name in expert.gaps for name in site)
        if site not in seen.sites:
            d, o = (
                x.shape[1],
                sum(len(weight_of(expert.block.get_submodule(name))) for name in site),
            )
            width = o if has_gap or o < FOLDED_SHARE * d else None
            seen.sites[site] = Moments.zero(d, width, x.device, has_gap)
        moments, outputs = seen.sites[site], None
        if moments.folded:
            outputs = expert.outputs(site)
        moments.add(
            x,
            target,
            w.flatten(),
            outputs,
            expert.residual_gap(site, outputs) if has_gap and outputs is not None else None,
        )


def add_norm(
    seen: Observation, name: str, x: Tensor, norm: nn.Module, view: BlockView, tokens: Tokens
) -> None:
    """Add one batch of the student's features to the moments of one norm."""
    z, w = (
        rows(normalised(norm, wide(x))),
        weights(view.name, name, x, tokens, view.rule, view.last),
    )  # (n, d), rows of x
    if name not in seen.norms:
        seen.norms[name] = NormMoments.zero(z.shape[1], z.device)
    seen.norms[name].add(z, w.flatten())


def rows(x: Tensor) -> Tensor:
    """Flatten (..., d) to (n, d)."""
    return x.flatten(0, -2)
