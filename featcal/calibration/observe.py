"""Observe one block: run student and teacher and sum the moments of every input (Eqs. 13, 52, 56).

A site is the linears of a block that read the same tensor with the same token weights, such as q, k
and v: they share one Gram matrix. Legend: n rows (tokens of a batch) · d inputs · o outputs.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor, nn

from featcal.calibration.features import StudentTeacherFeatures
from featcal.core.moments import Moments, TokenRule, token_weights
from featcal.core.norm import NormSystem, norm_sums
from featcal.core.precision import HALF, product, wide
from featcal.core.ridge import RidgeSystem
from featcal.errors import BadCapture, BadSetting
from featcal.models import modules
from featcal.models.blocks import Features, module_inputs, module_outputs, residual_streams, step
from featcal.models.modules import normalised, side_by_side, solved_modules, weight_of
from featcal.models.plan import Stack
from featcal.settings import Calibration

Site = tuple[str, ...]  # names of the linears within their block, in the block's own order

# take C against the expert's output where a site has fewer outputs than this share of its inputs
FOLDED_SHARE = 0.5
# with fewer tokens of a task than this many times d, products with each token cost less than
# float64 products with the sums
FEW_TOKENS = 2
PAPER = Calibration()


class Tokens(NamedTuple):
    """Hidden states and mask of a block, and of the encoder whose output it reads."""

    hidden: Tensor  # (batch, tokens, d)
    mask: Tensor | None
    encoder: Tensor | None
    encoder_mask: Tensor | None


class Captures(NamedTuple):
    """Tensors of one batch that modules of a block read and write, by the module's name."""

    x_cal: Mapping[str, Tensor]  # inputs (..., d) of the student
    x_exp: Mapping[str, Tensor]
    y_exp: Mapping[str, Tensor]  # the teacher's outputs (..., o)
    gaps: Mapping[str, Tensor]  # β (r_exp − r_cal) of linears that write into the residual stream


@dataclass(frozen=True)
class BlockSpec:
    """The modules solved in one block, or in a part of it, and the weights of its tokens."""

    name: str
    stack: Stack
    linears: tuple[str, ...]  # names of solved modules within the block
    norms: tuple[str, ...]
    token_rule: TokenRule
    last: bool  # of its stack
    encoder_keyword: str = ""  # argument with the output of the stack that feeds this one
    settings: Calibration = PAPER
    writers: tuple[str, ...] = ()  # linears that write into the residual stream, where β > 0
    scales: Mapping[str, Tensor] = field(default_factory=dict)  # γ (o,) of scaled writers
    moves_teacher: bool = True  # the teacher's features move on while this part is observed


@dataclass
class BlockMoments:
    """Moments of one task in one block: of all samples, or of two halves if λ is "auto"."""

    tokens: int  # of the task, without padding
    sites: dict[Site, list[Moments]] = field(default_factory=dict)
    norms: dict[str, list[Tensor]] = field(default_factory=dict)  # of `norm_sums`
    expert_tokens: Counter[str] = field(default_factory=Counter)  # of a mixture, without padding


@dataclass
class Systems:
    """Normal equations of one block, of all samples or of halves, summed over tasks so far."""

    sites: dict[Site, list[RidgeSystem]] = field(default_factory=dict)
    norms: dict[str, list[NormSystem]] = field(default_factory=dict)


def observe(
    students: Sequence[nn.Module],
    teacher: nn.Module,
    features: StudentTeacherFeatures,
    specs: Mapping[int, BlockSpec],
) -> dict[int, BlockMoments]:
    """Run students' and teacher's block on one task's features; return each student's moments.

    specs: by number, of the students to observe; one has all modules of the others. A forward stops
    once all is captured, unless the teacher's features move on. Raises: BadCapture.
    """
    moments, before = {number: BlockMoments(features.tokens) for number in specs}, 0
    teacher_spec = replace(  # all that is captured of the teacher
        max(specs.values(), key=lambda s: len(s.writers)),
        linears=max((s.linears for s in specs.values()), key=len),
        norms=max((s.norms for s in specs.values()), key=len),
    )
    linears, writers, moves = teacher_spec.linears, teacher_spec.writers, teacher_spec.moves_teacher
    outputs = []
    for name in linears:
        W = weight_of(teacher.get_submodule(name))  # (o, d)
        # rounded outputs of models in half precision are computed again, in float32
        if W.dtype not in HALF and (name in writers or len(W) < FOLDED_SHARE * W.shape[1]):
            outputs.append(name)
    for batch_number, mask in enumerate(features.masks):
        x_exp, y_exp, r_exp, teacher_output = None, {}, {}, None
        for number, spec in specs.items():
            student, batch = students[number], features.students[number][batch_number]
            x_cal, _, r_cal, _ = capture(student, spec, batch, (), False)
            if x_exp is None:  # experts of a mixture see the tokens of the first student's
                x_exp = {}
                if linears or moves:
                    with modules.following(teacher, student):
                        x_exp, y_exp, r_exp, teacher_output = capture(
                            teacher, teacher_spec, features.teacher[batch_number], outputs, moves
                        )
            if set(r_cal) != set(spec.writers) or set(r_exp) != set(writers):
                problem = "their outputs are not added to the residual stream in every batch"
                raise BadCapture(writers, f"{problem} and model")
            beta = spec.settings.residual
            gaps = {name: beta * (wide(r_exp[name]) - wide(r_cal[name])) for name in spec.writers}
            for name in spec.scales.keys() & gaps:  # γ y is added; one with γ = 0 is never seen
                scale = spec.scales[name]
                gaps[name] = torch.where(scale == 0, 0, gaps[name] / wide(scale))
            encoder = batch[1][0].get(spec.encoder_keyword)
            tokens = Tokens(batch[0], mask, encoder, features.encoder_masks[batch_number])
            captured = Captures(x_cal, x_exp, y_exp, gaps)
            add_batch(moments[number], spec, student, teacher, captured, tokens, before)
            del x_cal, r_cal, gaps, captured
        before += len(batch[0])
        if moves:
            features.teacher[batch_number] = teacher_output
        # free the largest tensors of a batch before the next batch brings its own
        del x_exp, y_exp, r_exp, teacher_output, batch, encoder, tokens
    return moments


def add_batch(
    moments: BlockMoments,
    spec: BlockSpec,
    student: nn.Module,
    teacher: nn.Module,
    captured: Captures,
    tokens: Tokens,
    before: int,
) -> None:
    """Add one batch to one student's moments; sample i, from `before` on, is in half i % 2."""
    hidden, mask, *_ = tokens
    x_cal, expert_rows = captured.x_cal, modules.routed(student)
    weigh_all = partial(row_weights, spec, tokens, expert_rows)
    weighers = [weigh_all]
    if spec.settings.ridge == "auto":
        indices = torch.arange(before, before + len(hidden), device=hidden.device)[:, None]
        weighers = []
        for half in (indices % 2 == 0, indices % 2 == 1):  # (batch, 1)
            masks = [half if m is None else half * m for m in (mask, tokens.encoder_mask)]
            masked = tokens._replace(mask=masks[0], encoder_mask=masks[1])
            weighers.append(partial(row_weights, spec, masked, expert_rows))
    sites = shared_sites(x_cal, spec.linears, weigh_all)
    if moments.sites and moments.sites.keys() != sites.keys():
        problem = "its linears share inputs differently from one batch to the next"
        raise BadCapture([spec.name], problem)
    for site, w in sites.items():
        name = site[0]
        ws = [w] if len(weighers) == 1 else [weigh(name, x_cal[name]) for weigh in weighers]
        add_site(moments, site, teacher, captured, ws, spec.settings.interpolation)
    for name in spec.norms:
        x = x_cal[name]
        z = normalised(student.get_submodule(name), wide(x)).flatten(0, -2)
        sums = [norm_sums(z, weigh(name, x).flatten()) for weigh in weighers]
        earlier = moments.norms.get(name)
        moments.norms[name] = list(map(add, earlier, sums)) if earlier else sums
        del x, z
    for expert, rows in expert_rows.items():
        counted = rows if mask is None else mask.flatten()[rows].nonzero()
        moments.expert_tokens[expert] += len(counted)


def capture(
    block: nn.Module, spec: BlockSpec, features: Features, outputs: Sequence[str], whole: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], Features | None]:
    """Run a block; return inputs, outputs and residual streams by name, and the features after."""
    inputs = spec.linears + spec.norms
    x, y, r, result = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor](), None

    def enough() -> bool:  # stops the forward, and there are no features after it
        seen, wanted = (len(x), len(y), len(r)), (len(inputs), len(outputs), len(spec.writers))
        return not whole and seen == wanted

    for experts in modules.unpacked_experts(block).values():
        experts.rows = []  # the forward may stop before it reaches them
    with ExitStack() as opened:
        x = opened.enter_context(module_inputs(block, inputs, enough))
        if outputs:
            y = opened.enter_context(module_outputs(block, outputs, enough))
        if spec.writers:
            streams = residual_streams(block, spec.writers, features[0], enough, spec.scales)
            r = opened.enter_context(streams)
        result = step(block, spec.stack, *features)
    # plain copies break the cycle through `enough`, which would keep a batch's tensors until gc
    x, y, r = dict(x), dict(y), dict(r)
    return x, y, r, result


def add_site(
    moments: BlockMoments,
    site: Site,
    teacher: nn.Module,
    captured: Captures,
    ws: Sequence[Tensor],
    alpha: float,
) -> None:
    """Add one batch to the moments of a site, with token weights (...) of each part of samples."""
    y_exp, gaps = captured.y_exp, captured.gaps
    linears = [teacher.get_submodule(name) for name in site]
    widths = [len(weight_of(linear)) for linear in linears]
    x_cal = captured.x_cal[site[0]].flatten(0, -2)  # (n, d)
    x_exp = captured.x_exp[site[0]].flatten(0, -2)  # (n, d)
    d, o = x_cal.shape[1], sum(widths)
    has_gap = any(name in gaps for name in site)
    if site not in moments.sites:
        blended = o <= d and moments.tokens < FEW_TOKENS * d
        folded = blended or has_gap or o < FOLDED_SHARE * d
        shape = d, o if folded else None, x_cal.device, blended
        moments.sites[site] = [Moments.zero(*shape) for _ in ws]
    first = moments.sites[site][0]
    y = gap = None
    if first.blended:
        y = product(wide(x_cal).lerp(wide(x_exp), alpha), side_by_side(linears)[0].T)  # (n, o)
    elif first.folded and all(name in y_exp for name in site):
        parts = [y_exp[name].flatten(0, -2) for name in site]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)  # (n, o)
    elif first.folded:
        W, b = side_by_side(linears)
        y = product(x_exp, W.T)  # (n, o)
        y = y + b.to(y.dtype)
    if y is not None and has_gap:
        pairs = zip(site, widths, strict=True)
        parts = [gaps[n].flatten(0, -2) if n in gaps else y.new_zeros(len(y), o) for n, o in pairs]
        gap = torch.cat(parts, dim=1).to(y.dtype)  # (n, o)
        y = y + (alpha * gap if first.blended else gap)
    for sums, w in zip(moments.sites[site], ws, strict=True):
        sums.add(x_cal, x_exp, w.flatten(), y, gap)


def row_weights(
    spec: BlockSpec, tokens: Tokens, expert_rows: Mapping[str, Tensor], name: str, x: Tensor
) -> Tensor:
    """Return the token weights of one module's input x (..., d), shaped x.shape[:-1].

    Some modules read flattened rows, one row per head, or the encoder's tokens. Raises: BadCapture.
    """
    hidden, mask, encoder, encoder_mask = tokens
    if encoder is not None and same_memory(x, encoder):
        hidden, mask = encoder, encoder_mask
    batch, count = hidden.shape[:2]
    w = token_weights(spec.token_rule, name, spec.last, x.new_empty(batch, count, 0), mask)
    w = w if x.dtype == torch.float64 else w.float()  # (batch, tokens)
    if expert := modules.expert_of(name, expert_rows):
        return w.flatten()[expert_rows[expert]]
    if x.shape[:-1] in ((batch, count), (batch * count,)):
        return w.reshape(x.shape[:-1])
    if x.dim() == 4 and x.shape[0] == batch and count in x.shape[1:3]:
        # (batch, tokens, heads, d) or (batch, heads, tokens, d); with as many heads as tokens, the
        # axis of tokens is the one with the larger stride
        axis = max((axis for axis in (1, 2) if x.shape[axis] == count), key=x.stride)
        return w.unsqueeze(3 - axis).expand(x.shape[:-1])
    problem = f"its input has shape {tuple(x.shape)} instead of ({batch}, {count} tokens, features)"
    raise BadCapture([f"{spec.name}.{name}"], problem)


def shared_sites(
    inputs: Mapping[str, Tensor], linears: Sequence[str], weigh: Callable[[str, Tensor], Tensor]
) -> dict[Site, Tensor]:
    """Return the sites of one forward with the weights of their rows."""
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


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Return whether two live tensors are the same view of the same memory; also on meta."""
    a, b = ((t.shape, t.stride(), t.storage_offset(), t.untyped_storage()._cdata) for t in (x, y))
    return a == b


def block_parts(student: nn.Module, features: Features, spec: BlockSpec) -> list[BlockSpec]:
    """Return the parts to observe in turn: the block, or its sites and norms. Raises: BadSetting."""
    hidden, arguments = features
    if spec.settings.residual:
        with residual_streams(student, solved_modules(student)[0], hidden) as streams:
            step(student, spec.stack, hidden, arguments)
        writers = tuple(name for name in spec.linears if name in streams)
        spec = replace(spec, writers=writers, scales=streams.scales)
        if not writers:
            reason = "no linear that is solved here puts its output into the residual stream"
            expected = f"must be 0 for {spec.name} of this model: {reason} as it is"
            raise BadSetting("calibrate.residual", spec.settings.residual, expected)
    if spec.settings.order != "sites" or not spec.linears + spec.norms:
        return [spec]
    with module_inputs(student, spec.linears + spec.norms) as inputs:
        step(student, spec.stack, hidden, arguments)
    order, weight = list(inputs), torch.ones(())
    groups = [*shared_sites(inputs, spec.linears, lambda *_: weight), *((n,) for n in spec.norms)]
    parts = []
    for group in sorted(groups, key=lambda group: min(map(order.index, group))):
        names = {kind: getattr(spec, kind) for kind in ("linears", "norms", "writers")}
        chosen = {kind: tuple(n for n in own if n in group) for kind, own in names.items()}
        parts.append(replace(spec, **chosen, moves_teacher=False))
    with_linears = [number for number, part in enumerate(parts) if part.linears]
    last = max(with_linears, default=len(parts) - 1)  # after it no teacher's input is needed
    parts[last] = replace(parts[last], moves_teacher=True)
    return parts


def solved_parameters(block: nn.Module, spec: BlockSpec) -> dict[str, nn.Parameter]:
    """Return the parameters of the solved modules by name, a mixture's packed experts included."""
    owners, packed = {*spec.linears, *spec.norms}, modules.unpacked_experts(block)
    owners |= {path for path in packed if any(n.startswith(f"{path}.") for n in spec.linears)}
    named = block.named_parameters(remove_duplicate=False)
    return {name: p for name, p in named if name.rpartition(".")[0] in owners}
