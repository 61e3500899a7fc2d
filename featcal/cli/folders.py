"""Folders of a command: the models it reads, and the folder it writes and may push to the hub.

All are checked before any work. Base and experts come from options or from a mergekit recipe. A
LoRA expert is a model and an adapter; where a whole model is needed, one is written for as long as
the command runs.
"""

import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from featcal.cli.options import named_folders
from featcal.cli.terminal import note, size_text
from featcal.errors import BadFile, BadPlan, BadSetting, HubUnreachable, MissingPath
from featcal.files import read_json
from featcal.settings import require

if TYPE_CHECKING:
    from mergekit.common import ModelPath
    from torch import nn

    from featcal.interchange.mergekit import Recipe
    from featcal.models.plan import BlockPlan

CONFIGURATION = ["*.json", "*.txt", "*.model", "*.jinja", "README.md"]
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
MODEL_CONFIGS = ("config.json", "open_clip_config.json")  # what makes a folder a model folder


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
        """Return the folders with the experts' config.json, by the name that errors use."""
        return {f"expert {n!r}": self.adapter_bases.get(n, f) for n, f in self.experts.items()}

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
    """
    from featcal.interchange.mergekit import read_recipe, recipe_in
    from featcal.models.load import is_adapter

    experts = named_folders("--expert", expert or ())
    if recipe_file is None and merged is not None and not (base and experts):
        recipe_file = recipe_in(merged)
    recipe = None if recipe_file is None else read_recipe(recipe_file)
    for option, given in (("--base", base), ("--expert", experts)):
        if not given and recipe is None:
            other = f", or with --set recipe=FILE; {merged} holds no mergekit recipe"
            raise BadSetting(option, None, f"must be given{other if merged else ''}")
    if recipe is not None and base is None:
        if recipe.base is None or recipe.base.lora:
            problem = f"its base_model is {recipe.base}, a LoRA on top of a model"
            if recipe.base is None:
                problem = f"names no base_model from which the models of {recipe.method} come"
            way_out = "save the model they were fine-tuned from and name it with --base FOLDER"
            raise BadFile(recipe.file, problem, way_out)
        base = recipe_folder(recipe.base.model, recipe.file, weights)
    assert base is not None
    adapter_bases = {name: base for name, path in experts.items() if is_adapter(path)}
    if recipe is not None:
        if not experts:
            experts, adapter_bases = recipe_experts(recipe, base, weights)
        names = ", ".join(f"{name}={path}" for name, path in experts.items())
        note(f"{recipe.file}: base {base}; experts {names}")
    return Inputs(base, experts, adapter_bases)


def recipe_experts(
    recipe: "Recipe", base: Path, weights: bool
) -> tuple[dict[str, Path], dict[str, Path]]:
    """Return the experts' folders by name, and for LoRA experts the folders of their models."""
    from featcal.models.load import is_adapter

    experts: dict[str, Path] = {}
    adapter_bases: dict[str, Path] = {}
    for model in recipe.experts:
        own = model.lora or model.model
        name = Path(own.path).name
        if name in experts:
            way_out = f"name the experts with --expert, for example --expert {name}-1=FOLDER"
            raise BadFile(recipe.file, f"two of its models are called {name!r}", way_out)
        experts[name] = recipe_folder(own, recipe.file, weights)
        if model.lora:
            adapter_bases[name] = recipe_folder(model.model, recipe.file, weights)
        elif is_adapter(experts[name]):
            adapter_bases[name] = base
    return experts, adapter_bases


def recipe_folder(model: "ModelPath", file: Path, weights: bool) -> Path:
    """Return a model's folder: next to the recipe, in the current folder, or from the hub."""
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

    check_config(folder)
    return stored.skeleton(folder, like=like)[0]


def check_config(folder: Path) -> None:
    """Check that config.json names a class and no quantisation; note code that is not run.

    Imports torch only if the folder is an adapter or names code.
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


def new_folder(out: Path, force: bool, inputs: Iterable[Path]) -> None:
    """Check the folder to write; `force` replaces a model folder or an empty one."""

    def check(condition: bool, expected: str) -> None:
        require(condition, "--out", str(out), expected)

    if out.is_symlink() and not out.exists():
        check(False, f"is a link to {out.readlink()}, which does not exist; remove it")
    path = out.resolve()
    for folder in (folder.resolve() for folder in inputs):
        holds = path in (folder, *folder.parents)
        check(not holds, "names, or holds, a folder that is read; name another one")
        inside = folder in path.parents
        check(not inside, f"lies inside {folder}, which is read; name another one")
    if not out.exists():
        return require_writable("--out", out)
    check(force, "names something that exists; name a new folder, or replace it with --force")
    # replacing a folder is safe only if it is clearly a model folder
    ours = out.is_dir() and (
        not any(out.iterdir()) or any((out / name).is_file() for name in MODEL_CONFIGS)
    )
    check(ours, "is not a model folder, so --force does not replace it; remove it by hand")


def require_space(option: str, folder: Path, needed: int) -> None:
    """Raise BadSetting unless so many bytes are free on the folder's disk."""
    parent = nearest_existing(folder)
    free = shutil.disk_usage(parent).free
    expected = (
        f"must be on a disk with {size_text(needed)} free; {parent} has {size_text(free)}; "
        "free some space, or name another folder"
    )
    require(free >= needed, option, str(folder), expected)


def require_writable(option: str, folder: Path) -> None:
    """Raise BadSetting unless a folder can be made here, by making one and removing it."""
    parent = nearest_existing(folder.absolute().parent)
    try:
        Path(mkdtemp(prefix=".featcal-", dir=parent)).rmdir()
    except OSError as error:
        reason = (error.strerror or "it cannot be used").lower()
        expected = f"must be a path that can be written ({parent}: {reason})"
        raise BadSetting(option, str(folder), expected) from None


def nearest_existing(folder: Path) -> Path:
    """Return the folder or the nearest of its parents that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def stored_bytes(folder: Path) -> int:
    """Return the bytes of a folder's weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def require_hub(name: str | None) -> None:
    """Check before any work that the hub can be reached, accepts the name and knows the user."""
    if name is None:
        return
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]
    from huggingface_hub.utils import validate_repo_id

    from featcal.data.places import first_line

    try:
        validate_repo_id(name)
        HfApi().whoami()
    except HFValidationError:
        expected = "must be owner/name: letters, digits, dots, dashes, underscores"
        raise BadSetting("--push-to-hub", name, expected) from None
    except (HTTPError, OSError) as error:  # OSError: also a machine without a token
        raise HubUnreachable(
            name,
            f"the hub cannot be reached or does not know this user ({first_line(error)})",
            "run `hf auth login` with a token that may write (or set HF_TOKEN), or",
            "run again with network access and without HF_HUB_OFFLINE, or without the push",
        ) from None


def push(folder: Path, name: str | None) -> None:
    """Upload the folder if a name is given. Raises: HubUnreachable; the folder is complete then."""
    if name is None:
        return
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    from featcal.data.places import first_line

    try:
        url = HfApi().create_repo(name, exist_ok=True)
        message = f"featcal: {folder.name}"
        HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        problem = f"{folder} is complete, but the hub did not accept it ({first_line(error)})"
        way_out = f"upload it without computing it again: hf upload {name} {folder}"
        raise HubUnreachable(name, problem, way_out) from None
    note(f"on the hub: {url}")
