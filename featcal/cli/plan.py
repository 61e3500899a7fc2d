"""`featcal plan`: what a calibration will need, from config.json files alone, before a weight is
downloaded.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from featcal.cli import options
from featcal.cli.arguments import dtype_named, existing_folder
from featcal.cli.model_folders import alike, skeleton
from featcal.cli.recipe import named_models
from featcal.cli.sizes import bytes_of, count_text, size_text
from featcal.cli.stacks import stacks_named
from featcal.cli.terminal import Json, Quiet, say, say_json, table
from featcal.errors import BadSetting, TensorsDiffer
from featcal.settings import Calibration, require

if TYPE_CHECKING:
    import torch
    from torch import nn

    from featcal.blocks.plan import BlockPlan
    from featcal.planning.needs import Needs, Workload
    from featcal.planning.shapes import ModelShape

EPILOG = """Examples:

featcal plan --base base --merged merged --expert math=models/math --expert code=models/code --tokens 512

featcal plan --recipe merge.yaml --merged merged --tokens 512 --device cuda --json"""
POSITIONS = ("max_position_embeddings", "n_positions")  # how configurations call the longest text
# keys that tell nothing of a tower's shape
UNTOLD = (
    "_name_or_path",
    "dtype",
    "transformers_version",
    "architectures",
    "id2label",
    "label2id",
    "vocab_size",
)


def plan(
    merged: options.Merged,
    base: options.Base = None,
    expert: options.SomeExperts = None,
    recipe: options.MergekitRecipe = None,
    samples: Annotated[int, Option(min=1, help="Samples of each task (paper: 256).")] = 256,
    tokens: Annotated[
        int | None, Option(min=1, help="Tokens of one sample; text models only.")
    ] = None,
    batch: options.Batch = 32,
    padded: Annotated[
        bool, Option("--padded", help="Texts of a batch differ in length, so that masks are kept.")
    ] = False,
    stack: options.Stacks = None,
    dtype: options.Dtype = "float32",
    device: Annotated[str, Option(help="cpu or cuda; no GPU is needed to plan for one.")] = "cpu",
    device_memory: Annotated[
        str, Option(metavar="SIZE", help="GPU memory for features that wait, such as 8GiB.")
    ] = "0",
    host_memory: Annotated[
        str, Option(metavar="SIZE", help="Host memory for them; the rest goes to disk.")
    ] = "",
    ranks: Annotated[int, Option(min=1, help="Processes that share the tasks.")] = 1,
    preset: Annotated[str, Option(help="paper or best, as for calibrate.")] = "paper",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Tell what a calibration will need: memory of GPU and host, disk, work. Reads config.json
    files only.
    """
    require(device in ("cpu", "cuda"), "--device", device, "must be cpu or cuda")
    budgets = (
        bytes_of("--device-memory", device_memory),
        bytes_of("--host-memory", host_memory) if host_memory else None,
    )
    settings = Calibration.preset(preset)
    existing_folder("--merged", merged)
    named = named_models(base, expert or (), recipe, merged, weights=False)
    kind, folders, experts = (
        dtype_named(dtype),
        {"base": named.base, "merged": merged},
        named.shaped,
    )
    require(
        ranks <= len(experts),
        "--ranks",
        ranks,
        f"must be at most the number of experts, {len(experts)}",
    )
    models = {f"{role} ({folder})": skeleton(folder) for role, folder in folders.items()}
    models |= {f"expert {name!r} ({folder})": skeleton(folder) for name, folder in experts.items()}
    same_shapes(models)
    model = next(iter(models.values()))
    chosen = stacks_named(model, stack)
    check_tokens(model, tokens)
    from featcal.planning.needs import Workload

    load = Workload(
        len(experts),
        samples,
        min(batch, samples),
        device == "cuda",
        *budgets,
        ranks,
        settings=settings,
    )
    found = planned_needs(model.to(kind), load, tokens, padded, plan=chosen)
    if as_json:
        say_json(as_mapping(found))
    else:
        show(found, load)


def same_shapes(models: Mapping[str, "nn.Module"]) -> None:
    """Raise TensorsDiffer, naming the key of config.json where one tells it, unless all models'
    towers are of one shape.

    As for calibrate, rows of words may be more or fewer, and what stands on the towers may be other
    heads.
    """
    from featcal.models.skeleton import require_one_family

    require_one_family({name: type(model) for name, model in models.items()})
    names = list(models)
    reference = models[names[0]]
    for name in names[1:]:
        ours, theirs = tower_shapes(reference), tower_shapes(models[name])
        tensor = next(
            (key for key in (*ours, *theirs) if not alike(key, ours.get(key), theirs.get(key))),
            None,
        )
        if tensor is None:
            continue
        mine, its = (m.config.to_dict() for m in (reference, models[name]))  # type: ignore[operator,union-attr]
        told = [key for key in mine if key not in UNTOLD and mine[key] != its.get(key)]
        here, there = (
            ", ".join(f"{c.get(key)}" for key in told) or s.get(tensor)
            for c, s in ((mine, ours), (its, theirs))
        )
        raise TensorsDiffer(
            f"config.json: {', '.join(told) or tensor}", names[0], here, name, there
        )


def tower_shapes(model: "nn.Module") -> dict[str, tuple[int, ...]]:
    """The shapes of all parameters, by the names they have in the model without its head."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return {
        name.removeprefix(prefix): tuple(parameter.shape)
        for name, parameter in model.named_parameters()
    }


def check_tokens(model: "nn.Module", tokens: int | None) -> None:
    """Raise BadSetting unless tokens are told for a text model, at most as many as it has
    positions, and for no other.
    """
    config: Any = model.config
    if getattr(config, "image_size", None) is not None:
        require(
            tokens is None,
            "--tokens",
            tokens,
            "is for text models; of this one config.json tells how many there are",
        )
        return
    if tokens is None:
        raise BadSetting(
            "--tokens",
            tokens,
            f"must be named for {type(model).__name__}: how many tokens one sample has",
        )
    most = next((getattr(config, key) for key in POSITIONS if getattr(config, key, None)), tokens)
    relative = getattr(config, "relative_attention_num_buckets", None) is not None  # T5: any length
    require(
        relative or tokens <= most,
        "--tokens",
        tokens,
        f"must be at most {most}, the positions of {type(model).__name__}",
    )


def planned_needs(
    model: "nn.Module",
    load: "Workload",
    tokens: int | None = None,
    padded: bool = False,
    plan: "BlockPlan | None" = None,
) -> "Needs":
    """What `featcal calibrate` will need with a model that has no numbers; the samples it has drawn
    are counted too.

    Pictures wait as bytes, one for each value that the model is fed; text as tokens.
    """
    from featcal.planning.meta_profiler import size
    from featcal.planning.needs import needs

    sample = meta_batch(model, 1, tokens, padded)
    drawn = (
        sum(v.numel() if v.is_floating_point() else size([v]) for v in sample.values())
        * load.samples
        * load.tasks
    )
    return needs(shapes(model, load, tokens, padded, plan), replace(load, drawn=drawn))


def shapes(
    model: "nn.Module",
    load: "Workload",
    tokens: int | None,
    padded: bool,
    plan: "BlockPlan | None" = None,
) -> dict[int, "ModelShape"]:
    """What calibration meets in the model, for every size of batch."""
    from featcal.blocks.plans import plan_for
    from featcal.planning.block_shape import Asked
    from featcal.planning.shapes import model_shape

    block_plan, asked = plan_for(model, plan), Asked.by(load.settings, padded=padded)
    batches = {
        size: meta_batch(model, size, tokens, padded) for size in {*load.batches, load.checked}
    }
    return {size: model_shape(model, block_plan, batch, asked) for size, batch in batches.items()}


def meta_batch(
    model: "nn.Module", size: int, tokens: int | None, padded: bool
) -> dict[str, "torch.Tensor"]:
    """A batch of the shape that the configuration tells; text has as many tokens as are named, a
    target as many again.
    """
    import torch

    config: Any = model.config
    edge = getattr(config, "image_size", None)
    if edge is not None:
        height, width = (edge, edge) if isinstance(edge, int) else edge
        dtype = next(model.parameters()).dtype
        return {
            "pixel_values": torch.empty(
                size, config.num_channels, height, width, dtype=dtype, device="meta"
            )
        }
    ids = torch.empty(size, tokens or 1, dtype=torch.long, device="meta")
    batch = {"input_ids": ids} | ({"attention_mask": ids.clone()} if padded else {})
    return batch | (
        {"decoder_input_ids": ids.clone()} if getattr(config, "is_encoder_decoder", False) else {}
    )


def as_mapping(found: "Needs") -> dict[str, Any]:
    """Everything in bytes and operations, for programs."""
    totals = {
        "gpu_bytes": found.gpu,
        "host_bytes": found.host,
        "disk_bytes": found.disk,
        "flops": found.work.total,
    }
    return totals | {"peak_phase": found.peak_phase} | asdict(found)


def show(found: "Needs", load: "Workload") -> None:
    """Totals, then their parts."""
    work = found.work
    several = (
        f"; memory is that of one of {load.ranks} processes, which has {load.tasks_here} of them"
        * (load.ranks > 1)
    )
    say(f"{load.tasks} tasks of {load.samples} samples, in batches of {load.batch}{several}")
    rows = [["GPU", size_text(found.gpu)]] if found.on_gpu else []
    rows += [
        ["host", size_text(found.host)],
        ["disk", size_text(found.disk)],
        ["FLOPs", count_text(work.total)],
    ]
    table("needed, above what Python and torch hold themselves", ["", "total"], rows)
    place = "GPU" if found.on_gpu else "host"
    parts = [
        [phase, name, size_text(value)]
        for phase, of in found.phases.items()
        for name, value in of.items()
        if value
    ]
    table(f"{place} memory at work, most in: {found.peak_phase}", ["phase", "part", "size"], parts)
    table(
        "features that wait",
        ["on", "size"],
        [[name, size_text(value)] for name, value in found.waiting.items() if value],
    )
    table(
        "on the host all the time",
        ["for", "size"],
        [[name, size_text(v)] for name, v in found.throughout.items() if v],
    )
    table(
        "folders",
        ["for", "size"],
        [[name, size_text(value)] for name, value in found.folders.items()],
    )
    table(
        "FLOPs",
        ["for", "count"],
        [[name, count_text(value)] for name, value in asdict(work).items()],
    )
