"""Options that several commands have, as typer is told of them."""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from featcal.errors import BadSetting, MissingPath
from featcal.settings import require

if TYPE_CHECKING:
    import torch

    from featcal.data.places import Place
    from featcal.models.plan import BlockPlan

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


MODEL_CONFIGS = ("config.json", "open_clip_config.json")  # what makes a folder a model folder


def named_folders(option: str, pairs: Iterable[str]) -> dict[str, Path]:
    """`name=FOLDER` arguments as a dictionary. Raises: BadSetting for another form or a repeated
    name; MissingPath.
    """
    return {
        name: existing_folder(option, Path(given))
        for name, given in pairs_by_name(option, pairs, "name=FOLDER").items()
    }


def pairs_by_name(
    option: str, pairs: Iterable[str], form: str, example: str = "mnist=path/to/it"
) -> dict[str, str]:
    """`name=value` arguments as a dictionary. Raises: BadSetting for another form or a repeated
    name.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, _, given = pair.partition("=")
        require(
            bool(name and given), option, pair, f"must be {form}, for example {option} {example}"
        )
        require(name not in found, option, pair, f"names {name!r} a second time; every name once")
        found[name] = given
    return found


def named_places(option: str, pairs: Iterable[str]) -> dict[str, "Place"]:
    """`name=PLACE` arguments, where a place is a file, a folder or a data set of the hub. Raises:
    BadSetting, MissingPath.
    """
    from featcal.data.places import place_of

    return {
        name: place_of(option, given)
        for name, given in pairs_by_name(option, pairs, "name=PLACE").items()
    }


def local(places: Mapping[str, "Place"]) -> list[Path]:
    """The files and folders among places."""
    return [place.source for place in places.values() if isinstance(place.source, Path)]


def existing_folder(option: str, folder: Path) -> Path:
    """The folder. Raises: MissingPath when it is not there; BadSetting for a file."""
    require(
        not folder.is_file(), option, str(folder), "names a file; give the folder that holds it"
    )
    if not folder.is_dir():
        raise MissingPath(
            folder,
            f"given with {option}",
            "check the path; names on the hub have to be downloaded first",
        )
    return folder


def device_named(word: str) -> "torch.device":
    """What --device asks for. Raises: BadSetting."""
    from featcal.models.load import torch_device

    require(word in ("cpu", "cuda", "auto"), "--device", word, "must be cpu, cuda or auto")
    return torch_device(word)


def dtype_named(word: str) -> "torch.dtype":
    """What --dtype asks for. Raises: BadSetting."""
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    require(word in known, "--dtype", word, "must be float32 or bfloat16")
    return known[word]


def new_folder(out: Path, force: bool, inputs: Iterable[Path]) -> Path:
    """The folder to write. With `force` a model folder or an empty one may be replaced, but never
    one that is read.

    Raises: BadSetting, also for a place where no folder can be made.
    """
    if out.is_symlink() and not out.exists():
        raise BadSetting(
            "--out",
            str(out),
            f"is a link to {out.readlink()}, which is not there; remove it, or name a folder",
        )
    place = out.resolve()
    taken = [path.resolve() for path in inputs]
    if any(place in (path, *path.parents) for path in taken):
        raise BadSetting(
            "--out", str(out), "names, or holds, a folder that is read; name another one"
        )
    inside = next((path for path in taken if path in place.parents), None)
    if inside is not None:
        raise BadSetting(
            "--out", str(out), f"lies inside of {inside}, which is read; name another one"
        )
    if not out.exists():
        require_writable("--out", out)
        return out
    if not force:
        raise BadSetting(
            "--out",
            str(out),
            "names something that exists; name a new folder, or add --force to replace it",
        )
    # renaming a whole folder away is safe only where it is clear what the folder is
    if not out.is_dir() or (
        any(out.iterdir()) and not any((out / name).is_file() for name in MODEL_CONFIGS)
    ):
        raise BadSetting(
            "--out",
            str(out),
            "names what is no model folder, which --force does not replace; remove it by hand",
        )
    return out


def work_folder(work: Path | None, out: Path, inputs: Iterable[Path]) -> Path | None:
    """Where a run keeps what it will need again; None leaves it to the run. Raises: BadSetting."""
    if work is None:
        return None
    require(not work.is_file(), "--work", str(work), "names a file; name a folder")
    taken = [path.resolve() for path in (*inputs, out)]
    clash = next(
        (path for path in taken if path in (work.resolve(), *work.resolve().parents)), None
    )
    require(
        clash is None,
        "--work",
        str(work),
        f"lies in {clash}, which is read or written as a whole; name another folder",
    )
    require_writable("--work", work / "run")
    return work


def stored_bytes(folder: Path) -> int:
    """Bytes of a folder's weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def require_space(option: str, folder: Path, needed: int) -> None:
    """A disk with so many bytes free. Raises: BadSetting."""
    from featcal.cli.terminal import size_text

    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        said = f"must lie on a disk with {size_text(needed)} free; {there} has {size_text(free)}"
        raise BadSetting(option, str(folder), f"{said}; free some, or name another place")


def require_writable(option: str, folder: Path) -> None:
    """A place where a folder can be made, found out by making one and removing it. Raises:
    BadSetting.
    """
    there = next(path for path in folder.absolute().parents if path.exists())
    try:
        Path(mkdtemp(prefix=".featcal-", dir=there)).rmdir()
    except OSError as error:
        reason = (error.strerror or "it cannot be used").lower()
        raise BadSetting(
            option, str(folder), f"must name a place that can be written ({there}: {reason})"
        ) from None


def stacks_named(model: Any, paths: Sequence[str] | None) -> "BlockPlan":
    """The plan of the model, or of the lists of blocks that are named. Raises: BadPlan with the
    lists that there are.
    """
    from torch.nn import ModuleList

    from featcal.errors import BadPlan
    from featcal.models.families import plan_for
    from featcal.models.plan import BlockPlan, Stack, blocks_of

    lists = [
        path for path, part in model.named_modules() if isinstance(part, ModuleList) and len(part)
    ]
    choices = f"name one with --stack: {', '.join(lists) or 'there is none'}"
    try:
        plan = (
            plan_for(model)
            if not paths
            else BlockPlan(*(Stack(path.replace(".", "_"), path) for path in paths))
        )
        for stack in plan.stacks:
            blocks_of(model, stack)
    except BadPlan as error:
        raise BadPlan(
            type(model).__name__, str(error).splitlines()[0].partition(": ")[2].rstrip("."), choices
        ) from None
    return plan


def block_count(model: Any, modules: Sequence[str] | None, plan: "BlockPlan | None" = None) -> int:
    """How many blocks will be solved, after the checks that need no numbers. Raises: BadPlan,
    UnknownKey.
    """
    from featcal.models.families import plan_for
    from featcal.models.modules import check_coverage, check_modules
    from featcal.models.plan import blocks_of

    plan = plan_for(model, plan)
    for stack in plan.stacks:
        check_coverage(model, stack)
    check_modules(model, plan, modules)
    return sum(len(blocks_of(model, stack)) for stack in plan.stacks)
