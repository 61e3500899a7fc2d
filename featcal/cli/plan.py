"""`featcal plan`: estimate a calibration from config.json files, before a weight is downloaded."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ByteSize, PositiveInt
from typer import Option

from featcal.cli import options
from featcal.cli.inputs import plan_with, read_inputs
from featcal.cli.output import say, say_json, size_text, table
from featcal.errors import counted
from featcal.settings import Calibration, Settings, require

if TYPE_CHECKING:
    from torch import nn

    from featcal.calibration.estimate import Job
    from featcal.models.plan import BlockPlan


class Planning(Settings):
    """Keys of --set that are not settings of the method."""

    batch: PositiveInt = 32
    tokens: PositiveInt | None = None
    recipe: Path | None = None
    stack: tuple[str, ...] | None = None
    padded: bool = False
    host_memory: ByteSize | None = None
    device_memory: ByteSize = ByteSize(0)
    ranks: PositiveInt = 1


SETTINGS = Planning(), Calibration()
DEVICE = "Where to compute; the estimate needs no GPU."
EPILOG = """Text models need --set tokens=N, the number of tokens per sample.

Examples:

featcal plan --merged merged --set tokens=512 --device cuda

featcal plan --merged merged --base owner/base --expert math=owner/math --set tokens=512 --json"""


def plan(
    merged: options.Merged,
    base: options.Base = None,
    expert: options.Experts = None,
    preset: options.Preset = None,
    samples: Annotated[int, Option(min=1, help="Samples per task.")] = 256,
    setting: Annotated[list[str] | None, options.set_option(*SETTINGS)] = None,
    device: Annotated[Literal["cpu", "cuda"], Option(help=DEVICE)] = "cpu",
    dtype: options.Dtype = "float32",
    as_json: options.Json = False,
) -> None:
    """Estimate the memory, disk and operations of a calibration. Reads only config.json files."""
    keys, values = options.read_set(setting, "plan", *SETTINGS)
    settings = options.method_of(preset, values, setting)
    inputs = read_inputs(merged, base, expert, recipe=keys.recipe, weights=False)
    tasks = len(inputs.experts)
    require(keys.ranks <= tasks, "plan.ranks", keys.ranks, f"must be at most {tasks} (experts)")
    import torch

    from featcal.calibration.estimate import Job
    from featcal.data.texts import input_of
    from featcal.models.stored import skeleton
    from featcal.models.streamed import InMemoryModel, require_same_tensors

    model = skeleton(inputs.base)
    blocks = plan_with(model, keys.stack)
    model_input, key, kind = input_of(model, keys.tokens), "plan.tokens", type(model).__name__
    if model_input.kind != "pictures":
        expected = f"must be given for {kind}: --set tokens=N, the number of tokens per sample"
        require(keys.tokens is not None, key, keys.tokens, expected)
        most = model_input.positions or keys.tokens
        expected = f"must be at most {most}, the positions of {kind}"
        require(keys.tokens <= most, key, keys.tokens, expected)
    roles = {"base": inputs.base, "merged": inputs.merged} | inputs.configured
    towers = {f"{n} ({f})": InMemoryModel(skeleton(f, like=type(model))) for n, f in roles.items()}
    require_same_tensors(towers, [stack.blocks for stack in blocks.stacks])
    memory = device == "cuda", keys.device_memory, keys.host_memory
    job = Job(tasks, samples, min(keys.batch, samples), settings, *memory, keys.ranks)
    needs = estimated(model.to(getattr(torch, dtype)), job, keys.tokens, keys.padded, blocks)
    if as_json:
        say_json(needs_as_mapping(needs))
    else:
        show_needs(needs, job)


def estimated(
    model: "nn.Module", job: "Job", tokens: int | None, padded: bool, plan: "BlockPlan | None"
) -> dict[str, dict[str, int]]:
    """Estimate what `featcal calibrate` needs, including its samples. Raises: BadPlan."""
    from featcal.calibration.estimate import estimate, model_shape, nbytes
    from featcal.models.plan import plan_for

    inputs = meta_batch(model, 1, tokens, padded).values()
    sample = sum(v.numel() if v.is_floating_point() else nbytes(v) for v in inputs)
    batch = meta_batch(model, job.batch, tokens, padded)
    shape = model_shape(model, plan_for(model, plan), batch, job.settings)
    return estimate(shape, replace(job, drawn=sample * job.samples * job.tasks))


def meta_batch(model: "nn.Module", size: int, tokens: int | None, padded: bool) -> dict[str, Any]:
    """Return a batch on meta: images of the configured size, or texts (and targets) of `tokens`."""
    import torch

    config: Any = model.config
    edge = getattr(config, "image_size", None)
    if edge is not None:
        height, width = (edge, edge) if isinstance(edge, int) else edge
        shape = (size, getattr(config, "num_channels", 3), height, width)
        dtype = next(model.parameters()).dtype
        return {"pixel_values": torch.empty(shape, dtype=dtype, device="meta")}
    pair = bool(getattr(config, "is_encoder_decoder", False))
    names = ["input_ids"] + ["attention_mask"] * padded + ["decoder_input_ids"] * pair
    return {n: torch.empty(size, tokens or 1, dtype=torch.long, device="meta") for n in names}


def needs_as_mapping(needs: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Return totals in bytes and operations, and their parts, for --json."""
    totals = {f"{part}_bytes": sum(needs[part].values()) for part in ("device", "host", "disk")}
    return totals | {"flops": sum(needs["operations"].values())} | dict(needs)


def show_needs(needs: Mapping[str, Mapping[str, int]], job: "Job") -> None:
    """Print totals, then their parts."""
    several = f"; memory and disk are for one of {job.processes} processes"
    load = f"{counted(job.tasks, 'task')} of {counted(job.samples, 'sample')}"
    say(f"{load}, in batches of {job.batch}" + several * (job.processes > 1))
    names = {"device": "GPU memory", "host": "host memory", "disk": "disk", "operations": "FLOPs"}
    for part, name in names.items():
        text = "{:.1e}".format if part == "operations" else size_text
        rows = [[use, text(size)] for use, size in needs[part].items() if size]
        table(f"{name}: {text(sum(needs[part].values()))}", ["for", "size"], rows)
