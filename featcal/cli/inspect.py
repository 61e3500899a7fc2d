"""`featcal inspect`: the tensors of a model folder, and what calibration solves of it."""

import re
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from featcal.cli import inputs, options
from featcal.cli.output import say, say_json, table
from featcal.errors import BadPlan, FeatCalError, counted
from featcal.interchange.mergekit import read_recipe, recipe_in

if TYPE_CHECKING:
    from torch import nn

    from featcal.calibration.estimate import BlockShape
    from featcal.models.plan import BlockPlan, Stack

LARGEST = 5  # tensors and parameters that are listed
TOKENS = 8  # length of the text from which sites are derived
EXPERT = re.compile(r"(?<=experts)\.\d+\.")  # the index of a mixture's expert in a name
BLOCK = re.compile(r"(.+?)\.(\d+)\.(.+)")  # list, index of the block, tensor of the block
PLAN = "Build the model to show also what calibration solves (--plan), or show tensors only."
EPILOG = """Examples:

featcal inspect models/base

featcal inspect merged --plan --json"""


def inspect(
    model: Annotated[str, Argument(**options.MODEL, help="Folder with config.json, safetensors.")],
    plan: Annotated[bool | None, Option("--plan/--tensors", show_default=False, help=PLAN)] = None,
    as_json: options.Json = False,
) -> None:
    """Show a model folder; with --plan what calibration solves. Exit code 2 for NaN or infinity."""
    from featcal.models.checkpoint import LazyCheckpoint

    folder = inputs.model_folder("MODEL", model)
    if plan is not False or (folder / "adapter_config.json").is_file():
        inputs.check_config(folder)
    checkpoint, recipe = LazyCheckpoint(folder), recipe_as_mapping(recipe_in(folder))
    shapes = {name: tensor.shape for name, tensor in checkpoint.items()}
    sizes = {name: prod(shape) for name, shape in shapes.items()}
    kinds = Counter(tensor.kind for tensor in checkpoint.values())
    lists = stored_blocks(shapes)
    checkpoint.check_finite()
    if as_json:
        content = {"folder": str(folder), "tensors": len(sizes), "values": sum(sizes.values())}
        content |= {"stored_as": dict(kinds), "recipe": recipe}
        content |= {"blocks": {path: len(blocks) for path, blocks in lists.items()}}
        return say_json(content | ({"calibration": planned(folder, as_json)} if plan else {}))
    say(f"{folder}: {counted(len(sizes), 'tensor')}, {counted(sum(sizes.values()), 'value')}")
    say(f"tensors by type: {', '.join(f'{kind} ({n})' for kind, n in kinds.most_common())}")
    rows = [[name, shape_text(shapes[name]), f"{sizes[name]:,}"] for name in top(sizes)]
    table("largest tensors", ["name", "shape", "values"], rows)
    say("values: no NaN, no infinity")
    for role, models in recipe.items():
        say(f"{role}: {', '.join(models) if isinstance(models, list) else models}")
    if plan:
        return planned(folder, as_json)
    for path, (first, *others) in lists.items():
        which = "each" if all(block == first for block in others) else "which differ; the first"
        say(f"{path}: {counted(1 + len(others), 'block')}, {which} with:")
        texts = {EXPERT.sub(".*.", name): shape_text(shape) for name, shape in first.items()}
        table("", ["tensor", "shape"], [list(row) for row in texts.items()])
    if plan is None:
        say(f"to see what calibration solves: featcal inspect {quote(str(folder))} --plan")


def top(sizes: Mapping[str, int]) -> list[str]:
    """Return the names with the largest sizes."""
    return sorted(sizes, key=lambda name: (-sizes[name], name))[:LARGEST]


def stored_blocks(shapes: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the blocks of every list by its path, each as shapes by tensor."""
    lists: dict[str, dict[int, dict[str, Any]]] = {}
    for name, shape in shapes.items():
        if parts := BLOCK.fullmatch(name):
            path, index, tensor = parts.groups()
            lists.setdefault(path, {}).setdefault(int(index), {})[tensor] = shape
    return {path: [blocks[index] for index in sorted(blocks)] for path, blocks in lists.items()}


def recipe_as_mapping(file: Path | None) -> dict[str, str | list[str]]:
    """Return what mergekit's recipe in the folder merged, or why it cannot be read."""
    if file is None:
        return {}
    try:
        recipe = read_recipe(file)
    except FeatCalError as error:
        return {"merged by mergekit": str(error)}
    base = {"base": recipe.base} if recipe.base else {}
    experts = ["+".join(parts) for parts in recipe.experts.values()]
    return {"merged by mergekit": recipe.method, "experts": experts, **base}


def planned(folder: Path, as_json: bool) -> Any:
    """Print what calibration solves of a model, or return the stacks and modules for --json."""
    from featcal.models.plan import blocks_of, plan_for
    from featcal.models.stored import ModelFolder

    opened = ModelFolder(folder)
    opened.require_complete()
    model = opened.module
    content: dict[str, Any] = {"model": type(model).__name__, "stacks": []}
    try:
        plan = plan_for(model)
    except BadPlan as error:
        return content | {"reason": str(error)} if as_json else say(f"calibration: {error}")
    if not as_json:
        return show_plan(model, plan)
    for stack in plan.stacks:
        blocks = blocks_of(model, stack)
        described = {"blocks": len(blocks), "modules": solved_names(blocks[0])}
        content["stacks"].append({"name": stack.name, "path": stack.blocks} | described)
    return content


def solved_names(block: "nn.Module") -> list[str]:
    """Return the modules of a block that are solved."""
    from featcal.models.modules import packed_experts, solved_modules

    linears, norms = solved_modules(block)
    return [*linears, *norms, *packed_experts(block)]


def show_plan(model: "nn.Module", plan: "BlockPlan") -> None:
    """Print the modules and sites of every stack, and the largest parameters left as they are."""
    from featcal.calibration.estimate import model_shape
    from featcal.cli.plan import meta_batch
    from featcal.models.modules import covered
    from featcal.models.plan import blocks_of, parameter_count

    shapes: tuple[BlockShape, ...] = ()
    reason = "sites: unknown, because the model does not run without weights"
    try:
        shapes = model_shape(model, plan, meta_batch(model, 1, TOKENS, False)).blocks
    except BadPlan as error:
        reason = f"{reason}: {error.problem}"
    for stack in plan.stacks:
        show_stack(model, stack)
        if own_blocks := [block for block in shapes if block.stack == stack.name]:
            show_sites(own_blocks)
        else:
            say(reason)
    blocks = [block for stack in plan.stacks for block in blocks_of(model, stack)]
    solved = {id(p) for block in blocks for p in covered(block)}
    left = {name: p for name, p in model.named_parameters() if id(p) not in solved}
    total, rows = parameter_count(model), []
    for name in top({name: p.numel() for name, p in left.items()}):
        share = f"{100 * left[name].numel() / total:.1f} %"
        rows.append([name, shape_text(left[name].shape), share])
    table("largest parameters that are not changed", ["name", "shape", "of the model"], rows)


def show_stack(model: "nn.Module", stack: "Stack") -> None:
    """Print the solved modules of a stack's blocks, what the blocks exchange, and the coverage."""
    from featcal.models.plan import blocks_of, parameter_count

    blocks = blocks_of(model, stack)
    solved = {name: blocks[0].get_submodule(name) for name in solved_names(blocks[0])}
    say(f"calibration solves {counted(len(blocks), 'block')} of {stack.blocks}:")
    weights = {name: next(module.parameters()) for name, module in solved.items()}
    rows = [[n, type(m).__name__, shape_text(weights[n].shape)] for n, m in solved.items()]
    table("", ["module", "kind", "shape"], rows)
    exchange = [f"entered at {stack.entry}"] if stack.entry else []
    if stack.carry:
        exchange.append(f"each block passes on {', '.join(stack.carry.values())}")
    if stack.feeds:
        exchange.append(f"the stack feeds {stack.feeds} of the next")
    if exchange:
        say(f"between the blocks: {'; '.join(exchange)}")
    inside = sum(parameter_count(module) for module in solved.values()) * len(blocks)
    of_blocks, of_model = (100 * inside / parameter_count(part) for part in (blocks, model))
    say(f"coverage: {of_blocks:.1f} % of the blocks' parameters, {of_model:.1f} % of the model's")


def show_sites(blocks: "list[BlockShape]") -> None:
    """Print which linears share an input, and so a Gram matrix; also of a differing last block."""
    first, last = blocks[0], blocks[-1]
    titles = {"sites, linears that read one tensor:": first}
    if [site.linears for site in first.sites] != [site.linears for site in last.sites]:
        titles["sites of the last block:"] = last
    for title, block in titles.items():
        names = [EXPERT.sub(".*.", ", ".join(site.linears)) for site in block.sites]
        rows = {n: [n, f"{s.d:,}", f"{s.o:,}"] for n, s in zip(names, block.sites, strict=True)}
        table(title, ["linears", "inputs", "outputs"], list(rows.values()))


def shape_text(shape: tuple[int, ...]) -> str:
    """Return (32, 8) as 32 x 8."""
    return " x ".join(str(size) for size in shape) or "one value"
