"""Match the rows of a module's input to tokens, and weigh them.

Most inputs are (batch, tokens, d). Some modules read flattened rows (rows, d), norms of attention
read one row per head, and keys and values of cross-attention read another stack's tokens, which
have their own padding."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from featcal.calibration.features import StudentTeacherFeatures
from featcal.core.moments import Moments, TokenRule, token_weights
from featcal.core.norm import NormMoments, NormSystem
from featcal.core.precision import HALF, product, wide
from featcal.core.ridge import RidgeSystem
from featcal.errors import BadCapture, BadSetting
from featcal.models.capture import Arguments, module_inputs, module_outputs, residual_streams
from featcal.models.modules import normalised, side_by_side, solved_modules, weight_of
from featcal.models.moe import expert_of, following, routed, unpacked_experts
from featcal.models.plan import Stack
from featcal.models.replay import step
from featcal.settings import Calibration


@dataclass(frozen=True)
class Tokens:
    """The tokens of one batch in one stack, and those fed to it by another stack."""

    hidden: Tensor  # (batch, tokens, d), what reaches the block
    mask: Tensor | None = None  # (batch, tokens), 0 at padding
    fed: Tensor | None = None  # (batch, other tokens, d)
    fed_mask: Tensor | None = None
    routed: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # expert of a mixture -> row numbers of the tokens it is given


def weights(
    place: str, name: str, x: Tensor, tokens: Tokens, rule: TokenRule, last: bool
) -> Tensor:
    """Return the token weights of one module's input x (..., d), shaped x.shape[:-1].

    Raises: BadCapture where the rows are not the tokens of the batch.
    """
    hidden, mask = tokens.hidden, tokens.mask
    if tokens.fed is not None and same_memory(x, tokens.fed):
        hidden, mask = tokens.fed, tokens.fed_mask
    batch, count = hidden.shape[:2]
    w = token_weights(rule, name, last, x.new_empty(batch, count, 0), mask)  # (batch, tokens)
    w = w if x.dtype == torch.float64 else w.float()
    if expert := expert_of(name, tokens.routed):
        return w.flatten()[tokens.routed[expert]]
    if x.shape[:-1] == (batch, count):
        return w
    if x.shape[:-1] == (batch * count,):
        return w.flatten()
    axis = token_axis(x, batch, count)
    if axis is None:
        wanted = f"instead of ({batch} sequences, {count} tokens, features)"
        raise BadCapture([f"{place}.{name}"], f"its input has shape {tuple(x.shape)} {wanted}")
    return w.unsqueeze(2 if axis == 1 else 1).expand(x.shape[:-1])


def token_axis(x: Tensor, batch: int, count: int) -> int | None:
    """Return the token axis of (batch, tokens, heads, d) or (batch, heads, tokens, d).

    With as many heads as tokens it is the axis with the larger stride.
    """
    if x.dim() != 4 or x.shape[0] != batch:
        return None
    fitting = [axis for axis in (1, 2) if x.shape[axis] == count]
    return max(fitting, key=x.stride, default=None)


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Return whether two live tensors are the same view of the same memory; also for meta
    tensors.
    """
    alike = (
        x.shape == y.shape and x.stride() == y.stride() and x.storage_offset() == y.storage_offset()
    )
    return alike and x.untyped_storage()._cdata == y.untyped_storage()._cdata


Site = tuple[str, ...]  # names of the linears within their block, in the block's own order
Weigh = Callable[
    [str, Tensor], Tensor
]  # module name and its input (batch, tokens, d) -> weights of its rows


@dataclass(frozen=True)
class Modules:
    """Names of the modules of one block that are solved."""

    linears: tuple[str, ...]
    norms: tuple[str, ...]


@dataclass
class Systems:
    """The normal equations of one block, summed over the tasks added so far."""

    sites: dict[Site, RidgeSystem] = field(default_factory=dict)
    norms: dict[str, NormSystem] = field(default_factory=dict)


def calibrated_modules(
    block: nn.Module, norm: bool, modules: Sequence[str] | None = None
) -> Modules:
    """Return the linears of the block that `modules` names (default: all) and, with `norm`, its
    norms.
    """
    linears, norms = solved_modules(block, norm, modules)
    return Modules(tuple(linears), tuple(norms))


def shared_sites(
    inputs: Mapping[str, Tensor], linears: Sequence[str], weigh: Weigh
) -> dict[Site, Tensor]:
    """Return the sites of one forward with the weights of their rows, (batch, tokens)."""
    groups: list[tuple[list[str], Tensor]] = []
    for name in linears:
        x, w = inputs[name], weigh(name, inputs[name])
        for names, weights in groups:
            if same_memory(x, inputs[names[0]]) and torch.equal(w, weights):
                names.append(name)
                break
        else:
            groups.append(([name], w))
    return {tuple(names): weights for names, weights in groups}


def solved_parameters(block: nn.Module, modules: Modules) -> dict[str, nn.Parameter]:
    """Return the parameters of the solved modules by name within the block; for experts of a
    mixture the packed ones.
    """
    named = {
        name: block.get_submodule(name).named_parameters(recurse=False)
        for name in (*modules.linears, *modules.norms)
    }
    packed = {
        path: part.named_parameters(recurse=False) for path, part in unpacked_experts(block).items()
    }
    named |= {
        path: parts
        for path, parts in packed.items()
        if any(name.startswith(f"{path}.") for name in modules.linears)
    }
    return {f"{name}.{part}": p for name, parts in named.items() for part, p in parts}


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
    tracks: StudentTeacherFeatures,
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


def block_parts(
    student: nn.Module,
    tracks: Mapping[str, StudentTeacherFeatures],
    view: BlockView,
    settings: Calibration,
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


def residual_writers(
    student: nn.Module, tracks: StudentTeacherFeatures, view: BlockView
) -> tuple[str, ...]:
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


def in_forward_order(
    student: nn.Module, tracks: StudentTeacherFeatures, view: BlockView
) -> list[Modules]:
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
