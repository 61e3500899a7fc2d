"""mergekit's recipes, read: which models went into a merge and which of them is the base. mergekit
itself is not needed.

Only what calibration asks of a recipe is checked here; paths are not looked for, and nothing is
downloaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from featcal.errors import BadFile, MissingPath

WRITTEN = "mergekit_config.yml"  # the recipe that mergekit lays beside what it has merged
KEYS = ("merge_method", "base_model", "models", "slices", "modules", "parameters", "dtype", "out_dtype", "tokenizer_source",
        "tokenizer", "chat_template")  # fmt: skip
# "base_model" of these is one of the models that are merged, not what they were fine-tuned from
BASE_IS_MERGED = ("slerp", "arcee_fusion", "nearswap")
OWN_BLOCKS = "calibration wants whole models with the same blocks; where this merge is one, name them with --base and --expert"


@dataclass(frozen=True)
class Reference:
    """A model as recipes write it: PATH[@REVISION], or that and +PATH[@REVISION] for a LoRA on top
    of it.
    """

    path: str
    revision: str | None = None
    lora: "Reference | None" = None

    @property
    def name(self) -> str:
        """The last part of its path, of the LoRA's where there is one."""
        return self.lora.name if self.lora else Path(self.path).name

    def __str__(self) -> str:
        return (
            self.path
            + (f"@{self.revision}" if self.revision else "")
            + (f"+{self.lora}" if self.lora else "")
        )


@dataclass(frozen=True)
class Recipe:
    """A merge of whole models.

    base:       what the experts were fine-tuned from; None where the recipe does not tell.
    experts:    the merged models without the base.  settings: of each expert, in the same order.
    parameters: of the method.  asked: the whole recipe.  base_listed: whether the base is among its
    models.
    unknown:    keys that mergekit does not have, and therefore ignores, with the nearest one it
                has.
    """

    file: Path
    method: str
    base: Reference | None
    experts: tuple[Reference, ...]
    settings: tuple[Mapping[str, Any], ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)
    base_listed: bool = False
    unknown: Mapping[str, str | None] = field(default_factory=dict)


def beside_merged(folder: Path) -> Path | None:
    """The recipe that lies in a merged folder, if one does."""
    return folder / WRITTEN if (folder / WRITTEN).is_file() else None


def read_recipe(file: Path) -> Recipe:
    """The recipe of a YAML file.

    Slices that cover whole models, in order and alike for all, are those models; so is a merge of
    the one module "default".
    Raises: MissingPath; BadFile for what is no recipe, for models put together of other slices or
    modules, and for one without experts.
    """
    content = _whole_models(file, _mapping(file))
    unknown = {
        str(key): next(iter(get_close_matches(str(key), KEYS, n=1)), None)
        for key in content
        if key not in KEYS
    }
    method = content.get("merge_method")
    if not isinstance(method, str):
        way_out = f"give the YAML file that mergekit-yaml was given, or its {WRITTEN}"
        raise BadFile(file, f"no merge_method{hint(unknown, 'merge_method')}", way_out)
    if method == "passthrough":
        raise BadFile(file, "its merge_method, passthrough, merges nothing", OWN_BLOCKS)
    base = _reference(file, content["base_model"]) if content.get("base_model") else None
    listed = [_entry(file, entry) for entry in _listed(file, content, unknown)]
    if method in BASE_IS_MERGED and base is not None:
        listed, base = [(base, {}), *(entry for entry in listed if entry[0] != base)], None
    experts = {model: settings for model, settings in listed if model != base}
    if not experts:
        raise BadFile(
            file, "merges no model beside its base", "list the fine-tuned models under models"
        )
    told = content.get("parameters") or {}, content, base in [model for model, _ in listed]
    return Recipe(file, method, base, tuple(experts), tuple(experts.values()), *told, unknown)


def hint(unknown: Mapping[str, str | None], wanted: str) -> str:
    """Words for a message that `wanted` is missing, where a key that is not known looks like it."""
    return next(
        (f" (its key {key!r} is not known)" for key, near in unknown.items() if near == wanted), ""
    )


def _mapping(file: Path) -> Mapping[str, Any]:
    if file.is_dir():
        raise BadFile(
            file, "a folder, not a recipe", f"give the YAML file, such as merged/{WRITTEN}"
        )
    if not file.is_file():
        raise MissingPath(file, "mergekit's recipe", "check the path")
    try:
        content = yaml.safe_load(file.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadFile(
            file,
            f"not one YAML document ({' '.join(str(error).split())})",
            "give one recipe of mergekit",
        ) from None
    if not isinstance(content, Mapping):
        raise BadFile(
            file,
            "not a mapping of settings",
            "give a recipe of mergekit: merge_method, base_model, models",
        )
    return content


def _whole_models(file: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The recipe with a list of models, where it tells the same with slices or as a module. Raises:
    BadFile.
    """
    modules = content.get("modules")
    if modules:
        default = (
            modules.get("default") if isinstance(modules, Mapping) and len(modules) == 1 else None
        )
        if not isinstance(default, Mapping):
            raise BadFile(file, "puts the model together of modules", OWN_BLOCKS)
        parameters = {**(content.get("parameters") or {}), **(default.get("parameters") or {})}
        outer = {key: value for key, value in content.items() if key != "modules"}
        content = (
            outer
            | {key: default[key] for key in ("models", "slices") if default.get(key)}
            | {"parameters": parameters}
        )
    slices = content.get("slices")
    if not slices:
        return content
    models: dict[str, dict[str, Any]] = {}
    end, first = 0, None
    for one in slices if isinstance(slices, list) else [None]:
        sources = one.get("sources") if isinstance(one, Mapping) else None
        if (
            not isinstance(sources, list)
            or not all(isinstance(s, Mapping) and "model" in s for s in sources)
            or not sources
        ):
            raise BadFile(
                file,
                f"puts the model together of slices, of which {one!r} names no sources",
                OWN_BLOCKS,
            )
        ranges = {tuple(source.get("layer_range") or ()) for source in sources}
        names = sorted(str(_reference(file, source["model"])) for source in sources)
        (layers,) = ranges if len(ranges) == 1 else [()]
        whole = (
            len(layers) == 2
            and layers[0] == end
            and first in (None, names)
            and len(set(names)) == len(names)
        )
        if (
            not whole
            or one.get("base_model") not in (None, content.get("base_model"))
            or one.get("residual_weight")
        ):
            raise BadFile(
                file,
                f"puts the model together of slices that are no whole models ({', '.join(names)})",
                OWN_BLOCKS,
            )
        end, first = layers[1], names
        for source in sources:
            own = {**(one.get("parameters") or {}), **(source.get("parameters") or {})}
            entry = models.setdefault(
                str(_reference(file, source["model"])),
                {"model": source["model"], "parameters": own},
            )
            for key in {*own, *entry["parameters"]}:  # a value for each slice is not one number
                if own.get(key) != entry["parameters"].get(key):
                    entry["parameters"][key] = [entry["parameters"].get(key), own.get(key)]
    return {key: value for key, value in content.items() if key != "slices"} | {
        "models": list(models.values())
    }


def _listed(file: Path, content: Mapping[str, Any], unknown: Mapping[str, str | None]) -> list[Any]:
    models = content.get("models")
    if not isinstance(models, list) or not models:
        raise BadFile(
            file,
            f"no list of models{hint(unknown, 'models')}",
            "list the fine-tuned models under models, each as `- model: PATH`",
        )
    return models


def _entry(file: Path, entry: Any) -> tuple[Reference, Mapping[str, Any]]:
    if not isinstance(entry, Mapping) or "model" not in entry:
        raise BadFile(
            file, f"{entry!r} under models names no model", "write each as `- model: PATH`"
        )
    return _reference(file, entry["model"]), entry.get("parameters") or {}


def _reference(file: Path, written: Any) -> Reference:
    """PATH[@REVISION][+PATH[@REVISION]], or the mapping that mergekit writes for paths with
    blanks.
    """
    if isinstance(written, Mapping):
        lora = _reference(file, written["lora"]) if written.get("lora") else None
        inner = written.get("model", written)
        if isinstance(inner, Mapping):
            path, revision = inner.get("path"), inner.get("revision")
        else:
            given = _reference(file, inner)
            path, revision, lora = given.path, given.revision, lora or given.lora
        if isinstance(path, str) and path:
            return Reference(path, revision, lora)
    elif isinstance(written, str) and written.count("+") <= 1:
        parts = [part.partition("@") for part in written.split("+")]
        if all(
            path and "@" not in revision and bool(at) == bool(revision)
            for path, at, revision in parts
        ):
            model, *loras = [Reference(path, revision or None) for path, _, revision in parts]
            return Reference(model.path, model.revision, loras[0] if loras else None)
    raise BadFile(
        file,
        f"{written!r} names no model",
        "write PATH, PATH@REVISION, or PATH+LORA for a LoRA on top of a model",
    )
