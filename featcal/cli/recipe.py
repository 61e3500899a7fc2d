"""Base and experts of a command: from its options, else from a mergekit recipe.

A LoRA expert is a model and an adapter; where a whole model is needed, one is written for as long
as the command runs.
"""

import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from featcal.cli.arguments import existing_folder, named_folders
from featcal.cli.terminal import note
from featcal.errors import BadFile, BadSetting, MissingPath
from featcal.interchange.mergekit import Recipe, read_recipe, recipe_in
from featcal.models.code import is_adapter

if TYPE_CHECKING:
    from mergekit.common import ModelPath

CONFIGURATION = ["*.json", "*.txt", "*.model", "*.jinja", "README.md"]
HUB = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Named:
    """Base and experts of a command.

    experts: folders by name.  under: for LoRA experts, the folder of the model they belong to.
    recipe: the recipe that was read, if any.
    """

    base: Path
    experts: Mapping[str, Path]
    under: Mapping[str, Path] = field(default_factory=dict)
    recipe: Recipe | None = None

    @property
    def shaped(self) -> dict[str, Path]:
        """Return for every expert the folder with its config.json."""
        return {name: self.under.get(name, folder) for name, folder in self.experts.items()}

    def all_shaped(self, merged: Path) -> dict[str, Path]:
        """Return for every model the folder with its config.json, by the name errors use."""
        return {"base": self.base, "merged": merged} | {
            f"expert {name!r}": folder for name, folder in self.shaped.items()
        }

    @property
    def read(self) -> list[Path]:
        """Return every folder that is read."""
        return [self.base, *self.experts.values(), *self.under.values()]


def named_models(
    base: Path | None,
    expert: Collection[str],
    recipe: Path | None,
    merged: Path | None = None,
    weights: bool = True,
) -> Named:
    """Return base and experts: from the options, the recipe, or the recipe in the merged folder.

    weights: False where the configuration of models on the hub is enough.
    Raises: BadSetting, MissingPath; what reading a recipe and reaching the hub raise.
    """
    if recipe is None and merged is not None and not (base and expert):
        recipe = recipe_in(merged)
    read = None if recipe is None else read_recipe(recipe)
    if read is None:
        where = "" if merged is None else f", or with --recipe; {merged} holds no mergekit recipe"
        for option, given in (("--base", base), ("--expert", expert)):
            if not given:
                raise BadSetting(option, None, f"must be named{where}")
    folder = existing_folder("--base", base) if base is not None else base_of(read, weights)
    experts = named_folders("--expert", expert)
    under = {name: folder for name, path in experts.items() if is_adapter(path)}
    if not experts and read is not None:
        experts, under = experts_of(read, folder, weights)
    if read is not None:
        named = ", ".join(f"{name}={path}" for name, path in experts.items())
        note(f"{read.file}: base {folder}; experts {named}")
    return Named(folder, experts, under, read)


def base_of(recipe: Recipe | None, weights: bool) -> Path:
    """Return the folder of a recipe's base. Raises: BadFile for none."""
    assert recipe is not None
    if recipe.base is None:
        problem = f"names no base_model from which the models of {recipe.method} were fine-tuned"
        raise BadFile(recipe.file, problem, "name that model with --base FOLDER")
    if recipe.base.lora:
        problem = f"its base_model is {recipe.base}, a LoRA on top of a model"
        raise BadFile(recipe.file, problem, "save it as a model and name that with --base FOLDER")
    return folder_of(recipe.base.model, recipe.file, weights)


def experts_of(
    recipe: Recipe, base: Path, weights: bool
) -> tuple[dict[str, Path], dict[str, Path]]:
    """Return the experts' folders by name, and for LoRA experts the folders of their models.

    Raises: BadFile for two experts of one name.
    """
    experts, under = {}, {}
    for model in recipe.experts:
        own = model.lora or model.model
        name = Path(own.path).name
        if name in experts:
            way_out = f"name the experts with --expert, for example --expert {name}-1=FOLDER"
            raise BadFile(recipe.file, f"two of its models are called {name!r}", way_out)
        experts[name] = folder_of(own, recipe.file, weights)
        if model.lora:
            under[name] = folder_of(model.model, recipe.file, weights)
        elif is_adapter(experts[name]):
            under[name] = base
    return experts, under


def folder_of(model: "ModelPath", file: Path, weights: bool) -> Path:
    """Return a model's folder: next to the recipe, in the current folder, or from the hub.

    Raises: MissingPath; NotOnHub, HubUnreachable.
    """
    for path in (file.parent / model.path, Path(model.path)):
        if path.is_dir():
            return path
    way_out = f"searched next to {file} and in the current folder; use --base and --expert"
    if HUB.fullmatch(model.path) is None:
        raise MissingPath(model.path, f"named in {file}", way_out)
    from huggingface_hub import snapshot_download

    from featcal.data.places import reaching

    files = CONFIGURATION + (["*.safetensors"] if weights else [])
    with reaching(model.path, model.revision, f"; {way_out}"):
        return Path(snapshot_download(model.path, revision=model.revision, allow_patterns=files))


@contextmanager
def whole_experts(named: Named, place: Path, mine: Collection[str]) -> Iterator[dict[str, Path]]:
    """Yield the experts' folders, LoRA experts among `mine` as whole models below `place`.

    These are removed afterwards, unless blocks are solved there: then a run that goes on from them
    needs the same files.
    """
    from featcal.models.lora import dense_folder

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
