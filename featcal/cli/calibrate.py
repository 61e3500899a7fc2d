"""`featcal calibrate`: calibrate a merged model, write it and report its drift from the experts."""

import ctypes
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from featcal.card import add_to_record, licences_differ, models_record, write_card
from featcal.cli import options
from featcal.cli.inputs import (
    Inputs,
    as_many_as_left,
    differing_vocabularies,
    plan_with,
    read_inputs,
    whole_experts,
)
from featcal.cli.output import (
    new_folder,
    push,
    require_hub,
    require_room,
    require_space,
    require_writable,
)
from featcal.cli.terminal import note, progress_bar, say, say_json, table
from featcal.errors import BadPlan
from featcal.settings import Calibration, require

if TYPE_CHECKING:
    from featcal.calibration.choose import Method
    from featcal.calibration.report import Result
    from featcal.data.batches import Draw, DrawnBatches
    from featcal.models.plan import BlockPlan

MOST = 256  # samples of a task by default
FEWEST, SPARE = 4, 64  # samples of a task that are left for a comparison
MMAP_THRESHOLD = -3  # glibc's name for the size from which a block is mapped on its own
SAMPLES = "Samples per task. Default: 256, or all there are."
DRY_RUN = "Check everything, print the memory and disk needed, and stop."
RIDGE = "λ > 0: how strongly weights are pulled to the anchor (paper: 0.05)."
BLEND = "ρ: 1 anchors at the merged weight; above 1 extrapolates away from the base (paper: 2)."
INTERPOLATION = "α in [0, 1]: 1 targets the experts' features, 0 the student's own (paper: 0.3)."
SETTINGS = (Calibration(), options.Running())
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
    ridge: Annotated[float | None, Option(help=RIDGE)] = None,
    anchor_blend: Annotated[float | None, Option(help=BLEND)] = None,
    interpolation: Annotated[float | None, Option(help=INTERPOLATION)] = None,
    samples: Annotated[int | None, Option(min=1, help=SAMPLES)] = None,
    column: options.Column = None,
    seed: options.Seed = 42,
    setting: Annotated[list[str] | None, options.set_option(*SETTINGS)] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    host_memory: options.HostMemory = None,
    dry_run: Annotated[bool, Option("--dry-run", help=DRY_RUN)] = False,
    push_to_hub: options.Push = None,
    as_json: options.Json = False,
    force: options.Force = False,
) -> None:
    """Calibrate a merged model to its experts' features, block by block in closed form, and write
    the result as a folder of the same format.
    """
    given = {"ridge": ridge, "anchor_blend": anchor_blend, "interpolation": interpolation}
    given = {key: value for key, value in given.items() if value is not None}
    own = Calibration.from_mapping(given, "calibrate")
    own, keys = options.read_set(setting, "calibrate", own, options.Running())
    settings = options.method_of(preset, own, bool(given) or options.changes_method(setting))
    inputs = read_inputs(merged, base, expert, data, keys.recipe)
    new_folder(out, force, inputs.folders)
    require_hub(push_to_hub)
    require_work_folder(keys.work, [*inputs.folders, out])
    require_room(inputs.merged, out, keys.work)
    draw = keys.draw(samples or MOST, seed, dtype, column)
    request = Request(inputs, out, settings, keys, draw, device, host_memory)
    request.draw_tasks(samples)
    if dry_run:
        return show_dry_run(request, as_json)
    result = run(request)
    if result is not None:
        show_result(result, as_json)
        push(out, push_to_hub)


@dataclass(frozen=True)
class Request:
    """One calibration of folders to a folder, after the checks that read no weights.

    draw: of a task that has enough samples.  draws: of every task.
    """

    inputs: Inputs
    out: Path
    settings: "Method"
    keys: options.Running
    draw: "Draw"
    device: str
    host_memory: int | None = None
    draws: "dict[str, Draw]" = field(default_factory=dict)

    @cached_property
    def student(self) -> Any:
        """Return the merged model without weights."""
        from featcal.models.stored import skeleton

        student = skeleton(self.inputs.merged)
        note_differences(student, self.inputs)
        return student

    @cached_property
    def plan(self) -> "BlockPlan":
        """Return the blocks to calibrate."""
        return plan_with(self.student, self.keys.stack)

    def draw_tasks(self, samples: int | None, spare: float = 0) -> None:
        """Draw `samples` of every task, else as many as there are, at most MOST.

        spare: share of a task that is left for a comparison, SPARE samples at most.
        """

        def spared(count: int) -> int:
            return min(SPARE, max(FEWEST, int(spare * count))) if spare else 0

        for task, data in self.inputs.data.items():
            self.draws[task] = self.draw
            if samples is None:
                self.draws[task] = as_many_as_left(self.student, task, data, self.draw, spared)

    def batches(self, tasks: Iterable[str], of: Any) -> dict[str, Any]:
        """Return the batches that `of` (drawn, held_out) makes of these tasks."""
        sources, made = (self.inputs.base, self.inputs.merged), {}
        for task in sorted(tasks):
            made |= of(self.student, sources, {task: self.inputs.data[task]}, self.draws[task])
        return made


def run(request: Request) -> "Result | None":
    """Calibrate, write the folder with its card and record, and return the result; None in a
    process of several that is not the first.
    """
    import featcal
    from featcal.calibration.ranks import current, own_device
    from featcal.calibration.resume import scratch_folder
    from featcal.data.batches import drawn, held_out
    from featcal.models.load import torch_device
    from featcal.models.plan import blocks_of

    inputs, keys, draws = request.inputs, request.keys, request.draws
    blocks = sum(len(blocks_of(request.student, stack)) for stack in request.plan.stacks)
    sweeps = 2 if request.settings == "auto" else 1  # once for the candidates
    mine = current().mine(inputs.experts)  # each process reads the batches of its own tasks only
    batches, unseen = request.batches(mine, drawn), request.batches(mine, held_out)
    device = own_device(torch_device(request.device))
    if device.type == "cpu":
        return_large_blocks()
    with (
        whole_experts(inputs, keys.work or scratch_folder(request.out), mine) as experts,
        progress_bar(sweeps * blocks, "calibrating") as progress,
    ):
        try:
            result = featcal.calibrate(
                inputs.merged,
                base=inputs.base,
                experts=experts,
                batches=dict.fromkeys(inputs.experts, ()) | batches,
                settings=request.settings,
                out=request.out,
                held_out=unseen,
                plan=request.plan,
                device=device,
                dtype=request.draw.dtype,
                host_memory=request.host_memory,
                work=keys.work,
                resume=keys.resume,
                progress=progress,
            )
        except KeyboardInterrupt:
            note("the same command continues after the last finished block")
            raise
    if not current().first:
        return None
    write_samples_card(request, result)
    add_to_record(
        request.out,
        **models_record(inputs.base, inputs.experts, request.out),
        samples={task: draws[task].samples for task in sorted(draws)},
        seed=request.draw.seed,
        split=request.draw.split,
    )
    return result


def require_work_folder(work: Path | None, folders: list[Path]) -> None:
    """Check the scratch folder. Raises: BadSetting for a file or a folder used otherwise."""
    if work is None:
        return
    require(not work.is_file(), "calibrate.work", str(work), "names a file; name a folder")
    for folder in (folder.resolve() for folder in folders):
        inside = folder in (work.resolve(), *work.resolve().parents)
        expected = f"lies in {folder}, which is read or written as a whole; name another folder"
        require(not inside, "calibrate.work", str(work), expected)
    require_writable("calibrate.work", work / "run")


def note_differences(student: Any, inputs: Inputs) -> None:
    """Note heads that are not used and vocabularies that differ."""
    from featcal.models.load import model_class

    for name, folder in inputs.configured.items():
        own, kind = model_class(folder), type(student)
        if own is not kind and own.base_model_prefix == kind.base_model_prefix:
            note(f"{name}: a {own.__name__}; its head is not used (merged: {kind.__name__})")
    folders = {"base": inputs.base, "merged": inputs.merged} | inputs.configured
    if listed := differing_vocabularies(folders):
        note(
            f"vocabulary sizes: {listed}; samples are tokenised with the base's vocabulary, and "
            "the merged model's embeddings stay as they are"
        )


def check_inputs(request: Request, batches: "Mapping[str, DrawnBatches]") -> None:
    """Check models and batches as the run does; adapters are checked against their base alone."""
    from featcal.calibration.calibrate import check
    from featcal.models.lora import with_adapter
    from featcal.models.stored import skeleton

    inputs = request.inputs
    for name, folder in inputs.adapter_bases.items():
        with_adapter(skeleton(folder), inputs.experts[name])
    whole = {n: f for n, f in inputs.experts.items() if n not in inputs.adapter_bases}
    experts = whole or {"merged": inputs.merged}
    check(
        inputs.merged,
        base=inputs.base,
        experts=experts,
        batches={n: batches.get(n, next(iter(batches.values()))) for n in experts},
        settings=request.settings,
        plan=request.plan,
        device=request.device,
        dtype=request.draw.dtype,
    )


def show_dry_run(request: Request, as_json: bool) -> None:
    """Check all inputs; print the drawn samples of every task and the estimate of `featcal plan`."""
    from featcal.calibration.estimate import Job
    from featcal.cli.plan import estimated, needs_as_mapping, show_needs
    from featcal.data.batches import drawn
    from featcal.models.load import torch_device

    batches = request.batches(request.draws, drawn)
    check_inputs(request, batches)
    most = max(task.samples for task in batches.values())
    longest = max(task.longest for task in batches.values())
    size, on_gpu = min(request.keys.batch, most), torch_device(request.device).type == "cuda"
    memory = {"on_gpu": on_gpu, "host_memory": request.host_memory}
    job = Job(len(batches), most, size, request.settings, **memory)
    model = request.student.to(request.draw.dtype)
    try:
        needs = estimated(model, job, longest or None, longest > 0, request.plan)
    except BadPlan as error:  # it can still be calibrated
        return say(f"all inputs fit and the model replays; no estimate: {error.problem}")
    require_space("--out", request.out, sum(needs["disk"].values()))
    if as_json:
        found = {t: {"samples": of.samples, "longest": of.longest} for t, of in batches.items()}
        return say_json({"drawn": found, "needs": needs_as_mapping(needs)})
    columns = ["task", "samples", *(["longest text (tokens)"] if longest else [])]
    rows = [[task, str(of.samples), str(of.longest)] for task, of in batches.items()]
    title = "all inputs fit; each model replays one sample of its task"
    table(title, columns, [row[: len(columns)] for row in rows])
    show_needs(needs, job)
    say("nothing was computed and nothing written (--dry-run)")


def return_large_blocks() -> None:
    """Return freed blocks of 2 MiB and more to the system at once, unless the environment differs.

    Otherwise the memory of a run cannot be predicted. New pages cost up to a quarter more time on a
    CPU, so only processes of our own do this.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt(MMAP_THRESHOLD, 2 << 20)


def write_samples_card(request: Request, result: "Result") -> None:
    """Replace the card of a written folder by one that also names the source of the samples."""
    from featcal.calibration.report import calibration_card

    counts = {task: draw.samples for task, draw in sorted(request.draws.items())}
    same = len(set(counts.values())) == 1
    listed = ", ".join(f"{task} {count}" for task, count in counts.items())
    rows: dict[str, object] = {
        "samples of each task": next(iter(counts.values())) if same else listed,
        "split": request.draw.split,
        "seed": request.draw.seed,
        "precision": str(request.draw.dtype).removeprefix("torch."),
    }
    if request.draw.tokens:
        rows["maximum tokens of a sample"] = request.draw.tokens
    on_hub, inputs = [], request.inputs
    for task, dataset in sorted(inputs.data.items()):
        name = Path(dataset.source).resolve().name
        if dataset.on_hub:
            on_hub.append(str(dataset.source))
            config = f":{dataset.config}" if dataset.config else ""
            name = f"{dataset.source}@{dataset.revision}{config}"
        rows[f"samples of {task}"] = name
    models = inputs.merged, inputs.base, inputs.experts
    write_card(request.out, calibration_card(*models, result, rows, on_hub))
    if licences_differ({"base": inputs.base, "merged": inputs.merged, **inputs.experts}):
        file = request.out / "README.md"
        note(f"{file}: the inputs have different licences; decide which terms apply")


def show_result(result: "Result", as_json: bool) -> None:
    """Print what was chosen, the drift of the blocks and from each expert, and a warning where it
    grew.
    """
    from featcal.calibration.report import DRIFT_COLUMNS, block_rows, drift_rows, worse

    if as_json:
        say_json({"folder": str(result.folder), "drift": []} | result.stated)
    else:
        if result.choice:
            title = "divergence from the experts' answers to held-out samples"
            if result.choice.rows:
                table(title, ["model", "mean KL"], result.choice.rows)
            say(result.choice.sentence)
        title = "calibrated blocks, drift from the experts on the calibration samples"
        if result.blocks:
            table(title, ["block", "drift", "cosine", "tokens"], block_rows(result.blocks))
        title = "drift from each expert after the last block"
        table(title, DRIFT_COLUMNS, drift_rows(result.drift))
        say(f"calibrated model: {result.folder}")
    for sentence in worse(result.drift):
        note(f"warning: {sentence}")
