"""The model card of `featcal calibrate`: as the library writes it, with what only the command line
knows: the samples."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from featcal.card import licences_differ, write_card
from featcal.cli import options
from featcal.cli.inspect import NOT_RUN
from featcal.cli.models import (
    Named,
    alike_student,
    named_models,
    tell_heads,
    tell_words,
    whole_experts,
)
from featcal.cli.options import (
    block_count,
    device_named,
    dtype_named,
    existing_folder,
    local,
    named_places,
    new_folder,
    require_space,
    stacks_named,
    stored_bytes,
    work_folder,
)
from featcal.cli.process import give_back_large_blocks
from featcal.cli.publish import Push, push, require_hub
from featcal.cli.terminal import Json, Quiet, bytes_of, counted, note, say, say_json, table
from featcal.errors import BadPlan, FeatCalError

if TYPE_CHECKING:
    from torch import nn

    from featcal.calibration.report import Result
    from featcal.data.batches import DrawnBatches
    from featcal.data.places import Place
    from featcal.settings import Calibration


def rewrite_card(
    out: Path,
    merged: Path,
    named: Named,
    settings: "Calibration",
    result: "Result",
    places: Mapping[str, "Place"],
    samples: dict[str, object],
) -> None:
    """Replace the card of the result by one that also describes the samples; warn if the licences
    of the inputs differ.
    """
    from featcal.calibration.write import calibration_card

    datasets = [str(place.source) for place in places.values() if place.on_hub]
    for task, place in sorted(places.items()):
        name = Path(place.source).resolve().name
        if place.on_hub:
            name = f"{place.source}@{place.revision}"
            name += f":{place.config}" if place.config else ""
        samples[f"samples of {task}"] = name
    models = merged, named.base, named.experts
    results = result.blocks, result.drift
    write_card(out, calibration_card(*models, settings, *results, samples, datasets))
    if licences_differ({"base": named.base, "merged": merged, **named.experts}):
        note(
            f"{out / 'README.md'}: the inputs have different licences;"
            " decide which terms apply before you publish the result"
        )


def show_run(
    model: "nn.Module",
    batches: Mapping[str, "DrawnBatches"],
    size: int,
    given: Mapping[str, Any],
    settings: "Calibration",
    as_json: bool,
    out: Path,
) -> None:
    """Print the drawn samples of every task, and what `featcal plan` estimates for them.

    Raises: BadSetting where the disk has less room than is needed.
    """
    from featcal.calibration.estimate import Job
    from featcal.cli.plan import as_mapping, estimated, show

    most = max(drawn.samples for drawn in batches.values())
    longest = max(drawn.longest for drawn in batches.values())
    job = Job(
        len(batches),
        most,
        min(size, most),
        settings,
        on_gpu=given["device"].type == "cuda",
        host_memory=given["host_memory"],
    )
    model, tokens = model.to(given["dtype"]), longest or None
    try:
        needs = estimated(model, job, tokens, longest > 0, given["plan"])
    # a model that cannot run without weights can be calibrated all the same
    except NOT_RUN as error:
        if isinstance(error, FeatCalError) and not isinstance(error, BadPlan):
            raise
        reason = " ".join(str(error).splitlines()[0].split())[:200]
        say(f"all files were found and the model replays; it cannot be estimated ({reason})")
        return
    require_space("--out", out, sum(needs["disk"].values()))
    if as_json:
        drawn = {
            task: {"samples": of.samples, "longest": of.longest} for task, of in batches.items()
        }
        say_json({"drawn": drawn, "needs": as_mapping(needs)})
        return
    rows = [
        [task, str(of.samples), *([str(of.longest)] if longest else [])]
        for task, of in batches.items()
    ]
    table(
        "all files were found, models are alike and replay one sample of each task",
        ["task", "samples", *(["longest text, tokens"] if longest else [])],
        rows,
    )
    show(needs, job)
    say("nothing was computed and nothing written (--dry-run)")


PICTURES = (
    "a folder of pictures, FOLDER/train/CLASS/*.png, FOLDER/train.parquet with a column image"
)
TEXT = "FILE.txt (a sample on each line), FILE.jsonl or FILE.parquet with text, messages, prompt and completion, or input and target"
EPILOG = f"""Pictures, for CLIP, ViT, DINOv2 and SigLIP: {PICTURES}, or a data set of the hub.

Text, for Llama, T5, BERT and others: {TEXT}, a folder that holds train.jsonl, or a data set of the hub.

Examples:

featcal calibrate --base base --merged merged --expert mnist=m --data mnist=images/mnist --out new --dry-run

featcal calibrate --base base --merged merged --expert code=c --data code=code.jsonl --out new --ridge 1e-5 --tokens 512

featcal calibrate --base base --merged merged --expert dtd=d --data dtd=tanganke/dtd@main --out new --dtype bfloat16

featcal calibrate --recipe merge.yaml --merged merged --data math=math.jsonl --data code=code.jsonl --out new

Exit codes: 0 done; 2 a mistake in arguments or files; 130 interrupted, and the same command then goes on where it was."""


def calibrate(
    merged: options.Merged,
    data: options.Data,
    out: options.Out,
    base: options.Base = None,
    expert: options.SomeExperts = None,
    recipe: options.MergekitRecipe = None,
    preset: Annotated[
        str,
        Option(
            help="paper: its settings for CLIP; best: those beyond it that did best on synthetic images."
        ),
    ] = "paper",
    ridge: Annotated[
        float | None,
        Option(help="λ > 0: pull of the weights to the anchor (paper: 0.05 for CLIP)."),
    ] = None,
    anchor_blend: Annotated[
        float | None,
        Option(
            help="ρ: the anchor; 1 is the merged weight, above 1 away from the base (paper: 2)."
        ),
    ] = None,
    interpolation: Annotated[
        float | None, Option(help="α in [0, 1]: 1 targets the experts' features (paper: 0.3).")
    ] = None,
    residual: Annotated[
        float | None, Option(help="β in [0, 1]: 1 targets the experts' residual stream (paper: 0).")
    ] = None,
    order: Annotated[
        str | None,
        Option(help="forward: block by block (paper); sites: also site by site within a block."),
    ] = None,
    affine: Annotated[
        str | None, Option(help="separate: weight, then bias (paper); joint: both at once.")
    ] = None,
    prior: Annotated[
        float | None,
        Option(help="κ: weight of the task-vector prior (paper: 0)."),
    ] = None,
    samples: Annotated[int, Option(min=1, help="Samples of each task (paper: 256).")] = 256,
    tokens: options.Tokens = None,
    seed: Annotated[int, Option(min=0, help="Seed of the draw of samples.")] = 42,
    batch: options.Batch = 32,
    split: options.Split = "train",
    module: options.Modules = None,
    norm: Annotated[
        bool, Option("--norm/--no-norm", help="Also solve scales and shifts of norms.")
    ] = True,
    bias: Annotated[bool, Option("--bias/--no-bias", help="Also solve biases.")] = True,
    stack: options.Stacks = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    host_memory: options.HostMemory = "",
    work: Annotated[
        Path | None,
        Option(help="Scratch folder for activations and finished blocks. Default: next to --out."),
    ] = None,
    resume: options.Resume = True,
    dry_run: Annotated[
        bool,
        Option("--dry-run", help="Check everything, print the memory and disk needed, and stop."),
    ] = False,
    push_to_hub: Push = None,
    as_json: Json = False,
    quiet: Quiet = False,
    force: options.Force = False,
) -> None:
    """Calibrate a merged model to its experts' features, block by block, and write it as a folder
    of the same format.
    """
    import featcal
    from featcal.calibration.ranks import own_device
    from featcal.settings import Calibration

    chosen: dict[str, Any] = {
        "ridge": ridge,
        "anchor_blend": anchor_blend,
        "interpolation": interpolation,
        "residual": residual,
        "order": order,
        "affine": affine,
        "prior": prior,
        "bias": bias,
        "norm": norm,
        "modules": tuple(module or ()) or None,
    }
    settings = Calibration.preset(
        preset, {name: value for name, value in chosen.items() if value is not None}
    )
    existing_folder("--merged", merged)
    named, places = named_models(base, expert or (), recipe, merged), named_places("--data", data)
    read = [merged, *named.read, *local(places)]
    new_folder(out, force, read)
    require_hub(push_to_hub)
    given: dict[str, Any] = {
        "host_memory": bytes_of("--host-memory", host_memory) if host_memory else None,
        "resume": resume,
    }
    given |= {
        "device": own_device(device_named(device)),
        "dtype": dtype_named(dtype),
        "work": work_folder(work, out, read),
    }
    from featcal.calibration.ranks import current
    from featcal.calibration.resume import beside
    from featcal.data.batches import Draw, drawn, held_out
    from featcal.models.batch import check_tasks

    check_tasks(named.experts, {name: [place] for name, place in places.items()})
    student = alike_student(merged, named)
    tell_heads(student, named)
    tell_words(named.all_shaped(merged))
    plan = stacks_named(student, stack)
    given["plan"] = plan
    blocks = block_count(student, settings.modules, plan)
    mine = list(named.experts) if dry_run else current().mine(named.experts)
    own = {name: places[name] for name in mine}
    draw = Draw(samples, seed, batch, split, tokens, dtype_named(dtype))
    batches = drawn(student, (named.base, merged), own, draw)
    require_room(merged, out, work)
    if dry_run:
        from featcal.calibration.calibrate import check

        whole = {
            name: folder for name, folder in named.experts.items() if name not in named.under
        } or {"merged": merged}
        own = {name: batches.get(name, next(iter(batches.values()))) for name in whole}
        how = {key: given[key] for key in ("device", "dtype", "plan")}
        check(merged, base=named.base, experts=whole, batches=own, settings=settings, **how)
        return show_run(student, batches, batch, given, settings, as_json, out)
    given |= {
        "batches": dict.fromkeys(places, ()) | batches
    }  # what other processes calibrate is theirs to read
    given |= {"held_out": held_out(student, (named.base, merged), own, draw)}
    if given["device"].type == "cpu":
        give_back_large_blocks()
    whole = whole_experts(named, work or beside(out), mine)
    with whole as given["experts"], counted(blocks, "calibrating") as progress:
        try:
            result = featcal.calibrate(
                merged, base=named.base, settings=settings, out=out, progress=progress, **given
            )
        except KeyboardInterrupt:
            note("the same command goes on after the last solved block")
            raise
    if not current().first:
        return
    how = {"samples of each task": samples, "split": split, "seed": seed, "precision": dtype}
    how |= {"tokens of a sample, at most": tokens} if tokens else {}
    rewrite_card(out, merged, named, settings, result, places, how)
    show_result(result, settings.stated, as_json)
    push(out, push_to_hub)


def require_room(merged: Path, out: Path, work: Path | None) -> None:
    """Raise BadSetting unless the disk has room for the result and the solved blocks."""
    size = stored_bytes(merged)
    same = work is None or work.absolute().parent == out.absolute().parent
    require_space("--out", out, 2 * size if same else size)
    if work is not None and not same:
        require_space("--work", work, size)


def show_result(result: "Result", settings: dict[str, Any], as_json: bool) -> None:
    """Print the result and its drift from each expert, with a warning where calibration made it
    worse.
    """
    from featcal.calibration.write import DRIFT_COLUMNS, drift_rows, worse

    if as_json:
        blocks = [block.told for block in result.blocks]
        told = {
            "folder": str(result.folder),
            "settings": settings,
            "blocks": blocks,
        }
        say_json(told | {"drift": [asdict(one) for one in result.drift]})
    else:
        rows = [
            [block.name, f"{block.relative_drift:.3f}", f"{block.cosine:.3f}"]
            for block in result.blocks
        ]
        table(
            "calibrated blocks, drift from the experts on the calibration samples",
            ["block", "drift", "cosine"],
            rows,
        )
        table(
            "drift from each expert behind the last block", DRIFT_COLUMNS, drift_rows(result.drift)
        )
        say(f"calibrated model: {result.folder}")
    for sentence in worse(result.drift):
        note(f"warning: {sentence}")
