"""`featcal merge`: several experts into one model, by any method; a setting of the method is `--set
name=value`.
"""

from pathlib import Path
from typing import Annotated, Any

import yaml
from typer import Argument, Option
from typer.core import TyperCommand

from featcal.cli import options
from featcal.cli.models import named_models, skeleton
from featcal.cli.options import (
    device_named,
    local,
    named_places,
    new_folder,
    pairs_by_name,
    require_space,
    stored_bytes,
)
from featcal.cli.publish import Push, push, require_hub
from featcal.cli.terminal import Json, Quiet, note, say, say_json
from featcal.merging.registry import method_named, method_names, methods_table, settings_of

METHODS = f"{', '.join(method_names())}."

EPILOG = """Examples:

featcal merge average --base base --expert mnist=models/mnist --expert dtd=models/dtd --out merged

featcal merge task_arithmetic --scale 0.3 --base base --expert mnist=models/mnist --expert dtd=models/dtd --out merged

featcal merge regmean --base base --expert mnist=m --expert dtd=d --data mnist=images/mnist --data dtd=images/dtd --out merged"""


class MergeCommand(TyperCommand):
    """`featcal merge`, whose help lists every method; they are loaded when it is asked for."""

    @property
    def epilog(self) -> str:
        """Return every method with its settings, then the examples."""
        rows = (
            f"{name}: {settings or 'no settings'}. {source}."
            for name, settings, source in methods_table()
        )
        return "\n\n".join(["Methods and their settings, with defaults:", *rows, self._examples])

    @epilog.setter
    def epilog(self, text: str) -> None:
        self._examples = text


def merge(
    method: Annotated[str, Argument(help=METHODS)],
    base: Annotated[Path, Option(help="Folder of the model all experts were fine-tuned from.")],
    expert: options.Experts,
    out: options.Out,
    scale: Annotated[
        float | None, Option(help="Scale of the task vectors. Default: the method's.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        Option("--set", metavar="NAME=VALUE", help="A setting of the method. Repeatable."),
    ] = None,
    data: Annotated[
        list[str] | None,
        Option(metavar="NAME=FOLDER", help="Samples of an expert's task, where needed."),
    ] = None,
    head: Annotated[
        Path | None,
        Option(help="heads.safetensors (adamerging, fisher, gradient_matching)."),
    ] = None,
    samples: Annotated[
        int, Option(min=1, help="Samples of each task (256 for regmean, 16 to 64 for lot).")
    ] = 256,
    seed: Annotated[int, Option(min=0, help="Which images are drawn.")] = 42,
    batch: Annotated[
        int,
        Option(
            min=1, help="Samples in memory at a time; per step and task for adamerging (paper: 16)."
        ),
    ] = 16,
    split: Annotated[
        str, Option(help="The split of each data folder to draw from; adamerging's paper: test.")
    ] = "train",
    tokens: Annotated[
        int | None, Option(min=1, help="Longest text in tokens, cut behind; as calibrate does.")
    ] = None,
    embeddings: Annotated[
        str, Option(help="merge, or base: tables of words stay the base's.")
    ] = "merge",
    device: options.Device = "auto",
    push_to_hub: Push = None,
    as_json: Json = False,
    quiet: Quiet = False,
    force: options.Force = False,
) -> None:
    """Merge experts into one model; of each model as little as the method allows is in memory at a
    time.
    """
    given = pairs_by_name("--set", setting or (), "NAME=VALUE", "density=0.1")
    settings = {name: as_value(value) for name, value in given.items()} | (
        {} if scale is None else {"scale": scale}
    )
    settings_of(method, settings)
    named, places = named_models(base, expert, None), named_places("--data", data or ())
    new_folder(out, force, [*named.read, *local(places)])
    require_space("--out", out, stored_bytes(named.base))
    require_hub(push_to_hub)
    from featcal.data.batches import Draw, drawn
    from featcal.merging.merge import merge as merged

    given_data = {"batches": places or None, "head": head}
    method_named(method).check_needs(given_data)  # before samples are read
    student = skeleton(named.base)
    for folder in named.shaped.values():
        skeleton(folder)
    batches = (
        drawn(student, (named.base,), places, Draw(samples, seed, batch, split, tokens))
        if places
        else None
    )
    more: dict[str, Any] = {
        "batches": batches,
        "head": head,
        "embeddings": embeddings,
        "device": device_named(device),
    }
    merged(method, named.base, named.experts, out=out, progress=note, **more, **settings)
    if as_json:
        experts = {name: str(folder) for name, folder in named.experts.items()}
        say_json(
            {
                "folder": str(out),
                "method": method,
                "settings": settings,
                "base": str(named.base),
                "experts": experts,
            }
        )
    else:
        say(f"{method} of {', '.join(named.experts)}: {out}")
    push(out, push_to_hub)


def as_value(text: str) -> Any:
    """A value as params.yaml has it: a number, true, false, a list; YAML takes 1e-5 for text, a
    command line does not.
    """
    try:
        value = yaml.safe_load(text)
        return float(value) if isinstance(value, str) else value
    except (ValueError, yaml.YAMLError):
        return text
