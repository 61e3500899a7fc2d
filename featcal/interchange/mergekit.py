"""Read base and experts from a mergekit recipe with mergekit's own configuration classes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from featcal.errors import BadFile, MissingPath, as_bad_file, optional_package

WRITTEN = "mergekit_config.yml"  # the recipe that mergekit writes into the merged folder
CARD = "README.md"  # mergekit shows the recipe there too, and some folders have only this
SHOWN = re.compile(r"^```ya?ml\n((?:(?!^```).)*^merge_method:(?:(?!^```).)*)^```", re.S | re.M)
# the base_model of these methods is one of the merged models, not the one they were fine-tuned from
BASE_IS_MERGED = ("slerp", "arcee_fusion", "nearswap")
OWN_BLOCKS = "calibration needs whole models with the same blocks: use --base and --expert"


@dataclass(frozen=True)
class Recipe:
    """Base and experts of a merged model as a file names them: paths, or owner/name@revision."""

    file: Path
    base: str | None
    experts: Mapping[str, Sequence[str]]  # by name a model, or a model and an adapter of it
    method: str = ""
    no_base: str = ""  # why no base is named, where none is


def recipe_in(folder: Path) -> Path | None:
    """Return the recipe in a merged folder, or the card that shows it; None without one."""
    if (folder / WRITTEN).is_file():
        return folder / WRITTEN
    card = folder / CARD
    return card if card.is_file() and SHOWN.search(card.read_text("utf-8", "replace")) else None


def read_recipe(file: Path) -> Recipe:
    """Return the models that a recipe merges. Raises: BadEnvironment, MissingPath, BadFile."""
    if file.is_dir():
        raise BadFile(file, "a folder, not a recipe", f"give the YAML file, such as {WRITTEN}")
    if not file.is_file():
        raise MissingPath(file, "mergekit's recipe", "check the path")
    kit = optional_package("mergekit.config", "mergekit", file, ", or use --base and --expert")
    way_out = "give the YAML file that mergekit-yaml was given"
    with as_bad_file(file, "mergekit does not read it", way_out):
        text = file.read_text("utf-8", "replace" if file.name == CARD else "strict")
        shown = SHOWN.search(text) if file.name == CARD else None
        config = kit.MergeConfiguration.model_validate(yaml.safe_load(shown[1] if shown else text))
    if config.merge_method == "passthrough":
        raise BadFile(file, "its merge_method, passthrough, merges nothing", OWN_BLOCKS)
    modules, base = config.modules or {"default": config}, config.base_model
    if list(modules) != ["default"]:
        raise BadFile(file, "merges modules, not whole models", OWN_BLOCKS)
    part = modules["default"]
    models = [entry.model for entry in part.models or ()]
    if part.slices:
        models, base = _of_slices(file, part.slices, base)
    if config.merge_method in BASE_IS_MERGED and base is not None:
        models, base = [base, *models], None
    experts, named = {str(Path(str(model))): model for model in models}, {}  # "./a/" is "a"
    experts.pop(str(Path(str(base))), None)
    if not experts:
        way_out = "list the fine-tuned models under models"
        raise BadFile(file, "merges no model besides its base", way_out)
    for model in experts.values():
        name = Path((model.lora or model.model).path).name
        if name in named:
            way_out = f"name base and experts: --base FOLDER --expert {name}-1=FOLDER ..."
            raise BadFile(file, f"two of its models are called {name!r}", way_out)
        named[name] = [str(path) for path in (model.model, model.lora) if path]
    base_path = str(base.model) if base and not base.lora else None
    no_base = f"names no base_model from which the models of {config.merge_method} come"
    if base:
        no_base = f"its base_model is {base}, a LoRA on top of a model"
    return Recipe(file, base_path, named, config.merge_method, no_base)


def _of_slices(file: Path, slices: Any, default: Any) -> tuple[list[Any], Any]:
    """Return the models of slices that cover the same layers of each, and their base."""
    end, models = 0, [source.model for source in slices[0].sources]
    base = slices[0].base_model or default
    for part in slices:
        ranges = {tuple(source.layer_range) for source in part.sources}
        first, last = ranges.pop() if ranges else (None, None)
        same = sorted(map(str, models)) == sorted(str(source.model) for source in part.sources)
        aligned = same and not ranges and first == end and len(set(models)) == len(models)
        if not aligned or (part.base_model or default) != base or part.residual_weight:
            raise BadFile(file, "merges slices that are no whole models", OWN_BLOCKS)
        end = last
    return models, base
