"""`featcal compare`: how far models agree with their experts on inputs that no calibration has
seen; no label is needed.
"""

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from typer import Option

from featcal.cli import options
from featcal.cli.models import Named, skeleton, whole_experts, word_rows
from featcal.cli.options import (
    device_named,
    dtype_named,
    existing_folder,
    named_folders,
    named_places,
    stacks_named,
)
from featcal.cli.publish import Card, result
from featcal.cli.terminal import Json, Quiet, say_json, table
from featcal.errors import BadSetting
from featcal.models.load import is_adapter

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

    from featcal.data.places import Place
    from featcal.evaluation.compare import Agreement

EPILOG = """KL and top-1 agreement compare answers, of models with a head; drift and cosine compare the features behind the last
block. With several models, ± is the standard error of the difference to the first one, sample by sample.

Examples:

featcal compare --model merged=merged --model calibrated=new --expert math=m --data math=math.jsonl

featcal compare --model calibrated=new --expert mnist=m --data mnist=images/mnist --split test --skip 0 --json"""


def compare(
    model: Annotated[
        list[str],
        Option(
            metavar="NAME=FOLDER", help="A model to compare; once for each, the first one counts."
        ),
    ],
    expert: options.Experts,
    data: options.Data,
    base: Annotated[
        Path | None,
        Option(help="Folder of the base; for LoRA experts, and where models have other words."),
    ] = None,
    samples: Annotated[int, Option(min=2, help="Samples of each task.")] = 64,
    skip: Annotated[
        int, Option(min=0, help="So many that calibrate draws before are left out.")
    ] = 256,
    tokens: options.Tokens = None,
    seed: Annotated[int, Option(min=0, help="Which samples are drawn; as for calibrate.")] = 42,
    batch: options.Batch = 32,
    split: options.Split = "train",
    stack: Annotated[
        list[str] | None, Option(metavar="PATH", help=options.STACK.replace("calibrate", "compare"))
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    card: Card = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Tell how far models agree with their experts: drift, cosine, and where there is a head KL and
    top-1.
    """
    models, experts, places = (
        named_folders("--model", model),
        named_folders("--expert", expert),
        named_places("--data", data),
    )
    under = {}
    for name, folder in experts.items():
        if is_adapter(folder):
            if base is None:
                raise BadSetting(
                    "--base",
                    None,
                    f"must name the model that {name!r} stands on, which is a LoRA folder",
                )
            under[name] = existing_folder("--base", base)
    import featcal
    from featcal.data.batches import Draw, drawn
    from featcal.models.batch import check_tasks

    check_tasks(experts, {name: [place] for name, place in places.items()})
    first = next(iter(models.values()))
    whole = {name: folder for name, folder in experts.items() if name not in under}
    words = word_rows({**{f"model {name!r}": folder for name, folder in models.items()}, **whole})
    if base is None and len(set(words.values())) > 1:
        rows = ", ".join(f"{name} {count}" for name, count in words.items())
        raise BadSetting(
            "--base",
            None,
            f"must name the model whose words all others have, which have other rows of them ({rows})",
        )
    sources = [*([base] if base else []), *models.values(), *whole.values()]
    draw = Draw(samples, seed, batch, split, tokens, dtype_named(dtype), skip)
    kind = skeleton(first)
    plan, batches = stacks_named(kind, stack), drawn(kind, sources, places, draw)
    named = Named(base or first, experts, under)
    with (
        TemporaryDirectory() as place,
        whole_experts(named, Path(place), list(experts)) as given,
    ):
        found = featcal.compare(
            models, given, batches, plan=plan, device=device_named(device), dtype=dtype_named(dtype)
        )
    if as_json:
        say_json({"agreement": [asdict(one) for one in found]})
    else:
        show(found)
    if card:
        from featcal.card import add_results

        for name, folder in models.items():
            own = [one for one in found if one.model == name]
            add_results(
                folder,
                [number for one in own for number in numbers(one, places[one.expert], split)],
            )


def numbers(one: "Agreement", place: "Place", split: str) -> "list[EvalResult]":
    """What the card tells of one model and one expert."""
    measures = {
        "relative_drift": "relative drift from the expert's features",
        "cosine": "cosine to the expert's features",
    }
    measures |= {"kl": "KL from the expert's answers", "top1": "top-1 agreement with the expert"}
    known = {name: value for name in measures if (value := getattr(one, name)) is not None}
    told = [(name, float(f"{value:.6g}"), measures[name]) for name, value in known.items()]
    return [result(place, one.expert, split, "feature-extraction", *number) for number in told]


def show(found: "list[Agreement]") -> None:
    """A row for each expert and model; paired errors behind the models that are compared with the
    first.
    """
    scored, several = any(one.kl is not None for one in found), any(one.than_first for one in found)
    columns = ["expert", "model", "samples", "drift", *(["±"] if several else []), "cosine"]
    columns += (
        [name for measure in ("KL", "top-1") for name in (measure, *(["±"] if several else []))]
        if scored
        else []
    )
    rows = []
    for one in found:
        row = [
            one.expert,
            one.model,
            str(one.samples),
            f"{one.relative_drift:.3f}",
            *error(one, "relative_drift", several),
        ]
        row.append(f"{one.cosine:.3f}")
        if scored:
            row += ["-" if one.kl is None else f"{one.kl:.4f}", *error(one, "kl", several)]
            row += [
                "-" if one.top1 is None else f"{100 * one.top1:.1f}",
                *error(one, "top1", several, 100),
            ]
        rows.append(row)
    table("agreement with the experts", columns, rows)


def error(one: "Agreement", measure: str, several: bool, scale: float = 1) -> list[str]:
    """The cell of a paired standard error; none where a single model is told of."""
    if not several:
        return []
    return [f"{scale * one.than_first[measure].error:.2g}" if measure in one.than_first else ""]
