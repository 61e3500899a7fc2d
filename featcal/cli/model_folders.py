"""Model folders of the command line, tried before anything heavy begins: does transformers make
models of them, do they fit?
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcal.cli.recipe import Named
from featcal.cli.terminal import note
from featcal.errors import BadFile, MissingPath, TensorsDiffer
from featcal.models.code import refuse_adapter

if TYPE_CHECKING:
    from torch import nn

SAVED = "give the config.json that was saved with these weights"


def skeleton(folder: Path) -> "nn.Module":
    """The model of config.json without its numbers; of a whole CLIP its vision tower.

    Raises: MissingPath, BadFile for a config.json that makes no model.
    """
    from featcal.models.skeleton import skeleton as meta_model

    require_names(folder / "config.json")
    return meta_model(folder)[0]


def require_names(path: Path) -> None:
    """A config.json that lists the names of its classes, of numbers that are not packed; a line
    where it names code, too.
    """
    from featcal.storage.jsonfile import read_json

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
    from featcal.models.code import model_code, refuse_code

    refuse_code(path.parent)
    if code := model_code(config):
        note(
            f"{path}: auto_map names {code[0]}, which is not run; transformers' own {names[0]} is used"
        )


def word_rows(folders: Mapping[str, Path]) -> dict[str, int]:
    """How many rows of words each model has, of those whose config.json tells it."""
    from featcal.storage.jsonfile import read_json

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

    from featcal.models.load import model_class, vision_part
    from featcal.storage.checkpoint import LazyCheckpoint

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
