"""`featcal stats`: what RegMean takes of a task's data, for its owner to hand on instead of
them.
"""

from pathlib import Path
from typing import Annotated

from typer import Option

from featcal.cli import options
from featcal.cli.arguments import device_named, existing_folder, local, named_places, new_folder
from featcal.cli.calibrate import PICTURES, TEXT
from featcal.cli.model_folders import skeleton
from featcal.cli.publish import Push, push, require_hub
from featcal.cli.terminal import Json, Quiet, note, say, say_json
from featcal.models.code import refuse_adapter

EPILOG = f"""Pictures: {PICTURES}. Text: {TEXT}.

Examples:

featcal stats --model models/mnist --data images/mnist --out mnist-stats

featcal merge regmean --base base --expert mnist=m --expert dtd=d --stats mnist=mnist-stats --stats dtd=dtd-stats --out merged"""


def stats(
    model: Annotated[Path, Option(help="Folder of the expert that was fine-tuned on the task.")],
    data: Annotated[
        str,
        Option(
            metavar="PLACE", help="Samples of the task: a folder, a file or a data set of the hub."
        ),
    ],
    out: Annotated[
        Path, Option(help="Folder to write: a Gram matrix for each site of the model's blocks.")
    ],
    samples: Annotated[int, Option(min=1, help="Samples to sum over.")] = 256,
    tokens: options.Tokens = None,
    seed: Annotated[int, Option(min=0, help="Which samples are drawn.")] = 42,
    batch: options.Batch = 16,
    split: Annotated[str, Option(help="The split of the data to draw from.")] = "train",
    device: options.Device = "auto",
    push_to_hub: Push = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write what RegMean takes of a task's data: sums over its samples' features, and no sample."""
    existing_folder("--model", model)
    refuse_adapter(model)
    name = out.name
    place = named_places("--data", [f"{name}={data}"])[name]
    new_folder(out, False, [model, *local({name: place})])
    require_hub(push_to_hub)
    from featcal.data.calibration import Draw, drawn
    from featcal.merging.statistics import statistics
    from featcal.models.products import faster_products

    batches = drawn(
        skeleton(model), (model,), {name: place}, Draw(samples, seed, batch, split, tokens)
    )[name]
    with faster_products():
        statistics(model, batches, out, device=device_named(device), progress=note)
    if as_json:
        say_json({"folder": str(out), "samples": samples})
    else:
        say(f"statistics of {samples} samples: {out}")
    push(out, push_to_hub)
