"""Base and experts of a command: from its options, else from a mergekit recipe.

A LoRA expert is a model and an adapter; where a whole model is needed, one is written for as long
as the command runs."""

import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcal.cli.options import existing_folder, named_folders
from featcal.cli.terminal import note
from featcal.errors import BadFile, BadSetting, MissingPath, TensorsDiffer
from featcal.interchange.mergekit import Recipe, read_recipe, recipe_in
from featcal.models.load import is_adapter, refuse_adapter

if TYPE_CHECKING:
    from mergekit.common import ModelPath
    from torch import nn

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


SAVED = "give the config.json that was saved with these weights"


def skeleton(folder: Path) -> "nn.Module":
    """The model of config.json without its numbers; of a whole CLIP its vision tower.

    Raises: MissingPath, BadFile for a config.json that makes no model.
    """
    from featcal.models.load import skeleton as meta_model

    require_names(folder / "config.json")
    return meta_model(folder)[0]


def require_names(path: Path) -> None:
    """A config.json that lists the names of its classes, of numbers that are not packed; a line
    where it names code, too.
    """
    from featcal.files import read_json

    refuse_adapter(path.parent)
    if not path.is_file():
        raise MissingPath(
            path, "what model it is", "give a model's folder: config.json and safetensors"
        )
    config = read_json(path)
    if not isinstance(config, dict):
        raise BadFile(path, "not a mapping of settings", SAVED)
    names = config.get("architectures")
    if not (isinstance(names, list) and names):
        way_out = "a list with one class of transformers is expected, such as CLIPVisionModel"
        raise BadFile(path, f"architectures is {names!r}", way_out)
    if config.get("quantization_config"):
        raise BadFile(
            path, "a quantised model (quantization_config)", "give the checkpoint it was made from"
        )
    from featcal.models.load import model_code, refuse_code

    refuse_code(path.parent)
    if code := model_code(config):
        note(
            f"{path}: auto_map names {code[0]}, which is not run; transformers' own {names[0]} is used"
        )


def word_rows(folders: Mapping[str, Path]) -> dict[str, int]:
    """How many rows of words each model has, of those whose config.json tells it."""
    from featcal.files import read_json

    told = {
        name: read_json(folder / "config.json").get("vocab_size")
        for name, folder in folders.items()
    }
    return {name: count for name, count in told.items() if isinstance(count, int)}


def alike_student(merged: Path, named: Named) -> "nn.Module":
    """The merged model without its numbers, once all models are there and alike. Raises: as
    skeleton, require_alike.
    """
    from featcal.models.lora import with_adapter

    folders = named.all_shaped(merged)
    student = {name: skeleton(folder) for name, folder in folders.items()}["merged"]
    require_alike(folders)
    for name, folder in named.under.items():
        with_adapter(skeleton(folder), named.experts[name])
    return student


def require_alike(folders: Mapping[str, Path]) -> None:
    """Weights of one shape in all folders, told from the files' heads alone; the first folder is
    the reference.

    Of tables of words and of heads the number of rows may differ.

    Raises: TensorsDiffer naming both files and the tensor; BadFile for whole numbers; whatever
    opening a folder raises.
    """
    from transformers import CLIPModel, CLIPVisionModel

    from featcal.models.checkpoint import LazyCheckpoint
    from featcal.models.load import model_class, vision_part

    first = None
    for folder in folders.values():
        clip = model_class(folder) in (CLIPModel, CLIPVisionModel)
        opened = LazyCheckpoint(folder, vision_part(folder) if clip else None)
        opened.require_floating()
        first = first or opened
        names = set(
            first.names
        )  # one that a folder lacks may be tied to another; loading tells which are missing
        for name in (name for name in opened.names if name in names):
            this, that = first.shape(name), opened.shape(name)
            if not alike(name, this, that):
                raise TensorsDiffer(name, first.file_of(name), this, opened.file_of(name), that)


def alike(name: str, one: tuple[int, ...] | None, other: tuple[int, ...] | None) -> bool:
    """Whether two models' shapes of one tensor go together: in blocks the same, elsewhere but for
    rows, or where one has none.
    """
    if any(part.isdecimal() for part in name.split(".")):
        return one == other
    return one is None or other is None or one[1:] == other[1:]


def tell_heads(student: Any, named: Named) -> None:
    """A line for each expert of another class than the merged model's: what stands on its tower has
    no part in this.
    """
    from featcal.models.load import model_class

    for name, folder in named.shaped.items():
        own, kind = model_class(folder), type(student)
        if own is not kind and own.base_model_prefix == kind.base_model_prefix:
            note(
                f"{name}: a {own.__name__}, of which the tower counts; its head stays with it (the merged model: {kind.__name__})"
            )


def tell_words(folders: Mapping[str, Path]) -> None:
    """A line where the models have other words: texts are cut into the base's, and every model
    keeps its own rows.
    """
    rows = word_rows(folders)
    if len(set(rows.values())) > 1:
        told = ", ".join(f"{role} {count}" for role, count in rows.items())
        note(
            f"rows of words: {told}; samples are cut into the base's words, and the merged model's rows stay as they are"
        )
