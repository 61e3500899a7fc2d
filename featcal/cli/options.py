"""Options that several commands share, the keys of `--set`, and how their values are read."""

import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import yaml
from pydantic import ByteSize, PositiveInt
from typer import Option

from featcal.errors import UnknownKey
from featcal.settings import Calibration, Settings, require

if TYPE_CHECKING:
    from featcal.calibration.choose import CalibrationOrAuto
    from featcal.data.batches import Draw

S = TypeVar("S", bound=Settings)
DEFAULT_SAMPLES = 256  # of each task, to merge and to calibrate
Pairs = Iterable[str] | None  # NAME=VALUE arguments of one option

EXPERT = "An expert: a model or a LoRA adapter. Repeatable."
DATA = "Samples of a task: a folder, a file or a hub dataset; no labels needed. Repeatable."
PUSH = "Upload the written folder to this hub repository, which is created if needed."
CARD = "Add the results to the model card (README.md), as text and as the hub's model-index."
RECORDED = "Default: as recorded in the folder of the merged or calibrated model."
BASE = "Model the experts were fine-tuned from."
MODEL = {"metavar": "MODEL"}
NAMED = {"metavar": "NAME=MODEL"}
Merged = Annotated[str, Option(**MODEL, help="Merged model.")]
Base = Annotated[str | None, Option(**MODEL, help=f"{BASE} {RECORDED}")]
Experts = Annotated[list[str] | None, Option("--expert", **NAMED, help=f"{EXPERT} {RECORDED}")]
Data = Annotated[list[str], Option(metavar="NAME=PATH", help=DATA)]
COLUMN = "Column to read a key from, e.g. text=question or image=picture. Repeatable."
Column = Annotated[list[str] | None, Option("--column", metavar="KEY=COLUMN", help=COLUMN)]
CLASSES = "Classes of a task; encoders are compared by the expert's vectors of them. Repeatable."
Classes = Annotated[list[str] | None, Option(metavar="NAME=A,B,...", help=CLASSES)]
Out = Annotated[Path, Option(help="Folder to write.")]
PRESET = (
    "auto chooses settings by the answers to held-out samples; paper uses the paper's for CLIP. "
    "Default: auto; paper if a setting is given."
)
Preset = Annotated[Literal["auto", "paper"] | None, Option(help=PRESET)]
Seed = Annotated[int, Option(min=0, help="Random seed for drawing samples.")]


def usable_device(name: str) -> str:
    """Return the device of --device. Raises: BadSetting for cuda without a GPU."""
    if name == "cuda":
        from featcal.models.load import torch_device

        torch_device(name)
    return name


DEVICE = "Where to compute; auto takes the GPU if there is one."
Device = Annotated[Literal["auto", "cpu", "cuda"], Option(callback=usable_device, help=DEVICE)]
Dtype = Annotated[Literal["float32", "bfloat16"], Option(help="Precision of the models.")]
Force = Annotated[bool, Option("--force", help="Replace the model folder at --out.")]
Json = Annotated[bool, Option("--json", help="Print one JSON object instead of tables.")]
Push = Annotated[str | None, Option("--push-to-hub", metavar="OWNER/NAME", help=PUSH)]
Card = Annotated[bool, Option("--card", help=CARD)]

DATA_FORMATS = """Images, for CLIP, ViT, DINOv2 and SigLIP: a folder of images, FOLDER/train/CLASS/*.png,
FOLDER/train.parquet with a column image, or a hub dataset.

Texts, for Llama, T5, BERT and others: FILE.txt (one sample per line), FILE.jsonl, .json, .csv or
.parquet with text, messages, prompt and completion, or input and target; FOLDER/train.jsonl; or a hub dataset."""


class Sampling(Settings):
    """Keys of --set for reading samples."""

    batch: PositiveInt = 32
    split: str = "train"
    tokens: PositiveInt | None = None

    def draw(self, samples: int, seed: int, dtype: str = "float32", column: Pairs = None) -> "Draw":
        """Return which samples to draw. Raises: BadSetting for a column."""
        import torch

        from featcal.data.batches import Draw

        how: dict[str, Any] = {"dtype": getattr(torch, dtype), "columns": columns_named(column)}
        return Draw(samples, seed, self.batch, self.split, self.tokens, **how)


class SamplingAndBlocks(Sampling):
    """Keys of --set for samples, lists of blocks and a recipe with base and experts."""

    stack: tuple[str, ...] | None = None
    recipe: Path | None = None


class Running(SamplingAndBlocks):
    """Keys of --set of a calibration that are not settings of the method."""

    resume: bool = True
    work: Path | None = None
    host_memory: ByteSize | None = None


MEANINGS = {
    "ridge": "or auto: chosen for each site by halves of the samples",
    "batch": "samples per batch",
    "split": "split of the data",
    "tokens": "maximum per text, default 512 or the model's limit",
    "recipe": "mergekit YAML that names base and experts",
    "stack": "list of blocks, such as encoder.layers",
    "work": "scratch folder for activations and finished blocks, default next to --out",
    "resume": "false starts from the first block",
    "padded": "texts of a batch differ in length",
    "host_memory": "cap on cached activations in RAM, such as 8GiB; the rest goes to disk",
    "device_memory": "cap on cached activations on the GPU",
    "ranks": "processes that share the tasks",
    "modules": "linears to solve, such as q_proj,v_proj",
}


def set_option(*defaults: Settings) -> Any:
    """Return the option --set, whose help lists the keys of these settings with their defaults."""
    keys = []
    for key, value in chain(*defaults):
        default = "" if value is None else f"={str(value).lower()}"
        keys.append(key + default + (f" ({MEANINGS[key]})" if key in MEANINGS else ""))
    text = "Any other setting, also as --tokens 64; commas separate a list. Repeatable. Keys: "
    return Option("--set", metavar="KEY=VALUE", help=f"{text}{', '.join(keys)}.")


def read_set(pairs: Pairs, command: str, *defaults: S) -> tuple[Any, ...]:
    """Return the settings changed by --set. Raises: BadSetting; UnknownKey with the nearest key."""
    values: dict[str, Any] = {}
    fields = {key: field for group in defaults for key, field in type(group).model_fields.items()}
    for key, text in pairs_by_name("--set", pairs, "KEY=VALUE", "residual=1.0").items():
        if key not in fields:
            raise UnknownKey("--set", key, fields)
        annotation = str(fields[key].annotation)
        listed = "tuple" in annotation and ("," in text or "str" in annotation)
        read = os.path.expanduser if "Path" in annotation else yaml_scalar
        read = str if "str" in annotation else read
        values[key] = [read(t) for t in text.split(",")] if listed else read(text)
    changed = []
    for group in defaults:
        new = {key: value for key, value in values.items() if key in type(group).model_fields}
        changed.append(type(group).from_mapping({**dict(group), **new}, group.section or command))
    return tuple(changed)


def method_of(preset: str | None, settings: Calibration, pairs: Pairs) -> "CalibrationOrAuto":
    """Return the settings of a calibration: "auto" unless --set or --preset asks for others."""
    changed = any(pair.partition("=")[0] in Calibration.model_fields for pair in pairs or ())
    expected = "chooses every setting; leave it out, or use paper, to change some"
    require(not (preset == "auto" and changed), "--preset", preset, expected)
    return settings if changed or preset == "paper" else "auto"


def yaml_scalar(text: str) -> Any:
    """Return a value as YAML reads it, and 1e-5 as a number, which YAML takes for text."""
    try:
        value = yaml.safe_load(text)
        return float(value) if isinstance(value, str) else value
    except (ValueError, yaml.YAMLError):
        return text


def pairs_by_name(
    option: str, pairs: Pairs, form: str, example: str = "mnist=path/to/it"
) -> dict[str, str]:
    """Return `name=value` arguments as a dictionary."""
    values: dict[str, str] = {}
    for pair in pairs or ():
        name, _, value = pair.partition("=")
        expected = f"must be {form}, for example {option} {example}"
        require(bool(name and value), option, pair, expected)
        require(name not in values, option, pair, f"names {name!r} a second time; every name once")
        values[name] = value
    return values


def classes_named(pairs: Pairs, tasks: Iterable[str]) -> dict[str, list[str]]:
    """Return the `--classes` arguments by task."""
    given = pairs_by_name("--classes", pairs, "NAME=A,B,...", "reviews=bad,good")
    classes = {task: [*map(str.strip, names.split(","))] for task, names in given.items()}
    for task, names in classes.items():
        require(task in tasks, "--classes", task, f"must name a task of --data: {', '.join(tasks)}")
        expected = "must name at least two classes, each once, with commas between them"
        require(len({*names} - {""}) == len(names) > 1, "--classes", given[task], expected)
    return classes


def columns_named(pairs: Pairs) -> dict[str, str]:
    """Return the `--column` arguments."""
    columns = pairs_by_name("--column", pairs, "KEY=COLUMN", "text=question")
    keys = ("text", "prompt", "completion", "input", "target", "messages", "image", "label")
    for key in columns:
        require(key in keys, "--column", key, f"must begin with one of {', '.join(keys)}")
    return columns
