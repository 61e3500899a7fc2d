"""`featcal compare`: measure how closely models match their experts on unseen samples."""

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from typer import Option

from featcal.cli import options
from featcal.cli.evaluate import add_to_card
from featcal.cli.folders import Inputs, plan_with, skeleton, vocabulary_sizes, whole_experts
from featcal.cli.terminal import say_json, table
from featcal.errors import BadSetting

if TYPE_CHECKING:
    from featcal.evaluation.compare import Agreement

MODEL = "Model to compare; the first is the reference. Repeatable."
BASE = "Folder of the base; needed if experts are LoRA adapters or vocabularies differ."
SKIP = "Number of first samples to skip, because calibration used them."
KEYS = options.SamplingAndBlocks()
# by field of Agreement: column, number format, factor, and its name in the model card
MEASURES = {
    "relative_drift": ("drift", ".3f", 1, "relative drift from the expert's features"),
    "cosine": ("cosine", ".3f", 1, "cosine to the expert's features"),
    "kl": ("KL", ".4f", 1, "KL from the expert's answers"),
    "top1": ("top-1", ".1f", 100, "top-1 agreement with the expert"),
}
EPILOG = """Drift and cosine compare the features after the last block. KL and top-1 agreement
compare the answers of models with a head. With several models, ± is the standard error
of the difference to the first one, paired by sample.

Examples:

featcal compare --model merged=merged --model calibrated=new --expert math=m --data math=math.jsonl

featcal compare --model calibrated=new --expert mnist=m --data mnist=images/mnist --skip 0 --json --set split=test"""


def compare(
    model: Annotated[list[str], Option(metavar="NAME=FOLDER", help=MODEL)],
    expert: options.Experts,
    data: options.Data,
    base: Annotated[Path | None, Option(callback=options.must_exist, help=BASE)] = None,
    samples: Annotated[int, Option(min=2, help="Samples per task.")] = 64,
    skip: Annotated[int, Option(min=0, help=SKIP)] = 256,
    seed: options.Seed = 42,
    setting: Annotated[list[str] | None, options.set_option(KEYS)] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    card: options.Card = False,
    as_json: options.Json = False,
) -> None:
    """Measure how closely models match their experts: drift, cosine, KL and top-1 agreement. No
    labels are needed.
    """
    (keys,) = options.read_set(setting, "compare", KEYS)
    models = options.named_folders("--model", model)
    experts = options.named_folders("--expert", expert)
    datasets = options.named_data(data)
    import featcal
    from featcal.data.batches import drawn
    from featcal.models.batch import check_tasks
    from featcal.models.load import is_adapter

    adapters = [name for name, folder in experts.items() if is_adapter(folder)]
    whole = {name: folder for name, folder in experts.items() if name not in adapters}
    if base is None and adapters:
        expected = f"must be given: {adapters[0]!r} is a LoRA adapter of that model"
        raise BadSetting("--base", None, expected)
    check_tasks(experts, {name: [dataset] for name, dataset in datasets.items()})
    sizes = vocabulary_sizes({f"model {n!r}": folder for n, folder in models.items()} | whole)
    if base is None and sizes:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        expected = f"must be given, because vocabularies differ in size ({listed})"
        raise BadSetting("--base", None, expected)
    first = next(iter(models.values()))
    sources = [*([base] if base else []), *models.values(), *whole.values()]
    where, precision = options.device_named(device), options.dtype_named(dtype)
    student = skeleton(first)
    plan = plan_with(student, keys.stack)
    batches = drawn(student, sources, datasets, keys.draw(samples, seed, dtype, skip))
    inputs = Inputs(base or first, experts, dict.fromkeys(adapters, base or first))
    with TemporaryDirectory() as work, whole_experts(inputs, Path(work), experts) as folders:
        agreements = featcal.compare(
            models, folders, batches, plan=plan, device=where, dtype=precision
        )
    if as_json:
        say_json({"agreement": [asdict(one) for one in agreements]})
    else:
        show_agreements(agreements)
    if card:
        for name, folder in models.items():
            own = [one for one in agreements if one.model == name]
            results = [
                (one.expert, field, MEASURES[field][3], float(f"{value:.6g}"))
                for one in own
                for field, value in measured(one).items()
            ]
            add_to_card(folder, datasets, keys.split, "feature-extraction", results)


def measured(one: "Agreement") -> dict[str, float]:
    """Return the measures that models of this kind have."""
    return {field: value for field in MEASURES if (value := getattr(one, field)) is not None}


def show_agreements(agreements: "list[Agreement]") -> None:
    """Print a row for each expert and model, with paired errors if there are several models."""
    several = any(one.than_first for one in agreements)
    fields = [field for field in MEASURES if any(field in measured(one) for one in agreements)]
    columns, rows = ["expert", "model", "samples"], []
    for field in fields:
        columns += [MEASURES[field][0], *(["±"] if several and field != "cosine" else [])]
    for one in agreements:
        row = [one.expert, one.model, str(one.samples)]
        for field in fields:
            _, form, factor, _ = MEASURES[field]
            value = measured(one).get(field)
            row.append("-" if value is None else f"{factor * value:{form}}")
            if several and field != "cosine":
                paired = one.than_first.get(field)
                row.append(f"{factor * paired.error:.2g}" if paired else "")
        rows.append(row)
    table("agreement with the experts", columns, rows)
