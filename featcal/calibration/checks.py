"""What must hold before the first block: the same tensors everywhere, only numbers in them, a batch list for every expert."""

from collections.abc import Mapping

from featcal.blocks.plan import BlockPlan
from featcal.models.residency import Held, require_alike


def check_models(models: Mapping[str, Held], plan: BlockPlan) -> None:
    """Raise unless all models (by the name errors use, the reference first) share names and shapes and hold only numbers.

    Outside of the blocks the number of rows may differ, of words or of a head's classes: each model reads and puts out its own.
    """
    require_alike(models, [stack.blocks for stack in plan.stacks])
    for name, model in models.items():
        model.check_finite(name)
