"""The lists of blocks that a command calibrates: those of the model's class, or named with
--stack.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from featcal.blocks.plan import BlockPlan


def stacks_named(model: Any, paths: Sequence[str] | None) -> "BlockPlan":
    """The plan of the model, or of the lists of blocks that are named. Raises: BadPlan with the
    lists that there are.
    """
    from torch.nn import ModuleList

    from featcal.blocks.plan import BlockPlan, Stack, blocks_of
    from featcal.blocks.plans import plan_for
    from featcal.errors import BadPlan

    lists = [
        path for path, part in model.named_modules() if isinstance(part, ModuleList) and len(part)
    ]
    choices = f"name one with --stack: {', '.join(lists) or 'there is none'}"
    try:
        plan = (
            plan_for(model)
            if not paths
            else BlockPlan(*(Stack(path.replace(".", "_"), path) for path in paths))
        )
        for stack in plan.stacks:
            blocks_of(model, stack)
    except BadPlan as error:
        raise BadPlan(
            type(model).__name__, str(error).splitlines()[0].partition(": ")[2].rstrip("."), choices
        ) from None
    return plan


def block_count(model: Any, modules: Sequence[str] | None, plan: "BlockPlan | None" = None) -> int:
    """How many blocks will be solved, after the checks that need no numbers. Raises: BadPlan,
    UnknownKey.
    """
    from featcal.blocks.coverage import check_coverage, check_modules
    from featcal.blocks.plan import blocks_of
    from featcal.blocks.plans import plan_for

    plan = plan_for(model, plan)
    for stack in plan.stacks:
        check_coverage(model, stack)
    check_modules(model, plan, modules)
    return sum(len(blocks_of(model, stack)) for stack in plan.stacks)
