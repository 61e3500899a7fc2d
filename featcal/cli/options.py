"""Options that several commands share, the keys of `--set`, and how their values are read."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import yaml
from pydantic import PositiveInt
from typer import CallbackParam, Option

from featcal.errors import FeatCalError, MissingPath, UnknownKey
from featcal.settings import Calibration, Settings, require

if TYPE_CHECKING:
    import torch

    from featcal.calibration.choose import Method
    from featcal.data.batches import Draw
    from featcal.data.places import Location

S = TypeVar("S", bound=Settings)
T = TypeVar("T")

CONFIGURATION = ["*.json", "*.txt", "*.model", "*.jinja", "*.yml", "README.md"]
HUB_MODEL = re.compile(r"(?P<name>(?!\.)[\w.-]+/(?!\.)[\w.-]+)(@(?P<revision>[\w./-]+))?")

EXPERT = "An expert: a model or a LoRA adapter. Repeatable."
DATA = "Samples of a task: a folder, a file or a hub dataset; no labels needed. Repeatable."
DEVICE = "cpu, cuda, or auto (the GPU if there is one)."
HOST_MEMORY = "Cap on cached activations in RAM, e.g. 8GiB; the rest goes to disk. Default: no cap."
PUSH = "Upload the written folder to this hub repository, which is created if needed."
CARD = "Add the results to the model card (README.md), as text and as the hub's model-index."


def model_folder(option: str, given: str | Path, weights: bool = True) -> Path:
    """Return a model's folder: a local one, else a repository of the hub, from the cache or the
    hub.

    weights: False if its configuration is enough.
    Raises: MissingPath; BadSetting for a file; HubUnreachable, NotOnHub.
    """
    folder = Path(given)
    expected = "names a file; give the folder that holds it"
    require(not folder.is_file(), option, str(folder), expected)
    if folder.is_dir():
        return folder
    hub = HUB_MODEL.fullmatch(str(given))
    if hub is None:
        way_out = "check the path; a model of the hub is owner/name or owner/name@revision"
        raise MissingPath(folder, f"given with {option}", way_out)
    return from_hub(hub["name"], hub["revision"], "; no folder of this name is here", weights)


def from_hub(name: str, revision: str | None, more: str, weights: bool) -> Path:
    """Return the folder of a repository in the hub's cache, after downloading what it lacks.

    more: added to the reason where the hub does not give it. Raises: HubUnreachable, NotOnHub.
    """
    from huggingface_hub import snapshot_download

    from featcal.data.places import reaching

    files = CONFIGURATION + (["*.safetensors"] if weights else [])
    with reaching(name, revision, more):
        return Path(snapshot_download(name, revision=revision, allow_patterns=files))


def folder_option(parameter: CallbackParam, given: Path | None) -> Path | None:
    """Return the folder of an option or argument, for its declaration."""
    return None if given is None else model_folder(parameter.opts[0], given)


RECORDED = "Default: as recorded in the merged folder."
BASE = "Model the experts were fine-tuned from."
MODEL = {"metavar": "MODEL"}
NAMED_MODEL = {"metavar": "NAME=MODEL"}
Merged = Annotated[str, Option(**MODEL, help="Merged model.")]
Base = Annotated[str | None, Option(**MODEL, help=f"{BASE} {RECORDED}")]
Experts = Annotated[
    list[str] | None, Option("--expert", **NAMED_MODEL, help=f"{EXPERT} {RECORDED}")
]
Data = Annotated[list[str], Option(metavar="NAME=PATH", help=DATA)]
COLUMN = "The data's name of a column, e.g. text=question or image=picture. Repeatable."
Column = Annotated[list[str] | None, Option("--column", metavar="KEY=COLUMN", help=COLUMN)]
Out = Annotated[Path, Option(help="Folder to write.")]
PRESET = (
    "auto chooses settings by answers to held-out samples; paper takes the paper's for CLIP. "
    "Default: auto, or paper if another option sets one of them."
)
Preset = Annotated[str | None, Option(help=PRESET)]
Samples = Annotated[
    int | None, Option(min=1, help="Samples per task. Default: 256, or all there are.")
]
Seed = Annotated[int, Option(min=0, help="Random seed for drawing samples.")]
Device = Annotated[str, Option(help=DEVICE)]
Dtype = Annotated[str, Option(help="Precision of the models: float32 or bfloat16.")]
HostMemory = Annotated[str, Option(metavar="SIZE", help=HOST_MEMORY)]
Force = Annotated[bool, Option("--force", help="Replace the model folder at --out.")]
Template = Annotated[
    list[str] | None, Option(metavar="PROMPT", help="Prompt with {} for the class. Repeatable.")
]
Json = Annotated[bool, Option("--json", help="Print one JSON object instead of tables.")]
Push = Annotated[str | None, Option("--push-to-hub", metavar="OWNER/NAME", help=PUSH)]
Card = Annotated[bool, Option("--card", help=CARD)]

DATA_FORMATS = """Images, for CLIP, ViT, DINOv2 and SigLIP: a folder of images,
FOLDER/train/CLASS/*.png, FOLDER/train.parquet with a column image, or a hub dataset.

Texts, for Llama, T5, BERT and others: FILE.txt (one sample per line), FILE.jsonl or FILE.parquet
with text, messages, prompt and completion, or input and target, a folder with train.jsonl, or a hub
dataset."""


class Sampling(Settings):
    """Keys of --set for reading samples."""

    batch: PositiveInt = 32
    split: str = "train"
    tokens: PositiveInt | None = None

    def draw(
        self, samples: int, seed: int, dtype: str = "float32", column: Iterable[str] | None = None
    ) -> "Draw":
        """Return which samples to draw. Raises: BadSetting for the dtype."""
        from featcal.data.batches import Draw

        how: dict[str, Any] = {"dtype": dtype_named(dtype), "columns": columns_named(column)}
        return Draw(samples, seed, self.batch, self.split, self.tokens, **how)


class SamplingAndBlocks(Sampling):
    """Keys of --set for samples, lists of blocks and a recipe with base and experts."""

    stack: tuple[str, ...] | None = None
    recipe: Path | None = None


class Running(SamplingAndBlocks):
    """Keys of --set of a calibration that are not settings of the method."""

    resume: bool = True
    work: Path | None = None


MEANINGS = {
    "batch": "samples per batch",
    "split": "split of the data",
    "tokens": "maximum per text, default 512 or the model's limit",
    "recipe": "mergekit YAML that names base and experts",
    "stack": "list of blocks, such as encoder.layers",
    "work": "scratch folder for activations and finished blocks, default next to --out",
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
    text = f"Any other setting; commas separate a list. Repeatable. Keys: {keys}."
    return Option("--set", metavar="KEY=VALUE", help=text)


def read_set(pairs: Iterable[str] | None, command: str, *defaults: S) -> tuple[Any, ...]:
    """Return the settings changed by --set. Raises: BadSetting; UnknownKey with the nearest key."""
    values: dict[str, Any] = {}
    known = keys_of_set(*defaults)
    for key, text in pairs_by_name("--set", pairs or (), "KEY=VALUE", "residual=1.0").items():
        if key not in known:
            raise UnknownKey("--set", key, known)
        kind = next(type(one) for one in defaults if key in type(one).model_fields)
        annotation = str(kind.model_fields[key].annotation)
        value = yaml_scalar(text)
        if "tuple" in annotation and isinstance(value, str):
            if "str" in annotation:
                value = value.split(",")
            elif "," in value:
                value = [yaml_scalar(part) for part in value.split(",")]
        values[key] = value
    changed = []
    for one in defaults:
        own = {key: value for key, value in values.items() if key in type(one).model_fields}
        changed.append(type(one).from_mapping({**dict(one), **own}, one.section or command))
    return tuple(changed)


def method_of(preset: str | None, settings: Calibration, changed: bool) -> "Method":
    """Return the settings of a calibration, or "auto". Raises: BadSetting."""
    require(preset in (None, "auto", "paper"), "--preset", preset, "must be auto or paper")
    expected = "chooses every setting; leave it out, or use paper, to change some"
    require(not (preset == "auto" and changed), "--preset", preset, expected)
    return settings if changed or preset == "paper" else "auto"


def changes_method(pairs: Iterable[str] | None) -> bool:
    """Return whether --set changes a setting of the method."""
    return any(pair.partition("=")[0] in Calibration.model_fields for pair in pairs or ())


def yaml_scalar(text: str) -> Any:
    """Return a value as YAML reads it, and 1e-5 as a number, which YAML takes for text."""
    try:
        value = yaml.safe_load(text)
        return float(value) if isinstance(value, str) else value
    except (ValueError, yaml.YAMLError):
        return text


def pairs_by_name(
    option: str, pairs: Iterable[str], form: str, example: str = "mnist=path/to/it"
) -> dict[str, str]:
    """Return `name=value` arguments as a dictionary."""
    values: dict[str, str] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        expected = f"must be {form}, for example {option} {example}"
        require(bool(name and value), option, pair, expected)
        require(name not in values, option, pair, f"names {name!r} a second time; every name once")
        values[name] = value
    return values


class AllAtOnce:
    """Collect the mistakes of several arguments, to report them in one message.

    A call returns what the function returns, or None after a mistake.
    """

    def __init__(self) -> None:
        self.mistakes: list[FeatCalError] = []

    def __call__(self, function: Callable[..., T], *arguments: Any) -> T | None:  # noqa: D102
        try:
            return function(*arguments)
        except FeatCalError as mistake:
            self.mistakes.append(mistake)
            return None

    def report(self) -> None:
        """Raise the mistakes, if there are any."""
        if len(self.mistakes) == 1:
            raise self.mistakes[0]
        if self.mistakes:
            raise FeatCalError("\n".join(map(str, self.mistakes)))


def named_folders(
    option: str, pairs: Iterable[str], collect: AllAtOnce, weights: bool = True
) -> dict[str, Path]:
    """Return `name=MODEL` arguments as folders, without those that have a mistake."""
    given = collect(pairs_by_name, option, pairs, "NAME=MODEL") or {}
    folders = {name: collect(model_folder, option, one, weights) for name, one in given.items()}
    return {name: folder for name, folder in folders.items() if folder is not None}


def named_data(pairs: Iterable[str], collect: AllAtOnce) -> "dict[str, Location]":
    """Return the `--data` arguments: files, folders or datasets of the hub."""
    paths = collect(pairs_by_name, "--data", pairs, "NAME=PATH") or {}
    if not paths:
        return {}
    from featcal.data.places import location_of

    data = {name: collect(location_of, "--data", path) for name, path in paths.items()}
    return {name: location for name, location in data.items() if location is not None}


def columns_named(pairs: Iterable[str] | None) -> dict[str, str]:
    """Return the `--column` arguments."""
    columns = pairs_by_name("--column", pairs or (), "KEY=COLUMN", "text=question")
    keys = ("text", "prompt", "completion", "input", "target", "messages", "image", "label")
    for key in columns:
        require(key in keys, "--column", key, f"must begin with one of {', '.join(keys)}")
    return columns


def device_named(name: str) -> "torch.device":
    """Return the device of --device. Raises: BadSetting."""
    require(name in ("cpu", "cuda", "auto"), "--device", name, "must be cpu, cuda or auto")
    from featcal.models.load import torch_device

    return torch_device(name)


def dtype_named(name: str) -> "torch.dtype":
    """Return the dtype of --dtype. Raises: BadSetting."""
    require(name in ("float32", "bfloat16"), "--dtype", name, "must be float32 or bfloat16")
    import torch

    return getattr(torch, name)
