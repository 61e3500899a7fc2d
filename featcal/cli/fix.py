"""`featcal fix`: calibrate a merged model, and check on held-out samples that it is better."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from featcal.card import hub_checkpoint
from featcal.cli import options
from featcal.cli.calibrate import FEWEST, SPARE, Request, run, task_draws
from featcal.cli.compare import add_agreements, agreements_of
from featcal.cli.inputs import read_inputs
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
    where = options.device_named(device)
    request = Request(inputs, out, "auto", keys, keys.draw(1, 42, column=column), where)
    draws = task_draws(request, None, LEFT)
    result = run(request, draws)
    if result is None:  # another process of this run reports it
        return
    from featcal.data.batches import count_samples

    held_out = {}
    for task, draw in draws.items():
        count = count_samples(request.student, inputs.data[task], draw)
        left = min(SPARE, count - draw.samples)
        held_out[task] = replace(draw, skip=draw.samples, samples=left)
    models = {BEFORE: inputs.merged, AFTER: out}
    agreements = agreements_of(models, inputs, request.student, request.plan, held_out, where)
    add_agreements(out, inputs, keys.split, [one for one in agreements if one.model == AFTER])
    rows = [verdict(*pair) for pair in zip(agreements[::2], agreements[1::2], strict=True)]
    choice = result.choice
    if as_json:
        say_json({"folder": str(out), "choice": choice and choice.stated, "experts": rows})
        return
    title = f"divergence from the experts' answers, on {counts(rows)} held-out samples"
    columns = ["expert", BEFORE, AFTER, "±", ""]
    table(title, columns, [[str(row[key]) for key in row if key != "samples"] for row in rows])
    kept = choice is not None and choice.settings is None
    say(f"{out}: {choice.sentence}" if kept and choice else sentence(rows, out))


def verdict(before: "Agreement", after: "Agreement") -> dict[str, Any]:
    """Return the row of one expert: better or worse beyond two standard errors, else same."""
    field = "relative_drift"
    for name in ("kl", "relations"):
        field = name if getattr(after, name) is not None else field
    change = after.than_first[field]
    word = "same"
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


def counts(rows: list[dict[str, Any]]) -> str:
    """Return the number of samples of a task, or its range."""
    least, most = (of(row["samples"] for row in rows) for of in (min, max))
    return str(least) if least == most else f"{least} to {most}"


def sentence(rows: list[dict[str, Any]], out: Path) -> str:
    """Return the result in one sentence."""
    of = {word: [row["expert"] for row in rows if row["verdict"] == word] for word in VERDICTS}
    parts = [f"{word} for {', '.join(names)}" for word, names in of.items() if names]
    return f"{out} is {', '.join(parts)}; a difference counts beyond two standard errors."
