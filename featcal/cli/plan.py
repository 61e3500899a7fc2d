"""`featcal plan`: estimate a calibration from config.json files, before a weight is downloaded."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from featcal.cli import options
from featcal.cli.models import alike, named_models, skeleton
from featcal.cli.options import dtype_named, existing_folder, stacks_named
from featcal.cli.terminal import Json, Quiet, bytes_of, count_text, say, say_json, size_text, table
from featcal.errors import BadSetting, TensorsDiffer
from featcal.settings import Calibration, require

if TYPE_CHECKING:
    import torch
    from torch import nn

    from featcal.calibration.estimate import Job, ModelShape
    from featcal.models.plan import BlockPlan

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
    """Estimate memory of GPU and host, disk and operations of a calibration from config.json."""
    from featcal.calibration.estimate import Job

    require(device in ("cpu", "cuda"), "--device", device, "must be cpu or cuda")
    on_gpu, on_device = device == "cuda", bytes_of("--device-memory", device_memory)
    on_host = bytes_of("--host-memory", host_memory) if host_memory else None
    settings = Calibration.preset(preset)
    existing_folder("--merged", merged)
    named = named_models(base, expert or (), recipe, merged, weights=False)
    kind, count = dtype_named(dtype), len(named.shaped)
    require(ranks <= count, "--ranks", ranks, f"must be at most the number of experts, {count}")
    folders = {"base": named.base, "merged": merged}
    folders |= {f"expert {name!r}": folder for name, folder in named.shaped.items()}
    models = {f"{role} ({folder})": skeleton(folder) for role, folder in folders.items()}
    same_shapes(models)
    model = next(iter(models.values()))
    chosen = stacks_named(model, stack)
    check_tokens(model, tokens)
    size = min(batch, samples)
    job = Job(count, samples, size, settings, on_gpu, on_device, on_host, ranks)
    needs = estimated(model.to(kind), job, tokens, padded, chosen)
    if as_json:
        say_json(as_mapping(needs))
    else:
        show(needs, job)


def same_shapes(models: Mapping[str, "nn.Module"]) -> None:
    """Raise TensorsDiffer, naming the key of config.json where one tells it, unless all models'
    towers are of one shape.

    As for calibrate, rows of words may be more or fewer, and what stands on the towers may be other
    heads.
    """
    from featcal.models.load import require_one_family

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


def estimated(
    model: "nn.Module", job: "Job", tokens: int | None, padded: bool, plan: "BlockPlan | None"
) -> dict[str, dict[str, int]]:
    """Estimate what `featcal calibrate` needs, the samples that it draws included.

    Pictures are kept as bytes, one for each value of the model's input; texts as tokens.
    """
    from featcal.calibration.estimate import estimate, nbytes

    inputs = meta_batch(model, 1, tokens, padded).values()
    sample = sum(v.numel() if v.is_floating_point() else nbytes(v) for v in inputs)
    job = replace(job, drawn=sample * job.samples * job.tasks)
    return estimate(shape_of(model, job.batch, job.settings, tokens, padded, plan), job)


def shape_of(
    model: "nn.Module",
    batch: int,
    settings: Calibration,
    tokens: int | None,
    padded: bool,
    plan: "BlockPlan | None" = None,
) -> "ModelShape":
    """Return the shape of the model on a batch of the shape that its configuration states."""
    from featcal.calibration.estimate import model_shape
    from featcal.models.families import plan_for

    inputs = meta_batch(model, batch, tokens, padded)
    return model_shape(model, plan_for(model, plan), inputs, settings)


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


def as_mapping(needs: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Return totals in bytes and operations, and their parts, for programs."""
    totals = {part: sum(needs[part].values()) for part in ("device", "host", "disk")}
    flops = sum(needs["operations"].values())
    return {f"{part}_bytes": size for part, size in totals.items()} | {"flops": flops} | dict(needs)


def show(needs: Mapping[str, Mapping[str, int]], job: "Job") -> None:
    """Print totals, then their parts."""
    several = f"; memory and disk are those of one of {job.processes} processes"
    load = f"{job.tasks} tasks of {job.samples} samples, in batches of {job.batch}"
    say(load + several * (job.processes > 1))
    names = {"device": "GPU memory", "host": "host memory", "disk": "disk", "operations": "FLOPs"}
    for part, name in names.items():
        text = count_text if part == "operations" else size_text
        rows = [[what, text(size)] for what, size in needs[part].items() if size]
        if rows:
            table(f"{name}: {text(sum(needs[part].values()))}", ["for", "size"], rows)
