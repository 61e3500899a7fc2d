"""Both tracks of one task through one block as it is now: moments per site; the teacher's track
moves on.

Algorithm 1 takes one snapshot per block, so nothing in here depends on what is solved within the
block.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from featcal.blocks.attention import attention_scores, received
from featcal.blocks.capture import module_inputs, module_outputs
from featcal.blocks.experts import expert_of, following, routed
from featcal.blocks.linear import side_by_side, weight_of
from featcal.blocks.norms import normalised
from featcal.blocks.plan import Stack
from featcal.blocks.replay import step
from featcal.blocks.residual import residual_streams
from featcal.calibration.sites import Modules, Site, shared_sites
from featcal.calibration.tokens import Tokens, same_memory, weights
from featcal.calibration.tracks import Tracks
from featcal.core.moments import Moments, Rows
from featcal.core.norm import NormMoments
from featcal.core.precision import HALF, product, wide
from featcal.core.weighting import TokenRule
from featcal.errors import BadCapture

Inputs = dict[str, Tensor]  # module name -> its input (..., d)

# take C against the expert's output where a site puts out less than this share of what it takes in
FOLDED_SHARE = 0.5


@dataclass(frozen=True)
class BlockView:
    """What one block is to the calibration: its name, its place, its modules and how its tokens
    count.
    """

    name: str
    stack: Stack
    last: bool
    modules: Modules
    rule: TokenRule
    fed: str = ""  # keyword of what another stack feeds to the block
    residual: float = 0.0  # β
    attention: bool = False  # tokens count by what they receive in the expert's attention, too
    spread: bool = False  # moments hold what λ is estimated from
    tokens: int | None = (
        # of all tasks, where sites with more features than that keep them; None: sums everywhere
        None
    )
    writers: tuple[
        str, ...
    ] = ()  # linears whose outputs are added to the residual stream, where β > 0


@dataclass
class Observation:
    """Moments of one task in one block (Eqs. 13, 52, 56), at sites of few tokens these
    themselves.
    """

    sites: dict[Site, Moments | Rows] = field(default_factory=dict)
    norms: dict[str, NormMoments] = field(default_factory=dict)
    experts: dict[str, int] = field(
        default_factory=dict
    )  # of a mixture: tokens without padding that each is given


def observe(
    student: nn.Module,
    teacher: nn.Module,
    tracks: Tracks,
    view: BlockView,
    first: bool = True,
    last: bool = True,
    proving: bool = True,
) -> Observation:
    """The snapshot of one task; moves the teacher's track on.

    A view may be part of a block: the teacher's track moves on with the last part that needs the
    teacher, but for batches held
    out, which move with the first: of them the teacher's output is all that is needed.

    A block is left as soon as everything is seen that is needed of it, but for the teacher's whose
    track moves on. Where `proving`, as with the first task of a block, the first batch runs through
    all of the student's, to prove that what is captured stays as it was read.
    Raises: BadCapture where an input cannot be trusted.
    """
    seen = Observation()
    linears, names = view.modules.linears, view.modules.linears + view.modules.norms
    writers = [name for name in linears if name in view.writers]
    narrow = narrow_linears(teacher, linears, writers)
    for number, mask in enumerate(tracks.masks):
        if number in tracks.held:
            if first:
                tracks.teacher[number] = step(teacher, view.stack, *tracks.teacher[number])
            continue
        hidden, arguments = tracks.student[number]
        with watching(student, names, (), writers, hidden, whole=proving and number == 0) as cal:
            step(student, view.stack, hidden, arguments)
        tokens = Tokens(
            hidden, mask, arguments[0].get(view.fed), tracks.fed_masks[number], routed(student)
        )
        with ExitStack() as opened:
            opened.enter_context(following(teacher, student))
            scores = opened.enter_context(attention_scores()) if view.attention else []
            exp = opened.enter_context(
                watching(teacher, linears, narrow, writers, hidden, whole=last or view.attention)
            )
            if linears or last or view.attention:
                out_exp = step(teacher, view.stack, *tracks.teacher[number])
        if exp.r.keys() != set(writers) or cal.r.keys() != set(writers):
            raise BadCapture(
                writers,
                "their outputs are not added to the residual stream in every batch and model",
            )
        if view.attention:
            own, fed = received(view.name, scores, hidden, mask, tokens.fed, tokens.fed_mask)
            tokens = replace(tokens, received=own, fed_received=fed)
        lags = {name: view.residual * (wide(exp.r[name]) - wide(cal.r[name])) for name in writers}
        for expert, chosen in tokens.routed.items():
            counted = chosen if mask is None else mask.flatten()[chosen].nonzero()
            seen.experts[expert] = seen.experts.get(expert, 0) + len(counted)
        add_linears(seen, cal.x, Expert(teacher, exp.x, exp.y, lags), view, tokens)
        for name in view.modules.norms:
            add_norm(seen, name, cal.x[name], student.get_submodule(name), view, tokens)
        if last:
            tracks.teacher[number] = out_exp
        del cal, exp, lags  # the largest tensors of a batch, before the next one brings its own
    return seen


@dataclass(frozen=True)
class Seen:
    """What one forward of a block has shown."""

    x: Inputs  # what modules read
    y: Inputs  # what linears put out
    r: Inputs  # the residual streams that outputs of linears are added to


@contextmanager
def watching(
    block: nn.Module,
    names: Sequence[str],
    narrow: Sequence[str],
    writers: Sequence[str],
    hidden: Tensor,
    whole: bool,
) -> Iterator[Seen]:
    """What the next forward shows of the modules; unless it is wanted whole it ends, and the `with`
    with it, when all is seen.
    """

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
    """The linears whose outputs may serve in folded moments; half precision rounds them, so there
    they are computed anew.
    """
    found = [(name, weight_of(teacher.get_submodule(name))) for name in linears]
    folded = [
        (name, W) for name, W in found if name in writers or W.shape[0] < FOLDED_SHARE * W.shape[1]
    ]
    return [name for name, W in folded if W.dtype not in HALF]


@dataclass(frozen=True)
class Expert:
    """One batch of an expert's block: the inputs of its linears, and the outputs of some."""

    block: nn.Module
    x: Inputs
    y: Inputs
    lags: Inputs  # β (r_exp − r_cal) of linears that write into the residual stream

    def outputs(self, site: Site) -> Tensor:
        """W x + b (n, o) of the linears of a site side by side, from what they put out where that
        was kept.
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

    def lag(self, site: Site, like: Tensor) -> Tensor:
        """What the student's residual stream lacks, in the columns (n, o) of the linears that write
        into it; 0 in the others.
        """
        widths = {name: len(weight_of(self.block.get_submodule(name))) for name in site}
        parts = [
            rows(self.lags[n]) if n in self.lags else like.new_zeros(len(like), width)
            for n, width in widths.items()
        ]
        return torch.cat(parts, dim=1)


def add_linears(
    seen: Observation, x_cal: Inputs, expert: Expert, view: BlockView, tokens: Tokens
) -> None:
    """Add one batch to the moments of every site, or to its tokens."""
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
        lagging = any(name in expert.lags for name in site)
        if site not in seen.sites:
            d, o = (
                x.shape[1],
                sum(len(weight_of(expert.block.get_submodule(name))) for name in site),
            )
            width = o if lagging or o < FOLDED_SHARE * d else None
            small = (
                keeps_tokens(site, x_cal[site[0]], tokens)
                and view.tokens is not None
                and view.tokens < d
            )
            seen.sites[site] = (
                Rows() if small else Moments.zero(d, width, x.device, lagging, view.spread)
            )
        moments, outputs = seen.sites[site], None
        if isinstance(moments, Rows):
            moments.add(x, target, w.flatten(), expert.lag(site, wide(x)) if lagging else None)
            continue
        if moments.folded:
            outputs = expert.outputs(site)
        moments.add(
            x,
            target,
            w.flatten(),
            outputs,
            expert.lag(site, outputs) if lagging and outputs is not None else None,
        )


def keeps_tokens(site: Site, x: Tensor, tokens: Tokens) -> bool:
    """Whether a site reads as many tokens as the block does: not those of another stack, nor a
    mixture's expert its own.
    """
    return not (
        expert_of(site[0], tokens.routed) or (tokens.fed is not None and same_memory(x, tokens.fed))
    )


def add_norm(
    seen: Observation, name: str, x: Tensor, norm: nn.Module, view: BlockView, tokens: Tokens
) -> None:
    """Add one batch to the moments of one norm; only the student's features enter."""
    z, w = (
        rows(normalised(norm, wide(x))),
        weights(view.name, name, x, tokens, view.rule, view.last),
    )  # (n, d), rows of x
    if name not in seen.norms:
        seen.norms[name] = NormMoments.zero(z.shape[1], z.device)
    seen.norms[name].add(z, w.flatten())


def rows(x: Tensor) -> Tensor:
    """(..., d) as (n, d)."""
    return x.flatten(0, -2)
