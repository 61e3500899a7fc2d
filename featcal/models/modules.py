"""Read and write the linears and norms of a block, and check that they make up most of it.

Every weight is (o, d) here, also GPT-2's Conv1D. transformers 5 packs the experts of a mixture as
gate_up_proj (E, 2i, d) and down_proj (E, d, i); they are shown as linears with views of these."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from featcal.errors import BadPlan, UnknownKey
from featcal.models.plan import CHOOSE_BLOCKS, BlockPlan, blocks_of, parameter_count

PARTS = ("gate_up_proj", "down_proj")
LEAST_COVERAGE = 0.5  # share of the blocks' parameters
# of a norm's output: bfloat16 keeps 8 bits, while another kind of norm is off by far more
NORM_TOLERANCE = 0.02
ROUNDING = 1e-5  # relative difference of products that differ only in the order of their sums


class View(nn.Linear):
    """A linear whose weight (o, d) is part of another module's parameter."""

    def __init__(self, weight: Tensor):
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, None  # type: ignore[assignment]


class ExpertMLP(nn.Module):
    """One expert: down(act(gate x) · up x)."""

    def __init__(self, gate_up: Tensor, down: Tensor, act: nn.Module):
        super().__init__()
        gate, up = gate_up.chunk(2)
        self.gate_proj, self.up_proj, self.down_proj = View(gate), View(up), View(down)
        self.act_fn = act

    def forward(self, x: Tensor, hooks: bool = True) -> Tensor:
        """Return the output (tokens, d) for x (tokens, d); hooks=False skips the linears' hooks."""
        linears = (self.gate_proj, self.up_proj, self.down_proj)
        gate, up, down = (linear if hooks else linear.forward for linear in linears)
        return down(self.act_fn(gate(x)) * up(x))


class Unpacked(nn.Module):
    """Packed experts as modules "0", "1", ...; the parameters stay the packed ones."""

    def __init__(self, packed: nn.Module):
        super().__init__()
        for name in PARTS:
            self.register_parameter(name, packed.get_parameter(name))
        weights = zip(self.gate_up_proj.detach(), self.down_proj.detach(), strict=True)  # type: ignore[operator]
        for number, (gate_up, down) in enumerate(weights):
            self.add_module(str(number), ExpertMLP(gate_up, down, packed.act_fn))  # type: ignore[arg-type]
        self.rows: list[Tensor] = []  # tokens last routed to each, as rows of (batch · tokens, d)
        # the leader's rows, on which hooks see the experts run
        self.lead: list[Tensor] | None = None

    @property
    def work(self) -> int:
        """Return the floating-point operations of the last forward."""
        values = sum(p.numel() for p in self.parameters(recurse=False))
        return 2 * sum(len(rows) for rows in self.rows) * (values // max(len(self.rows), 1))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the output of the packed experts; top_k_index, top_k_weights: (tokens, k)."""
        experts: list[Any] = list(self.children())
        if top_k_index.is_meta:  # nothing is routed: give every expert an even share
            rows = top_k_index.new_empty(top_k_index.numel(), dtype=torch.long)
            routes = [(share, share) for share in rows.tensor_split(len(experts))]
        else:
            routes = [torch.where(top_k_index == i) for i in range(len(experts))]
        self.rows = [rows for rows, _ in routes]
        out = torch.zeros_like(hidden_states)
        for expert, (rows, choice) in zip(experts, routes, strict=True):
            share = expert(hidden_states[rows], hooks=self.lead is None)
            out.index_add_(0, rows, (share * top_k_weights[rows, choice, None]).to(out.dtype))
        for expert, rows in zip(experts, self.lead or (), strict=False):
            expert(hidden_states[rows])
        return out


def packed_experts(block: nn.Module) -> dict[str, nn.Module]:
    """Return by path the modules of a block that hold experts in the two packed tensors."""
    packed = {}
    for path, part in block.named_modules():
        shapes = {name: p.shape for name, p in part.named_parameters(recurse=False)}
        acts = isinstance(getattr(part, "act_fn", None), nn.Module)
        if acts and shapes.keys() == set(PARTS) and not isinstance(part, Unpacked):
            gate_up, down = (shapes[name] for name in PARTS)  # (E, 2i, d), (E, d, i)
            if len(gate_up) == len(down) == 3 and gate_up == (down[0], 2 * down[2], down[1]):
                packed[path] = part
    return packed


def unpacked_experts(block: nn.Module) -> dict[str, Unpacked]:
    """Return the unpacked experts of a block by path."""
    return {path: part for path, part in block.named_modules() if isinstance(part, Unpacked)}


@contextmanager
def unpacked(block: nn.Module) -> Iterator[None]:
    """Replace the packed experts of a block by linears inside the `with`."""
    packed = packed_experts(block)
    for path, part in packed.items():
        block.set_submodule(path, Unpacked(part))
    try:
        yield
    finally:
        for path, part in packed.items():
            block.set_submodule(path, part)


@contextmanager
def following(block: nn.Module, leader: nn.Module) -> Iterator[None]:
    """Let hooks see the block's experts run on the tokens last routed to the leader's experts."""
    parts, leading = unpacked_experts(block), unpacked_experts(leader)
    for path, part in parts.items():
        part.lead = leading[path].rows
    try:
        yield
    finally:
        for part in parts.values():
            part.lead = None


def routed(block: nn.Module) -> dict[str, Tensor]:
    """Return the tokens last routed to each expert, by the expert's path in the block."""
    experts = unpacked_experts(block).items()
    return {f"{path}.{i}": rows for path, part in experts for i, rows in enumerate(part.rows)}


def expert_of(name: str, experts: Mapping[str, object]) -> str | None:
    """Return the expert that a linear belongs to, or None if every token reaches it."""
    expert = name.rpartition(".")[0]
    return expert if expert in experts else None


@contextmanager
def same_unpacked(model: nn.Module) -> Iterator[None]:
    """Raise BadPlan if packed experts that run inside the `with` differ from their linears."""

    def compare(path: str, part: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        bound = max(ROUNDING, 4 * torch.finfo(out.dtype).eps)
        difference = float((Unpacked(part)(*args) - out).abs().max())
        if not difference <= bound * float(out.abs().max()):
            problem = f"the experts of {path} differ from plain linears by {difference:.3g}"
            raise BadPlan(type(model).__name__, problem)

    with ExitStack() as hooks:
        for path, part in packed_experts(model).items():
            hooks.enter_context(part.register_forward_hook(partial(compare, path)))
        yield


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear that can be solved, not a router that extends one."""
    if not isinstance(module, nn.Linear | Conv1D):
        return False
    forward: Any = type(module).forward
    if forward in (nn.Linear.forward, Conv1D.forward):
        return True
    weight, out = weight_of(module), None
    with torch.no_grad(), suppress(Exception):  # raised by grouped linears, which take other rows
        out = forward(module, weight[:1])
    return isinstance(out, Tensor) and out.shape == (1, len(weight))


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight of a linear as (o, d), sharing its memory."""
    weight = cast(Tensor, module.weight).detach()
    return weight.T if isinstance(module, Conv1D) else weight


def side_by_side(modules: Iterable[nn.Module]) -> tuple[Tensor, Tensor]:
    """Return weight (Σo, d) and bias (Σo,), 0 where there is none, of linears of one site."""
    pairs = [(weight_of(module), shift_of(module)) for module in modules]
    biases = [W.new_zeros(len(W)) if b is None else b for W, b in pairs]
    return torch.cat([W for W, _ in pairs]), torch.cat(biases)


def load_side_by_side(modules: Iterable[nn.Module], weight: Tensor, bias: Tensor | None) -> None:
    """Write weight (Σo, d) and bias (Σo,), unless None, into the linears in their own dtype."""
    start = 0
    for module in modules:
        target = weight_of(module)
        rows = slice(start, start + target.shape[0])
        target.copy_(weight[rows])
        if bias is not None and (shift := shift_of(module)) is not None:
            shift.copy_(bias[rows])
        start = rows.stop


def is_norm(module: nn.Module) -> bool:
    """Return whether a module has a scale and is named as a norm of its last axis."""
    weight = getattr(module, "weight", None)
    named = type(module).__name__.endswith(("RMSNorm", "LayerNorm"))
    norm = named or isinstance(module, nn.LayerNorm)
    return norm and isinstance(weight, nn.Parameter) and weight.dim() == 1


def shift_of(module: nn.Module) -> Tensor | None:
    """Return the shift (d,) of a norm, or bias of a linear, or None if it has none, as RMSNorm."""
    shift = getattr(module, "bias", None)
    return shift.detach() if isinstance(shift, Tensor) else None


def normalised(module: nn.Module, x: Tensor) -> Tensor:
    """Return LN₀(x) of Eq. 56: x (..., d) normalised with the module's ε, not scaled or shifted."""
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, eps=module.eps)
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + (eps or torch.finfo(x.dtype).eps))


def is_solvable_norm(module: nn.Module) -> bool:
    """Return whether a norm scales and shifts `normalised`, tested on a few values."""
    weight, shift = module.get_parameter("weight").detach(), shift_of(module)
    x = torch.linspace(-1, 2, weight.numel(), dtype=weight.dtype, device=weight.device)[None]
    z, scaled = normalised(module, x), torch.full_like(x, torch.nan)
    with torch.no_grad(), suppress(Exception):  # raised by norms of another axis
        scaled = module(x) if shift is None else module(x) - shift
    size = scaled.norm().clamp_min(torch.finfo(x.dtype).tiny)
    # Gemma's norms multiply by 1 + weight, which Eqs. 56-59 allow: the 1 is added to the solution
    errors = [float((scaled - z * scale).norm() / size) for scale in (weight, 1 + weight)]
    return min(errors) <= NORM_TOLERANCE


def solved_modules(
    block: nn.Module, norm: bool = True, modules: Sequence[str] | None = None
) -> tuple[list[str], list[str]]:
    """Return the names of a block's linears and norms in its order; `modules` selects linears."""
    named = list(block.named_modules())
    linears = [n for n, m in named if is_linear(m) and (modules is None or _selected(n, modules))]
    return linears, [n for n, m in named if norm and is_norm(m)]


def _selected(name: str, ends: Iterable[str]) -> bool:
    """Return whether a path ends in one of `ends`; q selects layer.0.SelfAttention.q."""
    return any(f".{name}".endswith(f".{end}") for end in ends)


def tied_names(module: nn.Module) -> list[list[str]]:
    """Return the names of each parameter; several if it is tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def covered(
    block: nn.Module, norm: bool = True, modules: Sequence[str] | None = None
) -> list[nn.Parameter]:
    """Return the parameters of a block's linears, norms and packed experts."""
    linears, norms = solved_modules(block, norm, modules)
    parts = [*map(block.get_submodule, (*linears, *norms)), *packed_experts(block).values()]
    return [p for part in parts for p in part.parameters(recurse=False)]


def check_blocks(
    model: nn.Module, plan: BlockPlan, norm: bool = True, modules: Sequence[str] | None = None
) -> list[str]:
    """Return the names of the linears that are solved. Raises: BadPlan unless linears and norms
    hold most parameters of every stack and share none; UnknownKey for an unused name in `modules`.
    """
    shared = {id(model.get_parameter(names[0])): names for names in tied_names(model) if names[1:]}
    linears = set[str]()
    for stack in plan.stacks:
        blocks = blocks_of(model, stack)
        solved = {id(p) for block in blocks for p in covered(block)}
        others = {name: p for name, p in blocks.named_parameters() if id(p) not in solved}
        share = 1 - sum(p.numel() for p in others.values()) / max(1, parameter_count(blocks))
        if share < LEAST_COVERAGE:
            largest = sorted(others, key=lambda name: (-others[name].numel(), name))[:2]
            names = ", ".join(f"{stack.blocks}.{n} {[*others[n].shape]}" for n in largest)
            problem = f"only {share:.0%} of the parameters of {stack.blocks!r} belong to linears "
            problem += f"and norms, at least {LEAST_COVERAGE:.0%} must; the largest others: {names}"
            raise BadPlan(type(model).__name__, problem, CHOOSE_BLOCKS)
        for block in blocks:
            if doubled := [id(p) for p in covered(block, norm, modules) if id(p) in shared]:
                name, other = shared[doubled[0]][:2]
                problem = f"{name} and {other} are one tensor, but each needs its own solution"
                raise BadPlan(type(model).__name__, problem, CHOOSE_BLOCKS)
            with unpacked(block):
                linears.update(solved_modules(block)[0])
    for end in modules or ():
        if not any(_selected(name, [end]) for name in linears):
            ends = sorted({name.rpartition(".")[2] for name in linears})
            raise UnknownKey("calibrate.modules", end, ends)
    return sorted(name for name in linears if modules is None or _selected(name, modules))
