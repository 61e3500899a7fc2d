"""What calibration would solve of a model, as `featcal inspect` tells it: stacks, modules, sites,
and what is left as it is."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from featcal.cli.models import require_names
from featcal.cli.options import existing_folder
from featcal.cli.terminal import Json, say, say_json, table
from featcal.errors import BadPlan, FeatCalError
from featcal.interchange.mergekit import read_recipe, recipe_in
from featcal.models.load import refuse_adapter

if TYPE_CHECKING:
    from torch import nn

    from featcal.calibration.estimate import BlockShape
    from featcal.models.checkpoint import LazyCheckpoint
    from featcal.models.plan import BlockPlan, Stack

UNCOVERED = 5  # largest parameters that are told
EXPERT = re.compile(r"(?<=experts)\.\d+\.")  # the number of one in the name of its linears
TOKENS = 8  # of a text that is thought of to find the sites
# what a model's forward may raise where it is run without numbers on a batch made up from its
# configuration
NOT_RUN = (FeatCalError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def show_plan(folder: Path) -> None:
    """Every stack of the plan with its modules and sites, and the share of the parameters that is
    solved.
    """
    from featcal.models.families import plan_for

    model = fitting(folder)
    try:
        plan = plan_for(model)
    except BadPlan as error:
        say(f"calibration: {error}")
        return
    found = found_sites(model)
    for stack in plan.stacks:
        show_stack(model, stack)
        if isinstance(found, str):
            say(f"sites: cannot be told without running the model ({found})")
        else:
            show_sites(found[stack.name])
    show_uncovered(model, plan)


def fitting(folder: Path) -> "nn.Module":
    """The model of config.json without its numbers, whose tensors the folder has. Raises:
    WrongKeys, MissingTensor.
    """
    from featcal.models.checkpoint import LazyCheckpoint
    from featcal.models.load import skeleton
    from featcal.models.stored import stored_tensors

    require_names(folder / "config.json")
    model, part = skeleton(folder)
    stored_tensors(model, LazyCheckpoint(folder, part))
    return model


def plan_as_mapping(folder: Path) -> dict[str, Any]:
    """Stacks with their number of blocks and the modules solved in each, for programs; the reason
    where there are none.
    """
    from featcal.models.families import plan_for
    from featcal.models.plan import blocks_of

    model = fitting(folder)
    try:
        plan = plan_for(model)
    except BadPlan as error:
        return {"model": type(model).__name__, "stacks": [], "reason": str(error)}
    stacks = []
    for stack in plan.stacks:
        blocks = blocks_of(model, stack)
        modules = solved_names(blocks[0])
        stacks.append(
            {"name": stack.name, "path": stack.blocks, "blocks": len(blocks), "modules": modules}
        )
    return {"model": type(model).__name__, "stacks": stacks}


def solved_names(block: "nn.Module") -> list[str]:
    """The modules of a block that are solved, experts in tensors of their own as one."""
    from featcal.models.modules import solved_modules
    from featcal.models.moe import packed_experts

    linears, norms = solved_modules(block)
    return [*linears, *norms, *packed_experts(block)]


def show_stack(model: "nn.Module", stack: "Stack") -> None:
    """Where the blocks of one stack are, what they exchange, and the modules solved in each."""
    from featcal.models.plan import blocks_of, parameter_count

    blocks = blocks_of(model, stack)
    solved = {name: blocks[0].get_submodule(name) for name in solved_names(blocks[0])}
    say(
        f"calibration solves {len(blocks)} blocks of {type(model).__name__} ({stack.blocks}), in each:"
    )
    table("", ["module", "kind", "shape"], module_rows(solved))
    if handed_on(stack):
        say(f"between the blocks: {handed_on(stack)}")
    inside = sum(parameter_count(module) for module in solved.values()) * len(blocks)
    share = 100 * inside / parameter_count(model)
    say(
        f"coverage: {100 * inside / parameter_count(blocks):.1f} % of the blocks' parameters, {share:.1f} % of the model's"
    )


def handed_on(stack: "Stack") -> str:
    """What a stack needs and hands on beside hidden states, in words."""
    told = [f"entered at {stack.entry}"] if stack.entry else []
    told += [f"each block hands on {', '.join(stack.carry.values())}"] if stack.carry else []
    told += [f"the stack feeds {stack.feeds} of the next"] if stack.feeds else []
    return "; ".join(told)


def found_sites(model: "nn.Module") -> "dict[str, list[BlockShape]] | str":
    """Return the shapes of every stack's blocks, or why they cannot be known without weights."""
    from featcal.cli.plan import shape_of
    from featcal.settings import Calibration

    config = getattr(model, "config", None)
    tokens = None if getattr(config, "image_size", None) is not None else TOKENS
    try:
        shape = shape_of(model, 1, Calibration(), tokens, False)
    except NOT_RUN as error:
        return " ".join(str(error).split())
    stacks: dict[str, list[BlockShape]] = {}
    for block in shape.blocks:
        stacks.setdefault(block.stack, []).append(block)
    return stacks


def show_sites(blocks: "list[BlockShape]") -> None:
    """Print which linears share an input, and with it one Gram matrix; of the last block if it
    differs.
    """
    first, last = blocks[0], blocks[-1]
    columns = ["linears", "inputs", "outputs"]
    table("sites, linears that read one tensor:", columns, site_rows(first))
    if [site.linears for site in first.sites] != [site.linears for site in last.sites]:
        table("sites of the last block:", columns, site_rows(last))


def site_rows(block: "BlockShape") -> list[list[str]]:
    """A row for each site; the sites of a mixture's experts, which are alike, are one."""
    alike = (
        (EXPERT.sub(".*.", ", ".join(site.linears)), f"{site.d:,}", f"{site.o:,}")
        for site in block.sites
    )
    return [list(row) for row in dict.fromkeys(alike)]


def show_uncovered(model: "nn.Module", plan: "BlockPlan") -> None:
    """The largest parameters that stay as they are, with their share of the model's."""
    from featcal.models.modules import uncovered
    from featcal.models.plan import blocks_of, parameter_count

    blocks = [block for stack in plan.stacks for block in blocks_of(model, stack)]
    stays = {id(p) for block in blocks for p in uncovered(block).values()}
    solved = {id(p) for block in blocks for p in block.parameters()} - stays
    left = {name: p for name, p in model.named_parameters() if id(p) not in solved}
    largest = sorted(left, key=lambda name: (-left[name].numel(), name))[:UNCOVERED]
    whole = parameter_count(model)
    rows = [
        [name, shape_text(left[name].shape), f"{100 * left[name].numel() / whole:.1f} %"]
        for name in largest
    ]
    table("largest parameters that stay as they are", ["name", "shape", "of the model"], rows)


def module_rows(modules: Mapping[str, "nn.Module"]) -> list[list[str]]:
    """Name, class and shape of the weight, or of the first tensor of experts, of each module."""
    weights = {name: getattr(module, "weight", None) for name, module in modules.items()}
    weights = {
        name: next(modules[name].parameters()) if weight is None else weight
        for name, weight in weights.items()
    }
    return [
        [name, type(modules[name]).__name__, shape_text(weight.shape)]
        for name, weight in weights.items()
    ]


def shape_text(shape: tuple[int, ...]) -> str:
    """(32, 8) as 32 x 8."""
    return " x ".join(str(size) for size in shape) or "one value"


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
    from featcal.models.checkpoint import LazyCheckpoint

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
