"""`featcal fix`: calibrate a merged model, and check on held-out samples that it is better."""

from os.path import normpath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from featcal.card import hub_checkpoint
from featcal.cli import options, output
from featcal.cli.calibrate import Calibrating, run
from featcal.cli.compare import add_agreements, agreements_of
from featcal.cli.inputs import read_inputs
from featcal.cli.output import new_folder, note, require_room, say, say_json, table
from featcal.errors import BadData

if TYPE_CHECKING:
    from featcal.evaluation.compare import Agreement

LEAST = 12  # samples of a task: those held out, and what the choice of settings needs
ERRORS = 2  # standard errors beyond which a difference counts
BEFORE, AFTER = "before", "after"
VERDICTS = {"better": "better", "worse": "worse", "same": "not clearly different"}  # in a sentence
EPILOG = f"""A quarter of each task's samples (4 to 64) is held out and used to compare the
model before and after. The others calibrate it, with settings chosen as by featcal calibrate,
which the model card lists. Each task needs at least {LEAST} samples.

{options.DATA_FORMATS}

Examples:

featcal fix merged --data math=math.jsonl --data code=code.jsonl

featcal fix owner/merged --base owner/base --expert mnist=owner/mnist --data mnist=images/mnist"""


def fix(
    merged: Annotated[str, Argument(metavar="MERGED", help="Merged model.")],
    data: options.Data,
    column: options.Column = None,
    classes: options.Classes = None,
    base: options.Base = None,
    expert: options.Experts = None,
    split: Annotated[str, Option(help="Split of the data.")] = "train",
    out: Annotated[Path | None, Option(help="Folder to write. Default: MERGED-calibrated.")] = None,
    device: options.Device = "auto",
    as_json: options.Json = False,
    force: options.Force = False,
) -> None:
    """Calibrate a merged model, write it, and report whether it is better for each expert."""
    inputs = read_inputs(merged, base, expert, data, named_by="MERGED")
    if out is None:
        hub = hub_checkpoint(inputs.merged)
        folder = Path(hub[0].split("/")[1]) if hub else inputs.merged
        out = Path(normpath(folder / ".." / f"{folder.resolve().name}-calibrated"))
    new_folder(out, force, inputs.folders)
    require_room(inputs.merged, out, None)
    keys = options.Running(split=split)
    draw = keys.draw(options.DEFAULT_SAMPLES, 42, column=column)
    names = options.classes_named(classes, inputs.data)
    request = Calibrating(inputs, keys, draw, device, names, out, "auto")
    if short := {task: count for task, count in request.counts.items() if count < LEAST}:
        listed = ", ".join(f"{task} has {count}" for task, count in short.items())
        way_out = "featcal calibrate --preset paper calibrates with fewer, without a check"
        problem = f"at least {LEAST} samples of each task are needed to choose settings and compare"
        raise BadData("--data", f"{problem}; {listed}", "give more samples, or", way_out)
    if output.recorded_draws(inputs.merged):
        note(f"{inputs.merged} was made with samples: some of those held out may be among them")
    from featcal.calibration.choose import parts_of

    draws, rest = {}, {}
    for task, count in request.counts.items():
        *_, held_out = (int(mask.sum()) for mask in parts_of(count))
        draws[task] = request.rest(task, 0, min(options.DEFAULT_SAMPLES, count - held_out))
        rest[task] = request.rest(task, draws[task].samples, held_out)
        used = f"{draws[task].samples} to calibrate, {rest[task].samples} held out"
        note(f"{task}: {count} samples, {used}")
    unseen = request.batches(rest)
    agreements: list[Agreement] = []

    def measure(folder: Path) -> None:
        agreements.extend(agreements_of({BEFORE: inputs.merged, AFTER: folder}, request, unseen))
        add_agreements(folder, inputs, keys.split, agreements[1::2])

    if (result := run(request, draws, measure)) is None:  # another process of this run reports it
        return None
    rows = [verdict(*pair) for pair in zip(agreements[::2], agreements[1::2], strict=True)]
    choice = result.choice
    if as_json:
        return say_json({"folder": str(out), "choice": choice and choice.stated, "experts": rows})
    sizes = sorted({row["samples"] for row in rows})
    counts = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else sizes[0]
    title = f"divergence from the experts' answers, on {counts} held-out samples"
    columns = ["expert", BEFORE, AFTER, "±", ""]
    table(title, columns, [[str(row[key]) for key in row if key != "samples"] for row in rows])
    if choice is not None:
        say(choice.sentence)
    named = {w: [r["expert"] for r in rows if r["verdict"] == v] for v, w in VERDICTS.items()}
    parts = [f"{word} for {', '.join(names)}" for word, names in named.items() if names]
    say(f"{out} is {', '.join(parts)}; a difference counts beyond two standard errors.")


def verdict(before: "Agreement", after: "Agreement") -> dict[str, Any]:
    """Return an expert's means over samples: better or worse beyond two standard errors, or same."""
    field = next(n for n in ("kl", "relations", "relative_drift") if getattr(after, n) is not None)
    change, word = after.than_first[field], "same"
    if abs(change.mean) > ERRORS * change.error:
        word = "better" if change.mean < 0 else "worse"
    return {
        "expert": after.expert,
        BEFORE: float(f"{getattr(before, field):.4g}"),
        AFTER: float(f"{getattr(after, field):.4g}"),
        "error": float(f"{change.error:.2g}"),
        "verdict": word,
        "samples": after.samples,
    }
