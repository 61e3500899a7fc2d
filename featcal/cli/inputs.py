"""The models and samples that a command reads, all checked before any work.

A LoRA expert is a model and an adapter; where a whole model is
needed, one is written for as long as the command runs.
"""

import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcal.cli.options import (
    HUB_MODEL,
    AllAtOnce,
    from_hub,
    model_folder,
    named_data,
    named_folders,
)
from featcal.cli.terminal import note
from featcal.errors import (
    BadFile,
    BadPlan,
    BadSetting,
    FeatCalError,
    MissingPath,
    nearest,
)
from featcal.files import read_json
from featcal.interchange.mergekit import read_recipe, recipe_in
from featcal.record import RECORD, read_record
from featcal.settings import require

if TYPE_CHECKING:
    from torch import nn

    from featcal.data.places import Location
    from featcal.interchange.mergekit import Recipe
    from featcal.models.plan import BlockPlan


@dataclass(frozen=True)
class Inputs:
    """Models and samples of a command.

    merged: folder of the merged model; the base's for a command without one.
    experts: folders by name.  adapter_bases: for LoRA experts, the folders of their models.
    data: samples by name of the expert.
    """

    merged: Path
    base: Path
    experts: Mapping[str, Path]
    adapter_bases: Mapping[str, Path] = field(default_factory=dict)
    data: "Mapping[str, Location]" = field(default_factory=dict)

    @property
    def configured(self) -> dict[str, Path]:
        """Return the folders with the experts' config.json, by the name that errors use."""
        return {f"expert {n!r}": self.adapter_bases.get(n, f) for n, f in self.experts.items()}

    @property
    def folders(self) -> list[Path]:
        """Return every folder and file that is read."""
        models = [self.merged, self.base, *self.experts.values(), *self.adapter_bases.values()]
        return models + [one.source for one in self.data.values() if isinstance(one.source, Path)]


@dataclass(frozen=True)
class Name:
    """A model as a record or a recipe names it: a path or a repository of the hub."""

    path: str
    revision: str | None = None


@dataclass(frozen=True)
class Names:
    """Base and experts as a file names them; an expert is a model, or a model and an adapter."""

    file: Path
    base: Name | None
    experts: Mapping[str, tuple[Name, ...]]
    no_base: str = ""  # why the file does not say which model the experts were fine-tuned from


def read_inputs(
    merged: str | None,
    base: str | None,
    expert: Collection[str] | None,
    data: Collection[str] | None = None,
    recipe: Path | None = None,
    *,
    weights: bool = True,
    needs_base: bool = True,
) -> Inputs:
    """Return the inputs of a command. Base and experts come from the options, else the recipe, else
    what the merged folder records.

    weights: False if the configuration of models on the hub is enough.
    needs_base: False if the merged model can take the place of a base that is not known.
    Raises: one FeatCalError with all mistakes.
    """
    collect = AllAtOnce()
    folder = collect(model_folder, "--merged", merged, weights) if merged else None
    origin = collect(model_folder, "--base", base, weights) if base else None
    experts = named_folders("--expert", expert or (), collect, weights)
    datasets = named_data(data or (), collect)
    names = None
    if not (base and expert) and (folder or recipe):
        names = collect(names_in, folder, recipe)
    if not collect.mistakes and names is None:
        needed = (("--base", base or not needs_base), ("--expert", expert))
        missing = [option for option, given in needed if not given]
        if missing:
            problem = f"must be given: {merged} holds no featcal.json or recipe that names them"
            way_out = "name them, or mergekit's recipe with --set recipe=FILE"
            collect.mistakes.append(FeatCalError(", ".join(missing), problem, way_out))
    collect.report()
    adapter_bases = dict[str, Path]()
    if names is not None:
        if origin is None and (needs_base or names.base):
            origin = named_base(names, weights)
        for name, (model, *adapter) in names.experts.items() if not expert else ():
            experts[name] = located((*adapter, model)[0], names.file, weights)
            if adapter:
                adapter_bases[name] = located(model, names.file, weights)
    origin = origin or folder
    assert origin is not None
    adapter_bases |= {
        name: origin
        for name, path in experts.items()
        if name not in adapter_bases and is_adapter(path)
    }
    if names is not None:
        listed = ", ".join(f"{name}={path}" for name, path in experts.items())
        note(f"{names.file}: base {origin}; experts {listed}")
    inputs = Inputs(folder or origin, origin, experts, adapter_bases, datasets)
    for model in dict.fromkeys((inputs.base, inputs.merged, *inputs.configured.values())):
        collect(check_config, model)
    if data:
        collect(require_samples, experts, datasets)
    collect.report()
    return inputs


def read_compared(
    model: Collection[str],
    base: str | None,
    expert: Collection[str] | None,
    data: Collection[str],
    recipe: Path | None,
) -> tuple[dict[str, Path], Inputs]:
    """Return the models to compare by name, and inputs with the first of them as merged model.

    Base and experts may be recorded in any of the models. The base is needed where an expert is a
    LoRA adapter of it, or vocabularies differ. Raises: as read_inputs.
    """
    collect = AllAtOnce()
    models = named_folders("--model", model, collect)
    collect.report()
    first, *_ = models.values()
    recording = next(filter(records_models, models.values()), first)
    inputs = read_inputs(str(recording), base, expert, data, recipe, needs_base=False)
    for folder in models.values():
        check_config(folder)
    if inputs.base == recording:
        if inputs.adapter_bases:
            expected = f"must be given: {min(inputs.adapter_bases)!r} is a LoRA adapter of it"
            raise BadSetting("--base", None, expected)
        experts = {f"expert {name!r}": folder for name, folder in inputs.experts.items()}
        sizes = vocabulary_sizes({f"model {n!r}": f for n, f in models.items()} | experts)
        if sizes and base is None:
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
            expected = f"must be given, because vocabularies differ in size ({listed})"
            raise BadSetting("--base", None, expected)
    return models, replace(inputs, merged=first)


def require_samples(experts: Collection[str], data: Collection[str]) -> None:
    """Raise BadSetting unless there are samples of every expert, and of no other."""
    if lacking := [name for name in experts if name not in data]:
        way_out = ", ".join(f"--data {name}=PATH" for name in lacking)
        raise BadSetting("--data", None, f"must hold samples of every expert: add {way_out}")
    for name in data:
        expected = f"has no expert of that name; {nearest(name, experts)}"
        require(name in experts, "--data", name, expected)


def is_adapter(folder: Path) -> bool:
    """Return whether the folder has an adapter, and no weights of a model."""
    adapter = (folder / "adapter_config.json").is_file()
    return adapter and not any(folder.glob("model*.safetensors"))


def names_in(folder: Path | None, recipe: Path | None = None) -> Names | None:
    """Return base and experts as the recipe names them, else as the folder records them."""
    record = read_record(folder) if folder and not recipe else {}
    if folder and isinstance(record.get("experts"), dict) and "base" in record:
        experts = {task: (recorded_name(model),) for task, model in record["experts"].items()}
        return Names(folder / RECORD, recorded_name(record["base"]), experts)
    file = recipe or (recipe_in(folder) if folder else None)
    return None if file is None else names_of(read_recipe(file))


def records_models(folder: Path) -> bool:
    """Return whether a merged folder says what it was merged from."""
    return "experts" in read_record(folder) or recipe_in(folder) is not None


def recorded_name(text: str) -> Name:
    """Return a path, or owner/name@commit as a repository."""
    path, _, commit = text.rpartition("@")
    return Name(path, commit) if HUB_MODEL.fullmatch(text) and path else Name(text)


def names_of(recipe: "Recipe") -> Names:
    """Return the models of mergekit's recipe, named by the last part of their paths."""
    experts: dict[str, tuple[Name, ...]] = {}
    for model in recipe.experts:
        parts = [Name(one.path, one.revision) for one in (model.model, model.lora) if one]
        name = Path(parts[-1].path).name
        if name in experts:
            way_out = f"name the experts with --expert, for example --expert {name}-1=FOLDER"
            raise BadFile(recipe.file, f"two of its models are called {name!r}", way_out)
        experts[name] = tuple(parts)
    if recipe.base is None:
        no_base = f"names no base_model from which the models of {recipe.method} come"
    elif recipe.base.lora:
        no_base = f"its base_model is {recipe.base}, a LoRA on top of a model"
    else:
        base = Name(recipe.base.model.path, recipe.base.model.revision)
        return Names(recipe.file, base, experts)
    return Names(recipe.file, None, experts, no_base)


def named_base(names: Names, weights: bool) -> Path:
    """Return the base's folder. Raises: BadFile if the file does not name it; as located."""
    if names.base is None:
        way_out = "save the model they were fine-tuned from and name it with --base FOLDER"
        raise BadFile(names.file, names.no_base, way_out)
    return located(names.base, names.file, weights)


def located(model: Name, file: Path, weights: bool) -> Path:
    """Return a model's folder: next to the file that names it, in the current folder, or from the
    hub.
    """
    for path in (file.parent / model.path, Path(model.path)):
        if path.is_dir():
            return Path(os.path.relpath(path.resolve()))
    way_out = f"searched next to {file} and in the current folder; use --base and --expert"
    if HUB_MODEL.fullmatch(model.path) is None:
        raise MissingPath(model.path, f"named in {file}", way_out)
    return from_hub(model.path, model.revision, f"; {way_out}", weights)


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
        if not any(work.rglob("blocks/*")):
            for folder in made.values():
                shutil.rmtree(folder, ignore_errors=True)
            for folder in (work / "experts", work) if made else ():
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()


def skeleton(folder: Path, like: Any = None) -> "nn.Module":
    """Return the model of config.json without weights; of a whole CLIP its vision tower.

    like: a class to build instead if it has the same tower.
    """
    from featcal.models import stored

    return stored.skeleton(folder, like=like)


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
        way_out = "give the config.json that was saved with these weights"
        raise BadFile(path, "not a mapping of settings", way_out)
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
    """Return the number of tokens of each model whose config.json states it; {} if all agree."""
    sizes = {n: read_json(f / "config.json").get("vocab_size") for n, f in folders.items()}
    sizes = {name: size for name, size in sizes.items() if isinstance(size, int)}
    return sizes if len(set(sizes.values())) > 1 else {}


def plan_with(model: Any, paths: Sequence[str] | None) -> "BlockPlan":
    """Return the model's plan, or one of the named lists of blocks."""
    from torch.nn import ModuleList

    from featcal.models.families import plan_for
    from featcal.models.plan import BlockPlan, Stack, blocks_of

    try:
        stacks = (Stack(path.replace(".", "_"), path) for path in paths or ())
        plan = BlockPlan(*stacks) if paths else plan_for(model)
        for stack in plan.stacks:
            blocks_of(model, stack)
    except BadPlan as error:
        lists = [n for n, part in model.named_modules() if isinstance(part, ModuleList) and part]
        choices = f"name one with --set stack=PATH: {', '.join(lists) or 'there is none'}"
        raise BadPlan(type(model).__name__, error.problem, choices) from None
    return plan
