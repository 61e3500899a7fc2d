"""`featcal calibrate`: calibrate a merged model, write it and report its drift from the experts."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from featcal.card import licences_differ, write_card
from featcal.cli import options
from featcal.cli.folders import (
    Inputs,
    check_config,
    new_folder,
    plan_with,
    push,
    read_inputs,
    require_hub,
    require_space,
    require_writable,
    skeleton,
    stored_bytes,
    vocabulary_sizes,
    whole_experts,
)
from featcal.cli.start import return_large_blocks
from featcal.cli.terminal import bytes_of, note, progress_bar, say, say_json, table
from featcal.settings import Calibration, require

if TYPE_CHECKING:
    from torch import nn

    from featcal.calibration.choose import Method
    from featcal.calibration.report import Result
    from featcal.data.batches import DrawnBatches
    from featcal.data.places import Location
    from featcal.models.plan import BlockPlan

WORK = "Scratch folder for activations and finished blocks. Default: next to --out."
DRY_RUN = "Check everything, print the memory and disk needed, and stop."
RIDGE = "λ > 0, the pull to the anchor (paper: 0.05)."
BLEND = "ρ: 1 anchors at the merged weight, above 1 extrapolates away from the base (paper: 2)."
INTERPOLATION = "α in [0, 1]: 1 targets the experts' features (paper: 0.3)."
SETTINGS = (Calibration(), options.Running())
EPILOG = f"""{options.DATA_FORMATS}

Examples:

featcal calibrate --base base --merged merged --expert mnist=m --data mnist=images/mnist --out new --dry-run

featcal calibrate --base base --merged merged --expert code=c --data code=code.jsonl --out new --ridge 1e-5 --set tokens=512

featcal calibrate --base base --merged merged --expert dtd=d --data dtd=tanganke/dtd@main --out new --dtype bfloat16

featcal calibrate --merged merged --data math=math.jsonl --data code=code.jsonl --out new --set recipe=merge.yaml

Exit codes: 0 done; 2 a mistake in arguments or files; 130 interrupted (the same command continues
after the last finished block)."""


def calibrate(
    merged: options.Merged,
    data: options.Data,
    out: options.Out,
    base: options.Base = None,
    expert: options.RecipeExperts = None,
    preset: options.Preset = None,
    ridge: Annotated[float | None, Option(help=RIDGE)] = None,
    anchor_blend: Annotated[float | None, Option(help=BLEND)] = None,
    interpolation: Annotated[float | None, Option(help=INTERPOLATION)] = None,
    samples: options.Samples = 256,
    seed: options.Seed = 42,
    setting: Annotated[list[str] | None, options.set_option(*SETTINGS)] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    host_memory: options.HostMemory = "",
    work: Annotated[Path | None, Option(help=WORK)] = None,
    dry_run: Annotated[bool, Option("--dry-run", help=DRY_RUN)] = False,
    push_to_hub: options.Push = None,
    as_json: options.Json = False,
    force: options.Force = False,
) -> None:
    """Calibrate a merged model to its experts' features, block by block in closed form, and write
    the result as a folder of the same format.
    """
    import featcal
    from featcal.calibration.ranks import current, own_device
    from featcal.calibration.resume import scratch_folder
    from featcal.data.batches import drawn, held_out
    from featcal.models.batch import check_tasks

    given = {"ridge": ridge, "anchor_blend": anchor_blend, "interpolation": interpolation}
    given = {key: value for key, value in given.items() if value is not None}
    own = Calibration.from_mapping(given, "calibrate")
    own, keys = options.read_set(setting, "calibrate", own, options.Running())
    settings = options.method_of(preset, own, bool(given) or options.changes_method(setting))
    inputs = read_inputs(base, expert, keys.recipe, merged)
    datasets = options.named_data(data)
    folders = [merged, *inputs.folders, *options.local_paths(datasets)]
    new_folder(out, force, folders)
    require_hub(push_to_hub)
    memory = bytes_of("--host-memory", host_memory)
    where, precision = own_device(options.device_named(device)), options.dtype_named(dtype)
    require_work_folder(work, [*folders, out])
    check_tasks(inputs.experts, {name: [dataset] for name, dataset in datasets.items()})
    student = skeleton(merged)
    check_configs(student, merged, inputs)
    plan = plan_with(student, keys.stack)
    blocks = block_count(student, plan, own)
    blocks *= 2 if settings == "auto" else 1  # once for the candidates
    mine = list(inputs.experts) if dry_run else current().mine(inputs.experts)
    mine_data = {name: datasets[name] for name in mine}
    sources = (inputs.base, merged)
    draw = keys.draw(samples, seed, dtype)
    batches = drawn(student, sources, mine_data, draw)
    size = stored_bytes(merged)  # of the result, and of the finished blocks
    apart = work is not None and work.absolute().parent != out.absolute().parent
    require_space("--out", out, size if apart else 2 * size)
    if work is not None and apart:
        require_space("--work", work, size)
    how: dict[str, Any] = {"device": where, "dtype": precision, "plan": plan}
    if dry_run:
        check_inputs(merged, inputs, batches, settings, how)
        job = {"settings": settings, "on_gpu": where.type == "cuda", "host_memory": memory}
        return show_dry_run(student.to(precision), plan, batches, keys.batch, job, as_json, out)
    how |= {"host_memory": memory, "work": work, "resume": keys.resume}
    # each process reads the batches of its own tasks only
    how["batches"] = dict.fromkeys(datasets, ()) | batches
    how["held_out"] = held_out(student, sources, mine_data, draw)
    if where.type == "cpu":
        return_large_blocks()
    with (
        whole_experts(inputs, work or scratch_folder(out), mine) as experts,
        progress_bar(blocks, "calibrating") as progress,
    ):
        how |= {"base": inputs.base, "experts": experts, "settings": settings}
        try:
            result = featcal.calibrate(merged, out=out, progress=progress, **how)
        except KeyboardInterrupt:
            note("the same command continues after the last finished block")
            raise
    if current().first:
        drawing = {"samples of each task": samples, "split": keys.split, "seed": seed}
        drawing |= {"precision": dtype}
        if keys.tokens:
            drawing["maximum tokens of a sample"] = keys.tokens
        write_samples_card(out, merged, inputs, result, datasets, drawing)
        show_result(result, as_json)
        push(out, push_to_hub)


def require_work_folder(work: Path | None, folders: list[Path]) -> None:
    """Check the scratch folder. Raises: BadSetting for a file or a folder used otherwise."""
    if work is None:
        return
    require(not work.is_file(), "--work", str(work), "names a file; name a folder")
    for folder in (folder.resolve() for folder in folders):
        inside = folder in (work.resolve(), *work.resolve().parents)
        expected = f"lies in {folder}, which is read or written as a whole; name another folder"
        require(not inside, "--work", str(work), expected)
    require_writable("--work", work / "run")


def check_configs(student: Any, merged: Path, inputs: Inputs) -> None:
    """Check every config.json; note heads that are not used and vocabularies that differ."""
    from featcal.models.load import model_class

    for name, folder in inputs.configured.items():
        own, kind = model_class(folder), type(student)
        if own is not kind and own.base_model_prefix == kind.base_model_prefix:
            note(f"{name}: a {own.__name__}; its head is not used (merged: {kind.__name__})")
    folders = {"base": inputs.base, "merged": merged} | inputs.configured
    for folder in folders.values():
        check_config(folder)
    if sizes := vocabulary_sizes(folders):
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        note(
            f"vocabulary sizes: {listed}; samples are tokenised with the base's vocabulary, and "
            "the merged model's embeddings stay as they are"
        )


def block_count(model: Any, plan: "BlockPlan", settings: Calibration) -> int:
    """Return the number of blocks to solve, after the checks that need no weights."""
    from featcal.models.modules import check_coverage, check_modules
    from featcal.models.plan import blocks_of

    for stack in plan.stacks:
        check_coverage(model, stack)
    check_modules(model, plan, settings.modules)
    return sum(len(blocks_of(model, stack)) for stack in plan.stacks)


def check_inputs(
    merged: Path,
    inputs: Inputs,
    batches: "Mapping[str, DrawnBatches]",
    settings: "Method",
    how: Mapping[str, Any],
) -> None:
    """Check models and batches as the run does; adapters are checked against their base alone."""
    from featcal.calibration.calibrate import check
    from featcal.models.lora import with_adapter

    for name, folder in inputs.adapter_bases.items():
        with_adapter(skeleton(folder), inputs.experts[name])
    whole = {n: f for n, f in inputs.experts.items() if n not in inputs.adapter_bases}
    experts = whole or {"merged": merged}
    own = {name: batches.get(name, next(iter(batches.values()))) for name in experts}
    check(merged, base=inputs.base, experts=experts, batches=own, settings=settings, **how)


def show_dry_run(
    model: "nn.Module",
    plan: "BlockPlan",
    batches: "Mapping[str, DrawnBatches]",
    batch: int,
    how: Mapping[str, Any],
    as_json: bool,
    out: Path,
) -> None:
    """Print the drawn samples of every task and the estimate of `featcal plan`."""
    from featcal.calibration.estimate import Job
    from featcal.cli.plan import cannot_run, estimated, needs_as_mapping, show_needs

    most = max(task.samples for task in batches.values())
    longest = max(task.longest for task in batches.values())
    job = Job(len(batches), most, min(batch, most), **how)
    # a model that cannot run without weights can still be calibrated
    with cannot_run() as reasons:
        needs = estimated(model, job, longest or None, longest > 0, plan)
    if reasons:
        return say(f"all inputs fit and the model replays; no estimate is possible ({reasons[0]})")
    require_space("--out", out, sum(needs["disk"].values()))
    if as_json:
        samples = {
            task: {"samples": of.samples, "longest": of.longest} for task, of in batches.items()
        }
        return say_json({"drawn": samples, "needs": needs_as_mapping(needs)})
    columns = ["task", "samples", *(["longest text (tokens)"] if longest else [])]
    rows = [[task, str(of.samples), str(of.longest)] for task, of in batches.items()]
    title = "all inputs fit; each model replays one sample of its task"
    table(title, columns, [row[: len(columns)] for row in rows])
    show_needs(needs, job)
    say("nothing was computed and nothing written (--dry-run)")


def write_samples_card(
    out: Path,
    merged: Path,
    inputs: Inputs,
    result: "Result",
    datasets: "Mapping[str, Location]",
    drawing: Mapping[str, object],
) -> None:
    """Replace the card of a written folder by one that also names the source of the samples."""
    from featcal.calibration.write import calibration_card

    names, on_hub = {}, []
    for task, dataset in sorted(datasets.items()):
        name = Path(dataset.source).resolve().name
        if dataset.on_hub:
            on_hub.append(str(dataset.source))
            config = f":{dataset.config}" if dataset.config else ""
            name = f"{dataset.source}@{dataset.revision}{config}"
        names[f"samples of {task}"] = name
    models = merged, inputs.base, inputs.experts
    card = calibration_card(*models, result, {**drawing, **names}, on_hub)
    write_card(out, card)
    if licences_differ({"base": inputs.base, "merged": merged, **inputs.experts}):
        note(f"{out / 'README.md'}: the inputs have different licences; decide which terms apply")


def show_result(result: "Result", as_json: bool) -> None:
    """Print what was chosen, the drift of the blocks and from each expert, and a warning where it
    grew.
    """
    from featcal.calibration.write import DRIFT_COLUMNS, drift_rows, worse

    if as_json:
        blocks = [block.stated for block in result.blocks]
        drift = [asdict(one) for one in result.drift]
        stated = result.settings.stated if result.settings else None
        content = {"folder": str(result.folder), "settings": stated, "blocks": blocks}
        if result.choice:
            content["choice"] = result.choice.stated
        say_json(content | {"drift": drift})
    else:
        if result.choice:
            title = "divergence from the experts' answers to held-out samples"
            if result.choice.rows:
                table(title, ["model", "mean KL"], result.choice.rows)
            say(result.choice.sentence)
        rows = [
            [block.name, f"{block.relative_drift:.3f}", f"{block.cosine:.3f}"]
            for block in result.blocks
        ]
        title = "calibrated blocks, drift from the experts on the calibration samples"
        if rows:
            table(title, ["block", "drift", "cosine"], rows)
        title = "drift from each expert after the last block"
        table(title, DRIFT_COLUMNS, drift_rows(result.drift))
        say(f"calibrated model: {result.folder}")
    for sentence in worse(result.drift):
        note(f"warning: {sentence}")
