"""`featcal inspect`: what a checkpoint folder holds, whether its numbers are numbers, and what calibration would solve."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from featcal.commands.arguments import existing_folder
from featcal.commands.solved import shape_text, show_plan
from featcal.commands.terminal import say, table
from featcal.errors import NotFinite

if TYPE_CHECKING:
    from featcal.storage.checkpoint import LazyCheckpoint


def inspect(folder: Annotated[Path, Argument(help="Checkpoint folder: config.json and safetensors.")]) -> None:
    """Tell what a model folder holds and which of its parts calibration solves; exit code 2 for NaN or infinity in it."""
    existing_folder("inspect", folder)
    from featcal.storage.checkpoint import LazyCheckpoint

    checkpoint = LazyCheckpoint(folder)
    show_tensors(checkpoint)
    show_plan(folder)
    require_finite(checkpoint)


def show_tensors(checkpoint: "LazyCheckpoint") -> None:
    """Numbers of tensors and values by data type, and the largest tensors."""
    from math import prod

    sizes = {name: prod(checkpoint.shape(name)) for name in checkpoint.names}
    kinds = Counter(str(checkpoint.dtype(name)).removeprefix("torch.") for name in checkpoint.names)
    say(f"{checkpoint.folder}: {len(sizes)} tensors, {sum(sizes.values()):,} values")
    say("stored as " + ", ".join(f"{kind} ({count} tensors)" for kind, count in kinds.most_common()))
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:5]
    rows = [[name, shape_text(checkpoint.shape(name)), f"{sizes[name]:,}"] for name in largest]
    table("largest tensors", ["name", "shape", "values"], rows)


def require_finite(checkpoint: "LazyCheckpoint") -> None:
    """Says that every value is a number. Raises: NotFinite naming all tensors where one is not."""
    bad = []
    for name in checkpoint.names:
        try:
            checkpoint.finite_tensor(name)
        except NotFinite:
            bad.append(name)
    if bad:
        raise NotFinite(checkpoint.folder, ", ".join(bad))
    say("values: no NaN, no infinity")
