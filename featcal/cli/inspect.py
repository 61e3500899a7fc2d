"""`featcal inspect`: what a checkpoint folder holds, whether its numbers are numbers, and what calibration would solve."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from featcal.cli.arguments import existing_folder
from featcal.cli.recipe import refuse_adapter
from featcal.cli.solved import plan_as_mapping, shape_text, show_plan
from featcal.cli.terminal import Json, say, say_json, table
from featcal.errors import FeatCalError
from featcal.interchange.mergekit import beside_merged, read_recipe

if TYPE_CHECKING:
    from featcal.storage.checkpoint import LazyCheckpoint


EPILOG = """Examples:

featcal inspect models/base

featcal inspect merged --tensors --json"""


def inspect(
    folder: Annotated[Path, Argument(help="Checkpoint folder: config.json and safetensors.")],
    tensors: Annotated[bool, Option("--tensors", help="Only what the files hold; takes neither torch nor transformers.")] = False,
    as_json: Json = False,
) -> None:
    """Tell what a model folder holds and which of its parts calibration solves; exit code 2 for NaN or infinity in it."""
    existing_folder("inspect", folder)
    from featcal.storage.checkpoint import LazyCheckpoint

    refuse_adapter(folder)
    checkpoint = LazyCheckpoint(folder)
    recipe = beside_merged(folder)
    if as_json:
        told = tensors_as_mapping(checkpoint) | {"recipe": described_recipe(recipe)}
        checkpoint.check_finite()
        told |= {} if tensors else {"calibration": plan_as_mapping(folder)}
        return say_json(told)
    show_tensors(checkpoint)
    checkpoint.check_finite()
    say("values: no NaN, no infinity")
    for role, models in described_recipe(recipe).items():
        say(f"{role}: {', '.join(models) if isinstance(models, list) else models}")
    if not tensors:
        show_plan(folder)


def described_recipe(file: Path | None) -> dict[str, str | list[str]]:
    """What mergekit's recipe in the folder says was merged; empty without one."""
    if file is None:
        return {}
    try:
        recipe = read_recipe(file)
    except FeatCalError as error:  # it is not asked for: what cannot be read of it is told, the model all the same
        return {"merged by mergekit": str(error)}
    told: dict[str, str | list[str]] = {"merged by mergekit": recipe.method, "experts": [str(model) for model in recipe.experts]}
    return told | ({"base": str(recipe.base)} if recipe.base else {})


def tensors_as_mapping(checkpoint: "LazyCheckpoint") -> dict[str, Any]:
    """Folder, number of tensors and of values, tensors by data type."""
    sizes, kinds = counted_tensors(checkpoint)
    return {"folder": str(checkpoint.folder), "tensors": len(sizes), "values": sum(sizes.values()), "stored_as": dict(kinds)}


def counted_tensors(checkpoint: "LazyCheckpoint") -> tuple[dict[str, int], Counter[str]]:
    """How many values each tensor has, and how many tensors each data type."""
    from math import prod

    sizes = {name: prod(checkpoint.shape(name)) for name in checkpoint.names}
    return sizes, Counter(checkpoint.kind(name) for name in checkpoint.names)


def show_tensors(checkpoint: "LazyCheckpoint") -> None:
    """Numbers of tensors and values by data type, and the largest tensors."""
    sizes, kinds = counted_tensors(checkpoint)
    say(f"{checkpoint.folder}: {len(sizes)} tensors, {sum(sizes.values()):,} values")
    say("stored as " + ", ".join(f"{kind} ({count} tensors)" for kind, count in kinds.most_common()))
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:5]
    rows = [[name, shape_text(checkpoint.shape(name)), f"{sizes[name]:,}"] for name in largest]
    table("largest tensors", ["name", "shape", "values"], rows)
