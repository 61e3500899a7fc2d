"""`featcal inspect`: what a checkpoint folder holds, whether its numbers are numbers, and what
calibration would solve.

The first two are told by the files alone, in a moment; what would be solved only by transformers'
own model, which takes seconds.
"""

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from featcal.cli.arguments import existing_folder
from featcal.cli.model_folders import require_names
from featcal.cli.solved import plan_as_mapping, shape_text, show_plan
from featcal.cli.terminal import Json, say, say_json, table
from featcal.errors import FeatCalError
from featcal.interchange.mergekit import read_recipe, recipe_in
from featcal.models.code import refuse_adapter

if TYPE_CHECKING:
    from featcal.storage.checkpoint import LazyCheckpoint


EPILOG = """Examples:

featcal inspect models/base

featcal inspect merged --plan --json"""
BLOCK = re.compile(
    r"(.+?)\.(\d+)\.(.+)"
)  # path of a list, number of a block in it, tensor of the block
NUMBER = re.compile(r"\.\d+(?=\.)")
PLAN = "Also what calibration would solve, by building the model without numbers; or only what the files of tensors hold."


def inspect(
    folder: Annotated[Path, Argument(help="Checkpoint folder: config.json and safetensors.")],
    plan: Annotated[bool | None, Option("--plan/--tensors", show_default=False, help=PLAN)] = None,
    as_json: Json = False,
) -> None:
    """Tell what a model folder holds and, with --plan, what calibration solves of it; exit code 2
    for NaN or infinity in it.
    """
    existing_folder("inspect", folder)
    from featcal.storage.checkpoint import LazyCheckpoint

    refuse_adapter(folder)
    checkpoint = LazyCheckpoint(folder)
    recipe = recipe_in(folder)
    if plan is None:
        require_names(folder / "config.json")
    if as_json:
        told = tensors_as_mapping(checkpoint) | {"recipe": described_recipe(recipe)}
        checkpoint.check_finite()
        told |= {"calibration": plan_as_mapping(folder)} if plan else {}
        return say_json(told)
    show_tensors(checkpoint)
    checkpoint.check_finite()
    say("values: no NaN, no infinity")
    for role, models in described_recipe(recipe).items():
        say(f"{role}: {', '.join(models) if isinstance(models, list) else models}")
    if plan:
        return show_plan(folder)
    for path, blocks in lists_of_blocks(checkpoint).items():
        show_blocks(path, blocks)
    if plan is None:
        say(
            f"whether config.json fits these tensors, and what calibration solves: featcal inspect {folder} --plan"
        )


def lists_of_blocks(checkpoint: "LazyCheckpoint") -> dict[str, list[dict[str, tuple[int, ...]]]]:
    """The shapes of the tensors in each block of every list that tensors' names tell of, by the
    path of the list.
    """
    lists: dict[str, dict[int, dict[str, tuple[int, ...]]]] = {}
    for name in checkpoint.names:
        if found := BLOCK.fullmatch(name):
            path, number, tensor = found.groups()
            lists.setdefault(path, {}).setdefault(int(number), {})[tensor] = checkpoint.shape(name)
    return {path: [blocks[number] for number in sorted(blocks)] for path, blocks in lists.items()}


def show_blocks(path: str, blocks: list[dict[str, tuple[int, ...]]]) -> None:
    """How many blocks a list has and the tensors of one; of a mixture's experts, which are alike,
    those of one.
    """
    rows = {
        NUMBER.sub(".*", name) if "experts" in name else name: shape_text(shape)
        for name, shape in blocks[0].items()
    }
    like = (
        "in each:" if all(block == blocks[0] for block in blocks) else "which differ; in the first:"
    )
    say(f"{path}: {len(blocks)} blocks, {like}")
    table("", ["tensor", "shape"], [list(row) for row in rows.items()])


def described_recipe(file: Path | None) -> dict[str, str | list[str]]:
    """What mergekit's recipe in the folder says was merged; empty without one."""
    if file is None:
        return {}
    try:
        recipe = read_recipe(file)
    except (
        FeatCalError
    ) as error:  # it is not asked for: what cannot be read of it is told, the model all the same
        return {"merged by mergekit": str(error)}
    told: dict[str, str | list[str]] = {
        "merged by mergekit": recipe.method,
        "experts": [str(model) for model in recipe.experts],
    }
    return told | ({"base": str(recipe.base)} if recipe.base else {})


def tensors_as_mapping(checkpoint: "LazyCheckpoint") -> dict[str, Any]:
    """Folder, number of tensors and of values, tensors by data type, blocks by the path of their
    list.
    """
    sizes, kinds = counted_tensors(checkpoint)
    told = {
        "folder": str(checkpoint.folder),
        "tensors": len(sizes),
        "values": sum(sizes.values()),
        "stored_as": dict(kinds),
    }
    return told | {
        "blocks": {path: len(blocks) for path, blocks in lists_of_blocks(checkpoint).items()}
    }


def counted_tensors(checkpoint: "LazyCheckpoint") -> tuple[dict[str, int], Counter[str]]:
    """How many values each tensor has, and how many tensors each data type."""
    from math import prod

    sizes = {name: prod(checkpoint.shape(name)) for name in checkpoint.names}
    return sizes, Counter(checkpoint.kind(name) for name in checkpoint.names)


def show_tensors(checkpoint: "LazyCheckpoint") -> None:
    """Numbers of tensors and values by data type, and the largest tensors."""
    sizes, kinds = counted_tensors(checkpoint)
    say(f"{checkpoint.folder}: {len(sizes)} tensors, {sum(sizes.values()):,} values")
    say(
        "stored as " + ", ".join(f"{kind} ({count} tensors)" for kind, count in kinds.most_common())
    )
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:5]
    rows = [[name, shape_text(checkpoint.shape(name)), f"{sizes[name]:,}"] for name in largest]
    table("largest tensors", ["name", "shape", "values"], rows)
