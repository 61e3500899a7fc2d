"""Base and experts of a command, from its options or from a mergekit recipe.

A LoRA expert is a model and an adapter. Where a whole model is needed, one is written for as long
as the command runs.
"""

import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcal.cli.folders import existing_folder
from featcal.cli.options import named_folders
from featcal.cli.terminal import note
from featcal.errors import BadFile, BadPlan, BadSetting, MissingPath
from featcal.files import read_json
from featcal.interchange.mergekit import Recipe, read_recipe, recipe_in

if TYPE_CHECKING:
    from mergekit.common import ModelPath
    from torch import nn

    from featcal.models.plan import BlockPlan

CONFIGURATION = ["*.json", "*.txt", "*.model", "*.jinja", "README.md"]
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
SAVED = "give the config.json that was saved with these weights"


@dataclass(frozen=True)
class Inputs:
    """Base and experts of a command.

    experts: folders by name.  adapter_bases: for LoRA experts, the folders of their models.
    """

    base: Path
    experts: Mapping[str, Path]
    adapter_bases: Mapping[str, Path] = field(default_factory=dict)

    @property
    def configured(self) -> dict[str, Path]:
        """Return for every expert the folder with its config.json."""
        return {name: self.adapter_bases.get(name, path) for name, path in self.experts.items()}

    @property
    def labelled_experts(self) -> dict[str, Path]:
        """Return the same by the name that errors use."""
        return {f"expert {name!r}": folder for name, folder in self.configured.items()}

    @property
    def folders(self) -> list[Path]:
        """Return every folder that is read."""
        return [self.base, *self.experts.values(), *self.adapter_bases.values()]


def read_inputs(
    base: Path | None,
    expert: Collection[str] | None,
    recipe_file: Path | None = None,
    merged: Path | None = None,
    weights: bool = True,
) -> Inputs:
    """Return base and experts: from the options, the recipe, or the recipe in the merged folder.

    weights: False if the configuration of models on the hub is enough.
    Raises: BadSetting, MissingPath; as read_recipe; HubUnreachable, NotOnHub.
    """
    from featcal.models.load import is_adapter

    if recipe_file is None and merged is not None and not (base and expert):
        recipe_file = recipe_in(merged)
    recipe = None if recipe_file is None else read_recipe(recipe_file)
    for option, given in (("--base", base), ("--expert", expert)):
        if not given and recipe is None:
            other = f", or with --set recipe=FILE; {merged} holds no mergekit recipe"
            raise BadSetting(option, None, f"must be given{other if merged else ''}")
    if base is not None:
        folder = existing_folder("--base", base)
    else:
        assert recipe is not None
        folder = base_of(recipe, weights)
    experts = named_folders("--expert", expert or ())
    adapter_bases = {name: folder for name, path in experts.items() if is_adapter(path)}
    if recipe is not None:
        if not experts:
            experts, adapter_bases = experts_of(recipe, folder, weights)
        names = ", ".join(f"{name}={path}" for name, path in experts.items())
        note(f"{recipe.file}: base {folder}; experts {names}")
    return Inputs(folder, experts, adapter_bases)


def base_of(recipe: Recipe, weights: bool) -> Path:
    """Return the folder of a recipe's base. Raises: BadFile for none."""
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
    from featcal.models.load import is_adapter

    experts, adapter_bases = {}, {}
    for model in recipe.experts:
        own = model.lora or model.model
        name = Path(own.path).name
        if name in experts:
            way_out = f"name the experts with --expert, for example --expert {name}-1=FOLDER"
            raise BadFile(recipe.file, f"two of its models are called {name!r}", way_out)
        experts[name] = folder_of(own, recipe.file, weights)
        if model.lora:
            adapter_bases[name] = folder_of(model.model, recipe.file, weights)
        elif is_adapter(experts[name]):
            adapter_bases[name] = base
    return experts, adapter_bases


def folder_of(model: "ModelPath", file: Path, weights: bool) -> Path:
    """Return a model's folder: next to the recipe, in the current folder, or from the hub.

    Raises: MissingPath; NotOnHub, HubUnreachable.
    """
    for path in (file.parent / model.path, Path(model.path)):
        if path.is_dir():
            return path
    way_out = f"searched next to {file} and in the current folder; use --base and --expert"
    if HUB_NAME.fullmatch(model.path) is None:
        raise MissingPath(model.path, f"named in {file}", way_out)
    from huggingface_hub import snapshot_download

    from featcal.data.places import reaching

    files = CONFIGURATION + (["*.safetensors"] if weights else [])
    with reaching(model.path, model.revision, f"; {way_out}"):
        return Path(snapshot_download(model.path, revision=model.revision, allow_patterns=files))


@contextmanager
def whole_experts(inputs: Inputs, work: Path, mine: Collection[str]) -> Iterator[dict[str, Path]]:
    """Yield the experts' folders, with LoRA experts among `mine` as whole models in `work`.

    They are removed afterwards, unless `work` holds finished blocks: a run that continues needs
    the same files.
    """
    from featcal.models.lora import dense_folder

    made = {name: work / "experts" / name for name in inputs.adapter_bases if name in mine}
    try:
        for name, folder in made.items():
            note(f"{name}: adding the adapter to {inputs.adapter_bases[name]}")
            dense_folder(inputs.adapter_bases[name], inputs.experts[name], folder)
        yield {**inputs.experts, **made}
    finally:
        if not any((work / "blocks").glob("*")):
            for folder in made.values():
                shutil.rmtree(folder, ignore_errors=True)
            for folder in (work / "experts", work) if made else ():
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()


def skeleton(folder: Path, like: Any = None) -> "nn.Module":
    """Return the model of config.json without weights; of a whole CLIP its vision tower.

    like: a class to build instead if it has the same tower.
    Raises: MissingPath, BadFile for a config.json that makes no model.
    """
    from featcal.models import load

    check_config(folder)
    return load.skeleton(folder, like=like)[0]


def check_config(folder: Path) -> None:
    """Check that config.json names a class and no quantisation; note code that is not run.

    Imports torch only if the folder is an adapter or names code.
    Raises: MissingPath, BadFile.
    """
    path = folder / "config.json"
    if not path.is_file():
        if (folder / "adapter_config.json").is_file():
            from featcal.models.load import refuse_adapter

            refuse_adapter(folder)
        way_out = "give a model's folder: config.json and safetensors"
        raise MissingPath(path, "the model's configuration", way_out)
    config = read_json(path)
    if not isinstance(config, dict):
        raise BadFile(path, "not a mapping of settings", SAVED)
    names = config.get("architectures")
    if not (isinstance(names, list) and names):
        way_out = "a list with one class of transformers is expected, such as CLIPVisionModel"
        raise BadFile(path, f"architectures is {names!r}", way_out)
    if config.get("quantization_config"):
        problem = "a quantised model (quantization_config)"
        raise BadFile(path, problem, "give the checkpoint it was made from")
    if config.get("auto_map"):
        from featcal.models.load import model_code, refuse_code

        refuse_code(folder)
        if code := model_code(config):
            ours = f"transformers' own {names[0]} is used"
            note(f"{path}: auto_map names {code[0]}, which is not run; {ours}")


def vocabulary_sizes(folders: Mapping[str, Path]) -> dict[str, int]:
    """Return the number of tokens of each model whose config.json states it."""
    sizes = {n: read_json(f / "config.json").get("vocab_size") for n, f in folders.items()}
    return {name: size for name, size in sizes.items() if isinstance(size, int)}


def note_vocabularies(folders: Mapping[str, Path]) -> None:
    """Check every configuration; note vocabularies that differ. Raises: as check_config."""
    for folder in folders.values():
        check_config(folder)
    sizes = vocabulary_sizes(folders)
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        note(
            f"vocabulary sizes: {listed}; samples are tokenised with the base's vocabulary, and "
            "the merged model's embeddings stay as they are"
        )


def note_heads(student: Any, inputs: Inputs) -> None:
    """Note each expert with another head than the merged model's, which is not used."""
    from featcal.models.load import model_class

    for name, folder in inputs.configured.items():
        own, kind = model_class(folder), type(student)
        if own is not kind and own.base_model_prefix == kind.base_model_prefix:
            note(f"{name}: a {own.__name__}; its head is not used (merged: {kind.__name__})")


def plan_with(model: Any, paths: Sequence[str] | None) -> "BlockPlan":
    """Return the model's plan, or one of the named lists of blocks.

    Raises: BadPlan with the lists that exist.
    """
    from torch.nn import ModuleList

    from featcal.models.families import plan_for
    from featcal.models.plan import BlockPlan, Stack, blocks_of

    try:
        if paths:
            plan = BlockPlan(*(Stack(path.replace(".", "_"), path) for path in paths))
        else:
            plan = plan_for(model)
        for stack in plan.stacks:
            blocks_of(model, stack)
    except BadPlan as error:
        lists = [n for n, part in model.named_modules() if isinstance(part, ModuleList) and part]
        choices = f"name one with --set stack=PATH: {', '.join(lists) or 'there is none'}"
        problem = str(error).splitlines()[0].partition(": ")[2].rstrip(".")
        raise BadPlan(type(model).__name__, problem, choices) from None
    return plan


def block_count(model: Any, plan: "BlockPlan", modules: Sequence[str] | None) -> int:
    """Return the number of blocks to solve, after the checks that need no weights.

    Raises: BadPlan, UnknownKey.
    """
    from featcal.models.modules import check_coverage, check_modules
    from featcal.models.plan import blocks_of

    for stack in plan.stacks:
        check_coverage(model, stack)
    check_modules(model, plan, modules)
    return sum(len(blocks_of(model, stack)) for stack in plan.stacks)
