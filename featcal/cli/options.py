"""Options that several commands have, as typer is told of them."""

from pathlib import Path
from typing import Annotated

from typer import Option

DATA = (
    "Samples of an expert's task: a folder, a file or a data set of the hub; labels are not used."
)
EXPERT = "Folder of an expert, a model or a LoRA adapter. Repeatable."
RECIPE = (
    "mergekit YAML that names base and experts. Default: mergekit_config.yml in the merged folder."
)
MODULES = "Of the linears solve only those whose names end so, such as q; once for each. All of them left out."
STACK = "List of blocks to calibrate, such as encoder.layers; once for each. As the model's class says left out."

Merged = Annotated[Path, Option(help="Folder of the merged model.")]
Base = Annotated[Path | None, Option(help="Folder of the model all experts were fine-tuned from.")]
Experts = Annotated[list[str], Option(metavar="NAME=FOLDER", help=EXPERT)]
SomeExperts = Annotated[list[str] | None, Option(metavar="NAME=FOLDER", help=EXPERT)]
MergekitRecipe = Annotated[Path | None, Option(metavar="FILE", help=RECIPE)]
Data = Annotated[list[str], Option(metavar="NAME=PLACE", help=DATA)]
Out = Annotated[Path, Option(help="Folder to write.")]
Tokens = Annotated[
    int | None,
    Option(min=1, help="At most so many of a text; 512, or what the model can, left out."),
]
Batch = Annotated[int, Option(min=1, help="Samples in memory at a time.")]
Split = Annotated[str, Option(help="The split of each data folder to draw from.")]
Modules = Annotated[list[str] | None, Option(metavar="NAME", help=MODULES)]
Stacks = Annotated[list[str] | None, Option(metavar="PATH", help=STACK)]
Device = Annotated[str, Option(help="cpu, cuda, or auto: the GPU where there is one.")]
Dtype = Annotated[str, Option(help="float32 or bfloat16, in which the models run.")]
HostMemory = Annotated[
    str, Option(metavar="SIZE", help="Memory for features that wait, such as 8GiB; then disk.")
]
Resume = Annotated[
    bool, Option("--resume/--no-resume", help="Go on from what an interrupted run of this left.")
]
Force = Annotated[bool, Option("--force", help="Replace the model folder that --out names.")]
