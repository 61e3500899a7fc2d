"""Read and write the linears and norms of a block, and check that they make up most of it.

nn.Linear stores its weight as (o, d), GPT-2's Conv1D as (d, o); here every weight is (o, d).
Linears of one site, which read the same input, are read and written stacked.
"""

from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from featcal.errors import BadPlan, UnknownKey
from featcal.models.moe import packed_experts, unpacked
from featcal.models.plan import CHOOSE_BLOCKS, BlockPlan, blocks_of, parameter_count

LEAST_COVERAGE = 0.5  # share of the blocks' parameters
# of a norm's output: bfloat16 keeps 8 bits, while another kind of norm is off by far more
NORM_TOLERANCE = 0.02


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear that can be solved."""
    return isinstance(module, nn.Linear | Conv1D)


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight of a linear as (o, d), sharing its memory."""
    weight = cast(Tensor, module.weight).detach()
    return weight.T if isinstance(module, Conv1D) else weight


def side_by_side(modules: Iterable[nn.Module]) -> tuple[Tensor, Tensor]:
    """Return weight (Σo, d) and bias (Σo,), 0 where there is none, of linears of one site."""
    weights, biases = [], []
    for module in modules:
        weights.append(weight_of(module))
        own = isinstance(module.bias, Tensor)
        biases.append(module.bias.detach() if own else weights[-1].new_zeros(len(weights[-1])))
    return torch.cat(weights), torch.cat(biases)


def load_side_by_side(modules: Iterable[nn.Module], weight: Tensor, bias: Tensor | None) -> None:
    """Write weight (Σo, d) and bias (Σo,), unless None, into the linears in their own dtype."""
    start = 0
    for module in modules:
        target = weight_of(module)
        rows = slice(start, start + target.shape[0])
        target.copy_(weight[rows])
        if bias is not None and isinstance(module.bias, Tensor):
            module.bias.detach().copy_(bias[rows])
        start = rows.stop


def is_norm(module: nn.Module) -> bool:
    """Return whether a module has a scale and is named as a norm of its last axis."""
    weight = getattr(module, "weight", None)
    named = type(module).__name__.endswith(("RMSNorm", "LayerNorm"))
    norm = named or isinstance(module, nn.LayerNorm)
    return norm and isinstance(weight, Tensor) and weight.dim() == 1


def shift_of(module: nn.Module) -> Tensor | None:
    """Return the shift (d,) of a norm, or None if it has none, as RMSNorm."""
    shift = getattr(module, "bias", None)
    return shift.detach() if isinstance(shift, Tensor) else None


def normalised(module: nn.Module, x: Tensor) -> Tensor:
    """Return LN₀(x) of Eq. 56: x (..., d) normalised with the module's ε, not scaled or shifted."""
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, eps=module.eps)
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + (eps or torch.finfo(x.dtype).eps))


def is_solvable_norm(module: nn.Module) -> bool:
    """Return whether a norm scales and shifts `normalised`, tested on a few values.

    Gemma's norms multiply by 1 + weight, which Eqs. 56-59 allow: the 1 is added to the solution.
    """
    weight, shift = module.get_parameter("weight").detach(), shift_of(module)
    x = torch.linspace(-1, 2, weight.numel(), dtype=weight.dtype, device=weight.device)[None]
    z = normalised(module, x)
    with torch.no_grad():
        scaled = module(x) if shift is None else module(x) - shift
    size = scaled.norm().clamp_min(torch.finfo(x.dtype).tiny)
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


def uncovered(block: nn.Module) -> dict[str, nn.Parameter]:
    """Return the other parameters of a block by name."""
    solved = {id(p) for p in covered(block)}
    return {name: p for name, p in block.named_parameters() if id(p) not in solved}


def check_blocks(
    model: nn.Module, plan: BlockPlan, norm: bool = True, modules: Sequence[str] | None = None
) -> None:
    """Raise BadPlan unless linears and norms have most parameters of every stack, each its own.

    Raises: UnknownKey for a name in `modules` that selects no linear of any block.
    """
    shared = {id(model.get_parameter(names[0])): names for names in tied_names(model) if names[1:]}
    linears = set[str]()
    for stack in plan.stacks:
        blocks = blocks_of(model, stack)
        others = {
            f"{i}.{n}": p for i, each in enumerate(blocks) for n, p in uncovered(each).items()
        }
        share = 1 - sum(p.numel() for p in others.values()) / max(1, parameter_count(blocks))
        if share < LEAST_COVERAGE:
            largest = sorted(others, key=lambda name: (-others[name].numel(), name))[:2]
            shapes = (f"{stack.blocks}.{name} {list(others[name].shape)}" for name in largest)
            problem = (
                f"only {share:.0%} of the parameters of {stack.blocks!r} belong to linears and "
                f"norms, at least {LEAST_COVERAGE:.0%} must; the largest others: {', '.join(shapes)}"
            )
            raise BadPlan(type(model).__name__, problem, CHOOSE_BLOCKS)
        for block in blocks:
            doubled = [id(p) for p in covered(block, norm, modules) if id(p) in shared]
            if doubled:
                one, other = shared[doubled[0]][:2]
                problem = f"{one} and {other} are one tensor, but each needs its own solution"
                raise BadPlan(type(model).__name__, problem, CHOOSE_BLOCKS)
            with unpacked(block):
                linears.update(solved_modules(block)[0])
    for end in modules or ():
        if not any(_selected(name, [end]) for name in linears):
            known = sorted({name.rpartition(".")[2] for name in linears})
            raise UnknownKey("calibrate.modules", end, known)
