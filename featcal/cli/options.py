"""Options that several commands share, and the keys of `--set`."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import yaml
from pydantic import PositiveInt
from typer import Option

from featcal.cli.folders import existing_folder
from featcal.errors import UnknownKey
from featcal.settings import Calibration, Settings, require

if TYPE_CHECKING:
    import torch

    from featcal.data.batches import Draw
    from featcal.data.places import Location

S = TypeVar("S", bound=Settings)

EXPERT = "Folder of an expert, a model or a LoRA adapter. Repeatable."
DATA = "Samples of a task: a folder, a file or a dataset of the hub; no labels needed. Repeatable."
DEVICE = "cpu, cuda, or auto: the GPU if there is one."
HOST_MEMORY = "Cap on cached activations in RAM, e.g. 8GiB; the rest goes to disk. Default: no cap."

Merged = Annotated[Path, Option(help="Folder of the merged model.")]
Base = Annotated[
    Path | None,
    Option(help="Folder of the model the experts were fine-tuned from. Default: the recipe's."),
]
Experts = Annotated[list[str], Option(metavar="NAME=FOLDER", help=EXPERT)]
RecipeExperts = Annotated[
    list[str] | None,
    Option("--expert", metavar="NAME=FOLDER", help=f"{EXPERT} Default: the recipe's."),
]
Data = Annotated[list[str], Option(metavar="NAME=PATH", help=DATA)]
Out = Annotated[Path, Option(help="Folder to write.")]
Preset = Annotated[
    str, Option(help="paper: its settings for CLIP. best: beyond the paper, by validation.")
]
Samples = Annotated[int, Option(min=1, help="Samples per task.")]
Seed = Annotated[int, Option(min=0, help="Seed of the choice of samples.")]
Device = Annotated[str, Option(help=DEVICE)]
Dtype = Annotated[str, Option(help="Precision of the models: float32 or bfloat16.")]
HostMemory = Annotated[str, Option(metavar="SIZE", help=HOST_MEMORY)]
Force = Annotated[bool, Option("--force", help="Replace the model folder that --out names.")]
Template = Annotated[
    list[str] | None, Option(help="Prompt with {} for the class name. Repeatable.")
]

PICTURES = (
    "Pictures, for CLIP, ViT, DINOv2 and SigLIP: a folder of pictures, FOLDER/train/CLASS/*.png, "
    "FOLDER/train.parquet with a column image, or a dataset of the hub."
)
TEXTS = (
    "Texts, for Llama, T5, BERT and others: FILE.txt (a sample per line), FILE.jsonl or "
    "FILE.parquet with text, messages, prompt and completion, or input and target, a folder that "
    "holds train.jsonl, or a dataset of the hub."
)


class Sampling(Settings):
    """Keys of --set that say how samples are read."""

    batch: PositiveInt = 32
    split: str = "train"
    tokens: PositiveInt | None = None

    def draw(self, samples: int, seed: int, dtype: str = "float32", skip: int = 0) -> "Draw":
        """Return which samples to draw. Raises: BadSetting for the dtype."""
        from featcal.data.batches import Draw

        precision = dtype_named(dtype)
        return Draw(samples, seed, self.batch, self.split, self.tokens, precision, skip)


class SamplingAndBlocks(Sampling):
    """The same, and which lists of blocks there are."""

    stack: tuple[str, ...] | None = None


class Running(SamplingAndBlocks):
    """Keys of --set of a calibration that are not settings of the method."""

    recipe: Path | None = None
    resume: bool = True


MEANINGS = {
    "batch": "samples in memory at a time",
    "split": "split of the data",
    "tokens": "maximum tokens per text, by default 512 or the model's limit",
    "recipe": "mergekit YAML with base and experts, by default mergekit_config.yml of the merged "
    "folder",
    "stack": "list of blocks, such as encoder.layers",
    "resume": "false starts from the first block",
    "padded": "texts of a batch differ in length",
    "device_memory": "cap on cached activations on the GPU",
    "ranks": "processes that share the tasks",
    "modules": "linears to solve, such as q_proj,v_proj",
}


def keys_of_set(*defaults: Settings) -> list[str]:
    """Return the keys of --set: fields of these settings without an option of their own."""
    own = ("ridge", "anchor_blend", "interpolation")
    return [key for one in defaults for key in type(one).model_fields if key not in own]


def set_option(*defaults: Settings) -> Any:
    """Return the option --set, whose help lists the keys of these settings with their defaults."""
    values = {key: value for one in defaults for key, value in one}
    keys = ", ".join(
        key
        + ("" if values[key] is None else f"={str(values[key]).lower()}")
        + (f" ({MEANINGS[key]})" if key in MEANINGS else "")
        for key in keys_of_set(*defaults)
    )
    text = f"Any other setting; lists with commas. Repeatable. Keys: {keys}."
    return Option("--set", metavar="KEY=VALUE", help=text)


def set_values(pairs: Iterable[str] | None, *defaults: Settings) -> dict[str, Any]:
    """Return the values of --set by key. Raises: BadSetting; UnknownKey with the nearest key."""
    values = {}
    for key, text in pairs_by_name("--set", pairs or (), "KEY=VALUE", "residual=1.0").items():
        known = keys_of_set(*defaults)
        if key not in known:
            raise UnknownKey("--set", key, known)
        kind = next(type(one) for one in defaults if key in type(one).model_fields)
        annotation = str(kind.model_fields[key].annotation)
        value = yaml_scalar(text)
        if "tuple" in annotation and "str" in annotation and isinstance(value, str):
            value = value.split(",")
        elif "tuple" in annotation and "," in text and isinstance(value, str):
            value = [yaml_scalar(part) for part in text.split(",")]
        values[key] = value
    return values


def yaml_scalar(text: str) -> Any:
    """Return a value as YAML reads it, and 1e-5 as a number, which YAML takes for text."""
    try:
        value = yaml.safe_load(text)
        return float(value) if isinstance(value, str) else value
    except (ValueError, yaml.YAMLError):
        return text


def changed(defaults: S, values: Mapping[str, Any], command: str) -> S:
    """Return settings with those of the values that are theirs. Raises: BadSetting."""
    own = {key: value for key, value in values.items() if key in type(defaults).model_fields}
    return type(defaults).from_mapping({**dict(defaults), **own}, command)


def calibration_settings(
    preset: str, values: Mapping[str, Any], **options: float | None
) -> Calibration:
    """Return a preset changed by --set and by options of their own. Raises: BadSetting."""
    own = {key: value for key, value in values.items() if key in Calibration.model_fields}
    given = {key: value for key, value in options.items() if value is not None}
    return Calibration.preset(preset, own | given)


def pairs_by_name(
    option: str, pairs: Iterable[str], form: str, example: str = "mnist=path/to/it"
) -> dict[str, str]:
    """Return `name=value` arguments as a dictionary.

    Raises: BadSetting for another form or a repeated name.
    """
    values: dict[str, str] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        expected = f"must be {form}, for example {option} {example}"
        require(bool(name and value), option, pair, expected)
        require(name not in values, option, pair, f"names {name!r} a second time; every name once")
        values[name] = value
    return values


def named_folders(option: str, pairs: Iterable[str]) -> dict[str, Path]:
    """Return `name=FOLDER` arguments. Raises: BadSetting; MissingPath."""
    folders = pairs_by_name(option, pairs, "NAME=FOLDER")
    return {name: existing_folder(option, Path(folder)) for name, folder in folders.items()}


def named_data(pairs: Iterable[str] | None) -> "dict[str, Location]":
    """Return the `--data` arguments: files, folders or datasets of the hub.

    Raises: BadSetting; MissingPath.
    """
    from featcal.data.places import location_of

    paths = pairs_by_name("--data", pairs or (), "NAME=PATH")
    return {name: location_of("--data", path) for name, path in paths.items()}


def local_paths(data: "Mapping[str, Location]") -> list[Path]:
    """Return the files and folders among the data."""
    return [one.source for one in data.values() if isinstance(one.source, Path)]


def require_prompts(templates: Sequence[str]) -> None:
    """Raise BadSetting for a template without {}."""
    for prompt in templates:
        require("{}" in prompt, "--template", prompt, "must hold {} where the class name goes")


def device_named(name: str) -> "torch.device":
    """Return the device of --device. Raises: BadSetting."""
    from featcal.models.load import torch_device

    require(name in ("cpu", "cuda", "auto"), "--device", name, "must be cpu, cuda or auto")
    return torch_device(name)


def dtype_named(name: str) -> "torch.dtype":
    """Return the dtype of --dtype. Raises: BadSetting."""
    import torch

    require(name in ("float32", "bfloat16"), "--dtype", name, "must be float32 or bfloat16")
    return getattr(torch, name)
