"""Base and experts of a command line: from its options, and what these leave out from mergekit's
recipe.

A LoRA expert, named in either way, is a model and an adapter; where a whole model is needed, one is
written for as long as the command runs.
"""

import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from featcal.cli.arguments import existing_folder, named_folders
from featcal.cli.terminal import note
from featcal.errors import BadFile, BadSetting, MissingPath
from featcal.interchange.mergekit import Recipe, Reference, beside_merged, hint, read_recipe
from featcal.models.code import is_adapter

CONFIGURATION = ["*.json", "*.txt", "*.model", "*.jinja", "README.md"]
HUB = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Named:
    """What was named.

    experts: folders by name.  under: of those that are LoRA folders, the model each stands on.
    recipe: where one was read.
    """

    base: Path
    experts: Mapping[str, Path]
    under: Mapping[str, Path] = field(default_factory=dict)
    recipe: Recipe | None = None

    @property
    def shaped(self) -> dict[str, Path]:
        """Of every expert the folder that tells its shape."""
        return {name: self.under.get(name, folder) for name, folder in self.experts.items()}

    def all_shaped(self, merged: Path) -> dict[str, Path]:
        """Of every model that is at work the folder that tells its shape, by the name errors
        use.
        """
        return {"base": self.base, "merged": merged} | {
            f"expert {name!r}": folder for name, folder in self.shaped.items()
        }

    @property
    def read(self) -> list[Path]:
        """Every folder that is read."""
        return [self.base, *self.experts.values(), *self.under.values()]


def named_models(
    base: Path | None,
    expert: Collection[str],
    recipe: Path | None,
    merged: Path | None = None,
    weights: bool = True,
) -> Named:
    """Base and experts. Options count more than the recipe, which counts more than the one in the
    merged folder.

    weights: False where configuration files are enough, of checkpoints that have to be downloaded.
    Raises: BadSetting, MissingPath; what reading a recipe and reaching the hub raise.
    """
    file = recipe or (
        beside_merged(merged) if merged is not None and not (base and expert) else None
    )
    read = None if file is None else read_recipe(file)
    if read is None:
        where = "" if merged is None else f"; {merged} holds no mergekit_config.yml that would tell"
        for option, given in (("--base", base), ("--expert", expert)):
            if not given:
                raise BadSetting(
                    option, None, f"must be named, or mergekit's recipe given with --recipe{where}"
                )
    else:
        tell_unknown(read)
    folder = existing_folder("--base", base) if base is not None else base_of(read, weights)
    experts = named_folders("--expert", expert)
    under = {name: folder for name, place in experts.items() if is_adapter(place)}
    if not experts and read is not None:
        experts, under = experts_of(read, folder, weights)
    if read is not None:
        note(
            f"{read.file}: base {folder}; experts "
            + ", ".join(f"{name}={place}" for name, place in experts.items())
        )
    return Named(folder, experts, under, read)


def tell_unknown(recipe: Recipe) -> None:
    """A line for each key that mergekit does not have and therefore ignores."""
    for key, near in recipe.unknown.items():
        meant = f"; did you mean {near!r}?" if near else ""
        note(
            f"{recipe.file}: {key!r} is no key of mergekit's recipes and is left out of account{meant}"
        )


def base_of(recipe: Recipe | None, weights: bool) -> Path:
    """The base that a recipe names. Raises: BadFile for none."""
    assert recipe is not None
    if recipe.base is None:
        near = hint(recipe.unknown, "base_model")
        problem = f"does not tell what the models were fine-tuned from; merge_method {recipe.method} needs no such base_model{near}"
        raise BadFile(recipe.file, problem, "name that model with --base FOLDER")
    if recipe.base.lora:
        raise BadFile(
            recipe.file,
            f"its base_model is {recipe.base}, a LoRA on top of a model",
            "save that as a model, then --base",
        )
    return folder_of(recipe.base, recipe.file, weights)


def experts_of(
    recipe: Recipe, base: Path, weights: bool
) -> tuple[dict[str, Path], dict[str, Path]]:
    """Folders of the experts by name, and of LoRA folders the models they stand on. Raises: BadFile
    for one name twice.
    """
    experts, under = {}, {}
    for reference in recipe.experts:
        name = reference.name
        if name in experts:
            way_out = f"tell them apart with --expert, for example --expert {name}-1=FOLDER"
            raise BadFile(recipe.file, f"two of its models are called {name!r}", way_out)
        experts[name] = folder_of(reference.lora or reference, recipe.file, weights)
        if reference.lora or is_adapter(experts[name]):
            under[name] = folder_of(reference, recipe.file, weights) if reference.lora else base
    return experts, under


def folder_of(reference: Reference, file: Path, weights: bool) -> Path:
    """The folder of a reference: beside the recipe, in the current folder, or fetched from the hub.

    Raises: MissingPath; NotOnHub, HubUnreachable.
    """
    for place in (file.parent / reference.path, Path(reference.path)):
        if place.is_dir():
            return place
    way_out = f"looked for beside {file} and in the current folder; go where mergekit was started, or use --base and --expert"
    if HUB.fullmatch(reference.path) is None:
        raise MissingPath(reference.path, f"named in {file}", way_out)
    from huggingface_hub import snapshot_download

    from featcal.data.places import reaching

    patterns = CONFIGURATION + (["*.safetensors"] if weights else [])
    with reaching(reference.path, reference.revision, f"; {way_out}"):
        return Path(
            snapshot_download(reference.path, revision=reference.revision, allow_patterns=patterns)
        )


@contextmanager
def whole_experts(named: Named, place: Path, mine: Collection[str]) -> Iterator[dict[str, Path]]:
    """The experts, of `mine` those with a LoRA as whole models below `place`; these are gone
    afterwards.

    A run that stops with blocks solved keeps them there, as what goes on from it will ask for the
    same files.
    """
    from featcal.merging.dense import dense_folder

    made = {name: place / "experts" / name for name in named.under if name in mine}
    try:
        for name, folder in made.items():
            note(f"{name}: the adapter is added to {named.under[name]}")
            dense_folder(named.under[name], named.experts[name], folder)
        yield {**named.experts, **made}
    finally:
        if not any((place / "blocks").glob("*")):
            for folder in made.values():
                shutil.rmtree(folder, ignore_errors=True)
            for folder in (place / "experts", place) if made else ():
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()
