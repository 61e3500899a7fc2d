"""`featcal merge`: several experts into one model, by any method; a setting of the method is `--set name=value`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import yaml
from typer import Argument, Option

from featcal.commands.arguments import device_named, existing_folder, named_folders, named_places, new_folder
from featcal.commands.model_folders import skeleton
from featcal.commands.terminal import progress, say
from featcal.merging.settings import SETTINGS, settings_of
from featcal.settings import require

METHODS = f"{', '.join(SETTINGS)}; lot is made from its published formula, its code could not be consulted."
ADAPTER = "adapter_config.json"  # of a LoRA folder, which is an expert once it is added to the base

EPILOG = """Examples:

featcal merge average --base base --expert mnist=models/mnist --expert dtd=models/dtd --out merged

featcal merge task_arithmetic --scale 0.3 --base base --expert mnist=models/mnist --expert dtd=models/dtd --out merged"""


def merge(
    method: Annotated[str, Argument(help=METHODS)],
    base: Annotated[Path, Option(help="Folder of the model all experts were fine-tuned from.")],
    expert: Annotated[list[str], Option(metavar="NAME=FOLDER", help="An expert, LoRA folders too; once for each.")],
    out: Annotated[Path, Option(help="Folder to write.")],
    scale: Annotated[float | None, Option(help="Scale of the task vectors (task_arithmetic, ties; 0.3 when left out).")] = None,
    setting: Annotated[list[str] | None, Option("--set", metavar="NAME=VALUE", help="Another setting of the method.")] = None,
    data: Annotated[list[str] | None, Option(metavar="NAME=FOLDER", help="Samples of an expert's task, where needed.")] = None,
    head: Annotated[Path | None, Option(help="heads.safetensors with the zero-shot heads (adamerging).")] = None,
    samples: Annotated[int, Option(min=1, help="Samples of each task (256 for regmean, 16 to 64 for lot).")] = 256,
    seed: Annotated[int, Option(min=0, help="Which images are drawn.")] = 42,
    batch: Annotated[int, Option(min=1, help="Samples in memory at a time; per step and task for adamerging (paper: 16).")] = 16,
    split: Annotated[str, Option(help="The split of each data folder to draw from; adamerging's paper: test.")] = "train",
    tokens: Annotated[int | None, Option(min=1, help="Longest text in tokens, cut behind; as calibrate does.")] = None,
    embeddings: Annotated[str, Option(help="merge, or base: tables of words stay the base's.")] = "merge",
    device: Annotated[str, Option(help="cpu, cuda, or auto: the GPU where there is one.")] = "auto",
    force: Annotated[bool, Option("--force", help="Replace the model folder that --out names.")] = False,
) -> None:
    """Merge experts into one model; of each model as little as the method allows is in memory at a time."""
    settings = named_values(setting or ()) | ({} if scale is None else {"scale": scale})
    settings_of(method, settings, "merge")
    existing_folder("--base", base)
    experts, places = named_folders("--expert", expert), named_places("--data", data or ())
    read = [place.source for place in places.values() if isinstance(place.source, Path)]
    new_folder(out, force, [base, *experts.values(), *read])
    from featcal.data.calibration import Draw, drawn
    from featcal.merging.merge import merge as merged
    from featcal.merging.methods import method_named

    method_named(method).check_needs(places or None, head)  # before samples are read
    student = skeleton(base)
    for folder in experts.values():
        if not (folder / ADAPTER).is_file():
            skeleton(folder)
    batches = drawn(student, (base,), places, Draw(samples, seed, batch, split, tokens)) if places else None
    more: dict[str, Any] = {
        "batches": batches,
        "head": head,
        "embeddings": embeddings,
        "device": device_named(device),
        "out": out,
    }
    merged(method, base, experts, progress=lambda line: progress.print(line, markup=False, soft_wrap=True), **more, **settings)
    say(f"{method} of {', '.join(experts)}: {out}")


def named_values(pairs: Iterable[str]) -> dict[str, Any]:
    """`name=value` arguments as settings; values are read as in params.yaml. Raises: BadSetting."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        require(bool(name and equals), "--set", pair, "must be NAME=VALUE, for example --set density=0.1")
        require(name not in found, "--set", pair, f"names {name!r} a second time; every name once")
        found[name] = as_value(value)
    return found


def as_value(text: str) -> Any:
    """A value as params.yaml has it: a number, true, false, a list; YAML takes 1e-5 for text, a command line does not."""
    try:
        value = yaml.safe_load(text)
        return float(value) if isinstance(value, str) else value
    except (ValueError, yaml.YAMLError):
        return text
