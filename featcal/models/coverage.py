"""What a plan's blocks hold that calibration can solve, and the refusal of models where that is too
little or shared.

A weight that a second place uses too would be solved for one place and change both; weights held in
a tensor of their own form are under no linear, so nothing would be solved where most of the model
is."""

from collections.abc import Sequence

from torch import nn

from featcal.errors import BadPlan, UnknownKey
from featcal.models.modules import is_linear, is_norm
from featcal.models.moe import packed_experts, unpacked
from featcal.models.plan import BlockPlan, Stack, blocks_of, parameter_count

LEAST_COVERAGE = 0.5  # of the blocks' parameters
NO_WAY = "this model cannot be calibrated as a whole; other blocks are named with plan=featcal.BlockPlan(...)"


def solved_modules(
    block: nn.Module, norm: bool = True, modules: Sequence[str] | None = None
) -> tuple[list[str], list[str]]:
    """Names of the linears and of the norms of a block, in its own order; of the linears those that
    `modules` means.
    """
    named = list(block.named_modules())
    linears = [
        n
        for n, m in named
        if is_linear(m) and (modules is None or any(ends(n, end) for end in modules))
    ]
    return linears, [n for n, m in named if norm and is_norm(m)]


def ends(name: str, end: str) -> bool:
    """Whether a module is meant by its last names: layer.0.SelfAttention.q by q and by
    SelfAttention.q.
    """
    return f".{name}".endswith(f".{end}")


def check_modules(model: nn.Module, plan: BlockPlan, modules: Sequence[str] | None) -> None:
    """Raise UnknownKey for a name that is none of a linear's in any block; a stack may do without
    it, as T5's encoder may.
    """
    linears = set[str]()
    for stack in plan.stacks:
        for block in blocks_of(model, stack):
            with unpacked(block):
                linears.update(solved_modules(block)[0])
    for end in modules or ():
        if not any(ends(name, end) for name in linears):
            raise UnknownKey(
                "calibrate.modules", end, sorted({name.rpartition(".")[2] for name in linears})
            )


def covered(
    block: nn.Module, norm: bool = True, modules: Sequence[str] | None = None
) -> list[nn.Parameter]:
    """Parameters of a block that belong to its linears and norms, and to experts in tensors of
    their own.
    """
    linears, norms = solved_modules(block, norm, modules)
    parts = [*map(block.get_submodule, (*linears, *norms)), *packed_experts(block).values()]
    return [p for part in parts for p in part.parameters(recurse=False)]


def uncovered(block: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of a block that belong to no linear and no norm, by name."""
    held = {id(p) for p in covered(block)}
    return {name: p for name, p in block.named_parameters() if id(p) not in held}


def check_blocks(
    model: nn.Module, plan: BlockPlan, norm: bool = True, modules: Sequence[str] | None = None
) -> None:
    """Raise BadPlan unless most of every stack's parameters can be solved and none of those is used
    elsewhere too.

    norm, modules: what is to be solved. Raises: UnknownKey for a name in `modules` that no linear
    has.
    """
    check_modules(model, plan, modules)
    places: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(p), []).append(name)
    for stack in plan.stacks:
        check_coverage(model, stack)
        for block in blocks_of(model, stack):
            shared = next(
                (places[id(p)] for p in covered(block, norm, modules) if len(places[id(p)]) > 1),
                None,
            )
            if shared:
                problem = f"{shared[0]} and {shared[1]} are one tensor, but each place would need its own solution"
                raise BadPlan(type(model).__name__, problem, NO_WAY)


def check_coverage(model: nn.Module, stack: Stack) -> None:
    """Raise BadPlan, naming the largest of the others, where linears and norms hold too few of a
    stack's parameters.
    """
    blocks = blocks_of(model, stack)
    others = {
        f"{i}.{name}": p for i, block in enumerate(blocks) for name, p in uncovered(block).items()
    }
    found = 1 - sum(p.numel() for p in others.values()) / max(1, parameter_count(blocks))
    if found < LEAST_COVERAGE:
        largest = sorted(others, key=lambda name: (-others[name].numel(), name))[:2]
        shapes = ", ".join(f"{stack.blocks}.{name} {list(others[name].shape)}" for name in largest)
        share = (
            f"only {found:.0%} of the parameters of {stack.blocks!r} belong to linears and norms"
        )
        raise BadPlan(
            type(model).__name__,
            f"{share}, at least {LEAST_COVERAGE:.0%} must; the largest others: {shapes}",
            NO_WAY,
        )
