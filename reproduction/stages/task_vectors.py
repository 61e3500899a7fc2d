"""Task vectors: how far a model's parameters have moved from the base's, and whether in the
direction its expert's have.

Knows parameters by name; knows nothing of data, files or settings.
"""

from collections.abc import Iterable
from math import nan, sqrt

import torch
from torch import nn

from featcal.core.precision import SUM_DTYPE
from featcal.models.families import plan_for
from featcal.models.modules import is_linear
from featcal.models.plan import BlockPlan, part_of


def task_vector_alignment(
    model: nn.Module, base: nn.Module, expert: nn.Module, names: Iterable[str]
) -> tuple[float, float]:
    """Direction and length of a model's change against its expert's, over the named parameters as
    one long vector.

    With v = θ − θ_base and v_exp = θ_exp − θ_base: cos(v, v_exp) and ‖v‖ / ‖v_exp‖, sums in
    float64.
    Returns: cosine in [−1, 1] and relative length; nan where a change is zero.
    """
    parameters = [dict(module.named_parameters()) for module in (model, base, expert)]
    product = own = theirs = 0.0
    for name in names:
        now, before, wanted = (named[name].detach().to(SUM_DTYPE).flatten() for named in parameters)
        change, wanted_change = now - before, wanted - before
        product += float(torch.dot(change, wanted_change))
        own += float(torch.dot(change, change))
        theirs += float(torch.dot(wanted_change, wanted_change))
    return (product / sqrt(own * theirs) if own and theirs else nan), (
        sqrt(own / theirs) if theirs else nan
    )


def parameter_groups(model: nn.Module, plan: BlockPlan | None = None) -> dict[str, list[str]]:
    """Names of all parameters ("backbone"), and of the weights that calibration solves for
    ("linear"): the blocks' linears.
    """
    blocks = [
        (stack.blocks, part_of(model, stack.blocks)) for stack in plan_for(model, plan).stacks
    ]
    solved = [
        f"{path}.{name}.weight"
        for path, part in blocks
        for name, module in part.named_modules()
        if is_linear(module)
    ]
    return {"backbone": [name for name, _ in model.named_parameters()], "linear": solved}
