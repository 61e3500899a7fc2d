"""`featcal compare`: measure how closely models match their experts on unseen samples."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

import featcal
from featcal.card import read_card, read_record, round_digits
from featcal.cli import options
from featcal.cli.inputs import Inputs, MistakeCollector, Request, read_compared, whole_experts
from featcal.cli.output import add_to_card, note, recorded_draws, say_json, table

if TYPE_CHECKING:
    from featcal.evaluation.compare import Agreement

MODEL = "Model to compare; the first is the reference. Repeatable."
SKIP = "First samples to leave out. Default: those that calibration used."
SEED = "Random seed for drawing samples. Default: as in the calibration, else 42."
SAMPLES = "Samples per task. Default: 64, or what is left."
DEFAULT_SAMPLES = 64  # samples of a task by default
OTHERS = "; give more, take another split, ask for fewer (--samples), or leave out none (--skip 0)"
SETTINGS = (options.SamplingAndBlocks(),)
MEASURES = {  # by field of Agreement: column, number format, factor, and its name in the model card
    "relative_drift": ("drift", ".3f", 1, "relative drift from the expert's features"),
    "cosine": ("cosine", ".3f", 1, "cosine to the expert's features"),
    "kl": ("KL", ".4f", 1, "KL from the expert's answers, mean over samples"),
    "relations": ("relations", ".4f", 1, "KL from the expert's relations between samples"),
    "top1": ("top-1", ".1f", 100, "top-1 agreement with the expert, mean over samples"),
}
EPILOG = """Drift and cosine compare the features after the last block. KL and top-1 agreement
compare the answers of models with a head, as means over samples (of a text, over tokens). For
models without one, relations compare how similar each sample is to the expert's features of the
others, or to its classes (--classes). ± is the standard error of the paired difference to the first
model.

Examples:

featcal compare --model merged=merged --model calibrated=new --data math=math.jsonl --data code=code.jsonl

featcal compare --model calibrated=new --data mnist=images/mnist --skip 0 --json --set split=test"""


def compare(
    model: Annotated[list[str], Option(**options.NAMED, help=MODEL)],
    data: options.Data,
    expert: options.Experts = None,
    base: options.Base = None,
    column: options.Column = None,
    classes: options.Classes = None,
    samples: Annotated[int | None, Option(min=2, help=SAMPLES)] = None,
    skip: Annotated[int | None, Option(min=0, help=SKIP)] = None,
    seed: Annotated[int | None, Option(min=0, help=SEED)] = None,
    setting: Annotated[list[str] | None, options.set_option(*SETTINGS)] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    card: options.Card = False,
    as_json: options.Json = False,
) -> None:
    """Measure how closely models match their experts, without labels: drift, cosine, KL, top-1."""
    (keys,) = options.read_set(setting, "compare", *SETTINGS)
    models, inputs = read_compared(model, base, expert, data, keys.recipe)
    if card:
        for folder in models.values():
            read_card(folder)  # refuses a folder without a card before any work
    recorded = {folder: recorded_draws(folder) for folder in models.values()}
    used = [  # draws of the same rows
        (task, earlier)
        for task, location in inputs.data.items()
        for earlier in chain(*recorded.values())
        if earlier["split"] == keys.split or not location.has_splits
    ]
    seed = next((earlier["seed"] for _, earlier in used), 42) if seed is None else seed
    draw = keys.draw(DEFAULT_SAMPLES, seed, dtype, column)
    names = options.classes_named(classes, inputs.data)
    same = [(task, earlier) for task, earlier in used if earlier["seed"] == seed]
    request, draws, collect = Request(inputs, keys, draw, device, names), {}, MistakeCollector()
    most = samples or DEFAULT_SAMPLES
    for task in inputs.data:
        first = max((earlier["samples"].get(t, 0) for t, earlier in same if t == task), default=0)
        first = first if skip is None else skip
        draws[task] = collect(request.rest, task, first, most, samples or 2, OTHERS)
    collect.report()
    if skip is None and any(task_draw.skip for task_draw in draws.values()):
        listed = ", ".join(f"{task} {task_draw.skip}" for task, task_draw in draws.items())
        note(f"left out, because calibration used them: the first samples of {listed}")
    counts = request.counts
    grown = any(earlier["rows"].get(t, counts[t]) != counts[t] for t, earlier in same)
    silent = [f for f, drawn in recorded.items() if not drawn and read_record(f).get("blocks")]
    reasons = {
        "drew with another seed": len(same) < len(used),
        "had another number of rows": grown,
        "had other names of tasks": any(task not in earlier["samples"] for task, earlier in used),
        "did not record its samples": silent,
    }
    for reason, holds in reasons.items():
        if holds and skip is None:
            note(f"calibration {reason}, so some of these samples may be its own")
    agreements = agreements_of(models, request, request.batches(draws, *models.values()))
    if as_json:
        say_json({"agreement": [asdict(agreement) for agreement in agreements]})
    else:
        show_agreements(agreements)
    if card:
        for name, folder in models.items():
            add_agreements(folder, inputs, keys.split, (a for a in agreements if a.model == name))


def agreements_of(models: Mapping[str, Path], request: Request, batches: Any) -> "list[Agreement]":
    """Compare models with the experts on drawn samples."""
    inputs = request.inputs
    # experts with a head of their own have their blocks at another path
    plan = request.plan if request.keys.stack else None
    extra: Any = {"plan": plan, "device": request.device, "dtype": request.draw.dtype}
    with TemporaryDirectory() as work, whole_experts(inputs, Path(work), inputs.experts) as experts:
        return featcal.compare(models, experts, batches, labels=request.labels(experts), **extra)


def add_agreements(folder: Path, inputs: Inputs, split: str, rows: "Iterable[Agreement]") -> None:
    """Add the measures of one model to its card."""
    results = [
        (row.expert, field, name, round_digits(value))
        for row in rows
        for field, (_, _, _, name) in MEASURES.items()
        if (value := getattr(row, field)) is not None
    ]
    add_to_card(folder, inputs.data, split, "feature-extraction", results)


def show_agreements(agreements: "list[Agreement]") -> None:
    """Print a row for each expert and model, with paired errors if there are several models."""
    several = any(agreement.than_first for agreement in agreements)
    columns = ["expert", "model", "samples"]
    rows = [[agreement.expert, agreement.model, str(agreement.samples)] for agreement in agreements]
    for field, (column, form, factor, _) in MEASURES.items():
        values = [getattr(agreement, field) for agreement in agreements]
        if all(value is None for value in values):
            continue
        paired = several and field != "cosine"
        columns += [column, "±"] if paired else [column]
        for row, agreement, value in zip(rows, agreements, values, strict=True):
            row.append("-" if value is None else f"{factor * value:{form}}")
            if paired:
                change = agreement.than_first.get(field)
                row.append(f"{factor * change.error:.2g}" if change else "")
    table("agreement with the experts", columns, rows)
