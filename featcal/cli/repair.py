"""`featcal repair`: a merged model made better by a published method that yields one shared model again."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from featcal.cli.arguments import device_named, new_folder
from featcal.cli.recipe import EXPERT, named_models
from featcal.cli.terminal import Json, Quiet, note, say, say_json

EPILOG = """Examples:

featcal repair svc --merged merged --base base --expert mnist=models/mnist --expert dtd=models/dtd --out repaired"""


def repair(
    method: Annotated[Literal["svc"], Argument(help="svc: singular values calibrated to the experts', without data.")],
    merged: Annotated[Path, Option(help="Folder of the merged model.")],
    base: Annotated[Path, Option(help="Folder of the model all experts were fine-tuned from.")],
    expert: Annotated[list[str], Option(metavar="NAME=FOLDER", help=EXPERT)],
    out: Annotated[Path, Option(help="Folder to write.")],
    least: Annotated[float, Option(help="Smallest coefficient of an expert that counts (svc).")] = 0.1,
    device: Annotated[str, Option(help="cpu, cuda, or auto: the GPU where there is one.")] = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
    force: Annotated[bool, Option("--force", help="Replace the model folder that --out names.")] = False,
) -> None:
    """Repair a merged model without training; other ways to do so are calibrate and, with a task's name at hand, adapters."""
    named = named_models(base, expert, None)
    new_folder(out, force, [*named.read, merged])
    from featcal.merging.svc import svc

    svc(merged, named.base, named.experts, out=out, least=least, device=device_named(device), progress=note)
    if as_json:
        return say_json({"folder": str(out), "method": method, "merged": str(merged), "base": str(named.base)})
    say(f"{method} on {merged}: {out}")
