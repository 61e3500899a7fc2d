"""`featcal calibrate`: calibrate a merged model and write it as a folder of the same format."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from featcal import card
from featcal.cli import options, output
from featcal.cli.inputs import Inputs, Request, differing_vocabularies, read_inputs, whole_experts
from featcal.cli.output import note, progress_lines, say, say_json, table
from featcal.errors import BadCapture, BadPlan
from featcal.files import require_apart
from featcal.settings import Calibration, require

if TYPE_CHECKING:
    from featcal.calibration.choose import CalibrationOrAuto
    from featcal.data.batches import Draw, DrawnBatches

SAMPLES = "Samples per task. Default: 256, or all there are."
DRY_RUN = "Check everything, print the memory and disk needed, and stop."
RIDGE = "λ > 0 or auto: how strongly weights are pulled to the anchor (paper: 0.05)."
BLEND = "ρ: 1 anchors at the merged weight; above 1 extrapolates away from the base (paper: 2)."
INTERPOLATION = "α in [0, 1]: 1 targets the experts' features, 0 the student's own (paper: 0.3)."
SETTINGS = Calibration(), options.Running()
EPILOG = f"""{options.DATA_FORMATS}

Examples:

featcal calibrate --merged merged --data math=math.jsonl --data code=code.jsonl --out new

featcal calibrate --merged merged --data mnist=images/mnist --data dtd=tanganke/dtd@main --out new --dry-run

featcal calibrate --merged merged --base base --expert code=owner/code --data code=code.jsonl --out new --set tokens=512

After an interruption the same command continues after the last finished block."""


def calibrate(
    merged: options.Merged,
    data: options.Data,
    out: options.Out,
    base: options.Base = None,
    expert: options.Experts = None,
    preset: options.Preset = None,
    ridge: Annotated[str | None, Option(metavar="X|auto", help=RIDGE)] = None,
    anchor_blend: Annotated[float | None, Option(help=BLEND)] = None,
    interpolation: Annotated[float | None, Option(help=INTERPOLATION)] = None,
    samples: Annotated[int | None, Option(min=1, help=SAMPLES)] = None,
    batch: Annotated[int | None, Option(min=1, help="Samples per batch. Default: 32.")] = None,
    column: options.Column = None,
    classes: options.Classes = None,
    seed: options.Seed = 42,
    setting: Annotated[list[str] | None, options.set_option(*SETTINGS)] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    dry_run: Annotated[bool, Option("--dry-run", help=DRY_RUN)] = False,
    push_to_hub: options.Push = None,
    as_json: options.Json = False,
    force: options.Force = False,
) -> None:
    """Calibrate a merged model to its experts' features and write a folder of the same format."""
    typed = dict(ridge=ridge, anchor_blend=anchor_blend, interpolation=interpolation, batch=batch)
    pairs = [*(setting or ()), *(f"{k}={v}" for k, v in typed.items() if v is not None)]
    values, keys = options.read_set(pairs, "calibrate", *SETTINGS)
    settings = options.method_of(preset, values, pairs)
    inputs = read_inputs(merged, base, expert, data, keys.recipe)
    output.new_folder(out, force, inputs.folders)
    output.require_hub(push_to_hub)
    if keys.work:
        key, inside = "calibrate.work", keys.work / "run"
        require(not keys.work.is_file(), key, str(keys.work), "names a file; name a folder")
        require_apart(key, inside, [*inputs.folders, out])
        output.require_writable(key, inside)
    output.require_room(inputs.merged, out, keys.work)
    draw = keys.draw(samples or options.DEFAULT_SAMPLES, seed, dtype, column)
    if settings == "auto":  # leaves out equal samples, so that none is calibrated on and held out
        draw = replace(draw, skip=0)
    names = options.classes_named(classes, inputs.data)
    expected = "is for the choice of settings, which other options set here"
    require(settings == "auto" or not names, "--classes", classes, expected)
    request = Calibrating(inputs, keys, draw, device, names, out, settings)
    draws = request.draws(samples)
    if dry_run:
        return show_dry_run(request, draws, as_json)
    result = run(request, draws, lambda folder: None)
    if result is not None:
        show_result(result, as_json)
        output.push(out, push_to_hub)


@dataclass(frozen=True)
class Calibrating(Request):
    """One calibration of folders to a folder."""

    keys: options.Running
    out: Path
    settings: "CalibrationOrAuto"


def run(
    request: Calibrating, draws: "Mapping[str, Draw]", measure: Callable[[Path], object]
) -> "card.Result | None":
    """Write a calibrated folder, to whose card `measure` adds; None unless in the first process."""
    import featcal
    from featcal.calibration.choose import CANDIDATES
    from featcal.calibration.ranks import current, process_device
    from featcal.calibration.scratch import scratch_folder
    from featcal.models.load import torch_device
    from featcal.models.modules import packed_experts
    from featcal.models.plan import blocks_of

    inputs, keys = request.inputs, request.keys
    note_differences(inputs)
    blocks = sum(len(blocks_of(request.student, stack)) for stack in request.plan.stacks)
    sweeps = len(CANDIDATES) if packed_experts(request.student) else 1  # of the candidates
    sweeps = 1 + sweeps * (request.settings == "auto")
    mine = current().mine(inputs.experts)  # each process reads the batches of its own tasks only
    device = process_device(torch_device(request.device))
    arguments: Any = {"plan": request.plan, "device": device, "dtype": request.draw.dtype}
    arguments |= {"host_memory": keys.host_memory, "work": keys.work, "resume": keys.resume}
    arguments |= {"base": inputs.base, "settings": request.settings, "out": request.out}

    def finish(folder: Path, result: card.Result) -> None:
        complete(request, draws, folder, result)
        measure(folder)

    with whole_experts(inputs, scratch_folder(request.out, keys.work), mine) as experts:
        try:
            batches = request.batches({task: draws[task] for task in mine})
            arguments["batches"] = dict.fromkeys(inputs.experts, ()) | batches
            arguments["labels"] = request.labels({task: experts[task] for task in mine})
            arguments |= {"experts": experts, "progress": progress_lines(sweeps * blocks)}
            result = featcal.calibrate(inputs.merged, **arguments, _complete=finish)
        except KeyboardInterrupt:
            note("the same command continues after the last finished block")
            raise
    return result if current().first else None


def note_differences(inputs: Inputs) -> None:
    """Note experts of another class, such as one with another head, and differing vocabularies."""
    from featcal.models.load import model_class

    merged = model_class(inputs.merged)
    if merged.__name__ == "CLIPModel":
        note("of CLIPModel the vision tower is calibrated and compared; the text tower stays")
    for name, folder in inputs.configured.items():
        expert = model_class(folder)
        if expert is not merged and expert.base_model_prefix == merged.base_model_prefix:
            used = f"only what the merged {merged.__name__} has of it is used"
            note(f"{name}: a {expert.__name__}; {used}")
    folders = {"base": inputs.base, "merged": inputs.merged} | inputs.configured
    if listed := differing_vocabularies(folders):
        rest = "samples are tokenised with the base's vocabulary"
        note(f"vocabulary sizes: {listed}; {rest}; the merged model's embeddings stay")


def check_inputs(request: Calibrating, batches: "Mapping[str, DrawnBatches]") -> None:
    """Check models and batches as the run does; adapters are checked against their base alone."""
    from featcal.calibration.calibrate import check
    from featcal.calibration.features import open_models
    from featcal.models.lora import with_adapter
    from featcal.models.stored import skeleton

    inputs = request.inputs
    for name, folder in inputs.adapter_bases.items():
        with_adapter(skeleton(folder), inputs.experts[name])
    full_models = {n: f for n, f in inputs.experts.items() if n not in inputs.adapter_bases}
    experts = full_models or {"merged": inputs.merged}
    labels = request.labels(full_models)
    expert_batches = {n: batches.get(n, next(iter(batches.values()))) for n in experts}
    models = inputs.merged, inputs.base, experts, request.plan, request.settings
    opened = open_models(*models, device=request.device, dtype=request.draw.dtype)
    check(opened, expert_batches, request.settings == "auto", labels)


def show_dry_run(request: Calibrating, draws: "Mapping[str, Draw]", as_json: bool) -> None:
    """Check all inputs; print each task's drawn samples and the estimate of `featcal plan`."""
    from featcal.calibration.estimate import Job
    from featcal.cli.plan import estimated, needs_as_mapping, show_needs
    from featcal.models.load import torch_device

    note_differences(request.inputs)
    batches = request.batches(draws)
    check_inputs(request, batches)
    most = max(task.samples for task in batches.values())
    longest = max(task.longest for task in batches.values())
    size, on_gpu = min(request.keys.batch, most), torch_device(request.device).type == "cuda"
    job = Job(len(batches), most, size, request.settings, on_gpu, 0, request.keys.host_memory)
    model = request.student.to(request.draw.dtype)
    drawn = {n: {"samples": task.samples, "longest": task.longest} for n, task in batches.items()}
    try:
        needs = estimated(model, job, longest or None, longest > 0, request.plan)
    except (BadCapture, BadPlan) as error:  # it can still be calibrated
        reason = f"all inputs fit and the model replays; no estimate: {error.problem}"
        return say_json({"drawn": drawn, "needs": None}) if as_json else say(reason)
    output.require_space("--out", request.out, sum(needs["disk"].values()))
    if as_json:
        return say_json({"drawn": drawn, "needs": needs_as_mapping(needs)})
    columns = ["task", "samples", *(["longest text (tokens)"] if longest else [])]
    rows = [[name, str(task.samples), str(task.longest)] for name, task in batches.items()]
    title = "all inputs fit; each model replays one sample of its task"
    table(title, columns, [row[: len(columns)] for row in rows])
    show_needs(needs, job)
    say("nothing was computed and nothing written (--dry-run)")


def complete(
    request: Calibrating, draws: "Mapping[str, Draw]", folder: Path, result: card.Result
) -> None:
    """Add models and samples to the record of an unfinished folder, and samples to its card."""
    inputs, draw = request.inputs, request.draw
    record = card.models_record(inputs.base, inputs.experts, request.out)
    if earlier := output.recorded_draws(inputs.merged):
        record["earlier"] = earlier
    request.record(folder, draws, **record)
    counts = {own.samples for own in draws.values()}
    listed = ", ".join(f"{task} {own.samples}" for task, own in sorted(draws.items()))
    count_text = listed if len(counts) > 1 else counts.pop()
    rows: dict[str, object] = {"samples of each task": count_text, "split": draw.split}
    rows |= {"seed": draw.seed, "precision": str(draw.dtype).removeprefix("torch.")}
    if draw.tokens:
        rows["maximum tokens of a sample"] = draw.tokens
    locations = sorted(inputs.data.items())
    rows |= {f"samples of {task}": location.name for task, location in locations}
    on_hub = [str(location.source) for _, location in locations if location.on_hub]
    models = inputs.merged, inputs.base, inputs.experts
    card.write_card(folder, card.calibration_card(*models, result, rows, on_hub))
    roles = {"base": inputs.base, "merged": inputs.merged, **inputs.experts}
    if sum(map(bool, card.licences_of(roles))) > 1:
        note(f"{request.out / card.CARD}: inputs have different licences; decide which terms apply")


def show_result(result: card.Result, as_json: bool) -> None:
    """Print what was chosen and the drift of the calibrated blocks."""
    if as_json:
        drift = [block.relative_drift for block in result.blocks]
        return say_json({"folder": str(result.folder), "drift": drift} | result.stated)
    if result.choice:
        title = "divergence from the experts' answers to held-out samples"
        table(title, ["model", "mean KL"], result.choice.rows)
        say(result.choice.sentence)
    title = "calibrated blocks, drift from the experts on the calibration samples"
    table(title, ["block", "drift", "cosine", "tokens"], card.block_rows(result.blocks))
    say(f"{'calibrated' if result.settings else 'merged'} model: {result.folder}")
