"""`featcal fix`: calibrate a merged model, and check on held-out samples that it is better."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from featcal.card import hub_checkpoint
from featcal.cli import options
from featcal.cli.calibrate import FEWEST, MOST, SPARE, Request, run
from featcal.cli.compare import add_agreements, agreements_of
from featcal.cli.inputs import as_many_as_left, read_inputs
from featcal.cli.output import new_folder, require_room
from featcal.cli.terminal import say, say_json, table

if TYPE_CHECKING:
    from featcal.evaluation.compare import Agreement

OUT = "Folder to write. Default: MERGED-calibrated."
LEFT = 0.25  # share of a task's samples that are held out
ERRORS = 2  # standard errors beyond which a difference counts
BEFORE, AFTER = "before", "after"
VERDICTS = ("better", "worse", "same")
EPILOG = f"""A quarter of each task's samples ({FEWEST} to {SPARE}) is held out and used to compare the
model before and after. The others calibrate it, with settings chosen as by featcal calibrate.

{options.DATA_FORMATS}

Examples:

featcal fix merged --data math=math.jsonl --data code=code.jsonl

featcal fix owner/merged --base owner/base --expert mnist=owner/mnist --data mnist=images/mnist"""


def fix(
    merged: Annotated[str, Argument(metavar="MERGED", help="Merged model.")],
    data: options.Data,
    column: options.Column = None,
    base: options.Base = None,
    expert: options.Experts = None,
    out: Annotated[Path | None, Option(help=OUT)] = None,
    device: options.Device = "auto",
    as_json: options.Json = False,
    force: options.Force = False,
) -> None:
    """Calibrate a merged model, report for each expert whether it is better, and write it."""
    inputs = read_inputs(merged, base, expert, data)
    if out is None:
        hub = hub_checkpoint(inputs.merged)
        own = Path(hub[0].split("/")[1]) if hub else inputs.merged
        out = own.with_name(f"{own.resolve().name}-calibrated")
    new_folder(out, force, inputs.folders)
    require_room(inputs.merged, out, None)
    keys = options.Running()
    request = Request(inputs, out, "auto", keys, keys.draw(MOST, 42, column=column), device)
    request.draw_tasks(None, LEFT)
    result = run(request)
    if result is None:  # another process of this run reports it
        return
    rest = {}
    for task, draw in request.draws.items():
        others = replace(draw, skip=draw.samples, samples=SPARE)
        rest[task] = as_many_as_left(request.student, task, inputs.data[task], others)
    models = {BEFORE: inputs.merged, AFTER: out}
    agreements = agreements_of(models, inputs, request.student, request.plan, rest, device)
    add_agreements(out, inputs, keys.split, [one for one in agreements if one.model == AFTER])
    rows = [verdict(*pair) for pair in zip(agreements[::2], agreements[1::2], strict=True)]
    choice = result.choice
    if as_json:
        say_json({"folder": str(out), "choice": choice and choice.stated, "experts": rows})
        return
    held_out = sorted({row["samples"] for row in rows})
    counts = " to ".join(map(str, dict.fromkeys((held_out[0], held_out[-1]))))
    title = f"divergence from the experts' answers, on {counts} held-out samples"
    columns = ["expert", BEFORE, AFTER, "±", ""]
    table(title, columns, [[str(row[key]) for key in row if key != "samples"] for row in rows])
    kept = choice is not None and choice.settings is None
    say(f"{out}: {choice.sentence}" if kept and choice else sentence(rows, out))


def verdict(before: "Agreement", after: "Agreement") -> dict[str, Any]:
    """Return the row of one expert: better or worse beyond two standard errors, else same."""
    measures = [one for one in ("relations", "kl") if getattr(after, one) is not None]
    field = measures[-1] if measures else "relative_drift"
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


def sentence(rows: list[dict[str, Any]], out: Path) -> str:
    """Return the result in one sentence."""
    of = {word: [row["expert"] for row in rows if row["verdict"] == word] for word in VERDICTS}
    parts = [f"{word} for {', '.join(names)}" for word, names in of.items() if names]
    return f"{out} is {', '.join(parts)}; a difference counts beyond two standard errors."
