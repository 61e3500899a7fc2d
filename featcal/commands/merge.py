"""`featcal merge`: several experts into one model, tensor by tensor."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from featcal.commands.arguments import existing_folder, named_folders, new_folder
from featcal.commands.model_folders import skeleton
from featcal.commands.terminal import say

EPILOG = """Examples:

featcal merge average --base base --expert mnist=models/mnist --expert dtd=models/dtd --out merged

featcal merge task_arithmetic --scale 0.3 --base base --expert mnist=models/mnist --expert dtd=models/dtd --out merged"""


def merge(
    method: Annotated[str, Argument(help="average or task_arithmetic.")],
    base: Annotated[Path, Option(help="Folder of the model all experts were fine-tuned from.")],
    expert: Annotated[list[str], Option(metavar="NAME=FOLDER", help="An expert; once for each.")],
    out: Annotated[Path, Option(help="Folder to write.")],
    scale: Annotated[float | None, Option(help="Scale of the task vectors (task_arithmetic; 0.3 when left out).")] = None,
    force: Annotated[bool, Option("--force", help="Replace the model folder that --out names.")] = False,
) -> None:
    """Merge experts into one model; of each model one tensor at a time is in memory."""
    existing_folder("--base", base)
    experts = named_folders("--expert", expert)
    new_folder(out, force, [base, *experts.values()])
    from featcal.merging.merge import merge as merged

    for folder in (base, *experts.values()):
        skeleton(folder)
    merged(method, base, experts, scale=scale, out=out)
    say(f"{method} of {', '.join(experts)}: {out}")
