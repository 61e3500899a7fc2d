"""`featcal inspect`: what a checkpoint folder holds, whether its numbers are numbers, and what calibration would solve."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from featcal.commands.arguments import existing_folder
from featcal.commands.model_folders import skeleton
from featcal.commands.terminal import say, table
from featcal.errors import BadPlan, NotFinite

if TYPE_CHECKING:
    from torch import nn

    from featcal.storage.checkpoint import LazyCheckpoint


def inspect(folder: Annotated[Path, Argument(help="Checkpoint folder: config.json and safetensors.")]) -> None:
    """Tell what a model folder holds and which of its parts calibration solves; exit code 2 for NaN or infinity in it."""
    existing_folder("inspect", folder)
    from featcal.storage.checkpoint import LazyCheckpoint

    checkpoint = LazyCheckpoint(folder)
    show_tensors(checkpoint)
    show_plan(folder)
    require_finite(checkpoint)


def show_tensors(checkpoint: "LazyCheckpoint") -> None:
    """Numbers of tensors and values by data type, and the largest tensors."""
    from math import prod

    sizes = {name: prod(checkpoint.shape(name)) for name in checkpoint.names}
    kinds = Counter(str(checkpoint.dtype(name)).removeprefix("torch.") for name in checkpoint.names)
    say(f"{checkpoint.folder}: {len(sizes)} tensors, {sum(sizes.values()):,} values")
    say("stored as " + ", ".join(f"{kind} ({count} tensors)" for kind, count in kinds.most_common()))
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:5]
    rows = [[name, shape_text(checkpoint.shape(name)), f"{sizes[name]:,}"] for name in largest]
    table("largest tensors", ["name", "shape", "values"], rows)


def show_plan(folder: Path) -> None:
    """The blocks of every stack, the linears and norms solved in each, and the share of the parameters they hold."""
    from featcal.blocks.plan import blocks_of, parameter_count
    from featcal.blocks.plans import plan_for
    from featcal.calibration.sites import calibrated_modules

    model = skeleton(folder)
    try:
        plan = plan_for(model)
    except BadPlan as error:
        say(f"calibration: {error}")
        return
    for stack in plan.stacks:
        blocks = blocks_of(model, stack)
        chosen = calibrated_modules(blocks[0], norm=True)
        solved = {name: blocks[0].get_submodule(name) for name in (*chosen.linears, *chosen.norms)}
        say(f"calibration solves {len(blocks)} blocks of {type(model).__name__} ({stack.blocks}), in each:")
        table("", ["module", "kind", "shape"], module_rows(solved))
        inside = sum(parameter_count(module) for module in solved.values()) * len(blocks)
        whole = parameter_count(blocks)
        share = 100 * inside / parameter_count(model)
        say(f"coverage: {100 * inside / whole:.1f} % of the blocks' parameters, {share:.1f} % of the model's")


def module_rows(modules: Mapping[str, "nn.Module"]) -> list[list[str]]:
    """Name, class and weight shape of each module."""
    return [[name, type(module).__name__, shape_text(module.weight.shape)] for name, module in modules.items()]  # type: ignore


def require_finite(checkpoint: "LazyCheckpoint") -> None:
    """Says that every value is a number. Raises: NotFinite naming all tensors where one is not."""
    bad = []
    for name in checkpoint.names:
        try:
            checkpoint.finite_tensor(name)
        except NotFinite:
            bad.append(name)
    if bad:
        raise NotFinite(checkpoint.folder, ", ".join(bad))
    say("values: no NaN, no infinity")


def shape_text(shape: tuple[int, ...]) -> str:
    """(32, 8) as 32 x 8."""
    return " x ".join(str(size) for size in shape) or "one value"
