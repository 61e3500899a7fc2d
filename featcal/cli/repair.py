"""`featcal repair`: a merged model made better by a published method that yields one shared model
again.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from featcal.cli import options
from featcal.cli.arguments import (
    device_named,
    local,
    named_places,
    new_folder,
    require_space,
    stored_bytes,
)
from featcal.cli.model_folders import skeleton
from featcal.cli.recipe import named_models
from featcal.cli.terminal import Json, Quiet, note, say, say_json
from featcal.errors import BadSetting
from featcal.settings import require

EPILOG = """Examples:

featcal repair svc --merged merged --base base --expert mnist=models/mnist --expert dtd=models/dtd --out repaired

featcal repair prodistill --merged merged --base base --expert mnist=models/mnist --data mnist=data/mnist --out repaired"""
METHOD = """svc: singular values calibrated to the experts', without data. prodistill: blocks fitted to the experts' features by
gradients, what FeatCal does in closed form."""


def repair(
    method: Annotated[Literal["svc", "prodistill"], Argument(help=METHOD)],
    merged: options.Merged,
    base: Annotated[Path, Option(help="Folder of the model all experts were fine-tuned from.")],
    expert: options.Experts,
    out: options.Out,
    least: Annotated[
        float | None, Option(help="Smallest coefficient of an expert that counts (svc; 0.1).")
    ] = None,
    data: Annotated[
        list[str] | None,
        Option(metavar="NAME=FOLDER", help="Samples of an expert's task (prodistill)."),
    ] = None,
    epochs: Annotated[
        int | None, Option(min=0, help="Rounds over all samples in every block (prodistill; 100).")
    ] = None,
    rate: Annotated[float | None, Option(help="Learning rate (prodistill; 0.01).")] = None,
    samples: Annotated[int, Option(min=1, help="Samples of each task (prodistill).")] = 64,
    seed: Annotated[
        int, Option(min=0, help="Which samples are drawn, and their order (prodistill).")
    ] = 42,
    batch: Annotated[int, Option(min=1, help="Samples of each task in a step (prodistill).")] = 16,
    device: options.Device = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
    force: options.Force = False,
) -> None:
    """Repair a merged model so that it stays one; closed forms do so in calibrate, adapters need a
    task's name at hand.
    """
    own: dict[str, Any] = {"svc": {"least": least}, "prodistill": {"epochs": epochs, "rate": rate}}
    for name, settings in own.items():
        for key, value in settings.items():
            require(
                value is None or name == method,
                f"--{key}",
                value,
                f"must be left out: it is a setting of {name}",
            )
    settings = {key: value for key, value in own[method].items() if value is not None}
    places = named_places("--data", data or ())
    if bool(places) != (method == "prodistill"):
        raise BadSetting(
            "--data",
            data,
            "must be left out: svc uses none" if places else "must be given of every task",
        )
    named = named_models(base, expert, None)
    new_folder(out, force, [*named.read, merged, *local(places)])
    require_space("--out", out, stored_bytes(merged))
    more: dict[str, Any] = {
        "out": out,
        "device": device_named(device),
        "progress": note,
        **settings,
    }
    if method == "svc":
        from featcal.merging.svc import svc

        svc(merged, named.base, named.experts, **more)
    else:
        from featcal.data.calibration import Draw, drawn
        from featcal.merging.prodistill import prodistill
        from featcal.models.products import faster_products

        batches = drawn(skeleton(named.base), (named.base,), places, Draw(samples, seed, batch))
        with faster_products():
            prodistill(merged, named.base, named.experts, batches, seed=seed, **more)
    if as_json:
        return say_json(
            {"folder": str(out), "method": method, "merged": str(merged), "base": str(named.base)}
        )
    say(f"{method} on {merged}: {out}")
