"""Adapters as a folder: the weights of every task in one safetensors file, settings and loss curves as JSON, a card to read.

Holds nothing that varies between two runs.
"""

from collections.abc import Mapping
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from featcal.baselines.adapters import Adapters
from featcal.baselines.corrections import correction_of
from featcal.baselines.settings import AdapterMethod, MeanShift, ProbSurgery, Surgery
from featcal.errors import AdapterMisfit, BadFile, MissingPath, MissingTensor, NotFinite, TruncatedFile
from featcal.settings import from_mapping
from featcal.storage.atomic import atomic_folder
from featcal.storage.results import read_json, write_json

WEIGHTS, RECORD, CARD = "adapters.safetensors", "adapters.json", "README.md"
METHODS: dict[str, type[AdapterMethod]] = {"surgery": Surgery, "prob_surgery": ProbSurgery, "mean_shift": MeanShift}
TITLES = {"surgery": "Representation Surgery", "prob_surgery": "ProbSurgery", "mean_shift": "Mean shift"}
DIGITS = 6  # of a loss; beyond them the rounding of the machine shows
NOTE = (
    "These adapters correct the last feature of one merged model. **They need the task's identity at test time**: every task\n"
    "has its own, and nothing here tells which task a picture or text belongs to. The merged model alone does not need it."
)


def write_adapters(adapters: Adapters, folder: str | Path) -> Path:
    """The folder of adapters; it appears complete or not at all. Raises: DiskFull."""
    tensors = {f"{task}/{name}": w.contiguous() for task, named in adapters.weights.items() for name, w in named.items()}
    with atomic_folder(folder, sum(tensor.nbytes for tensor in tensors.values())) as hidden:
        save_file(tensors, hidden / WEIGHTS, metadata={"format": "pt"})
        write_json(hidden / RECORD, record(adapters))
        (hidden / CARD).write_text(card(adapters), encoding="utf-8", newline="\n")
    return Path(folder)


def record(adapters: Adapters) -> dict[str, Any]:
    """What adapters.json holds."""
    losses = {task: [float(f"{loss:.{DIGITS}g}") for loss in curve] for task, curve in adapters.losses.items()}
    return {
        "method": adapters.settings.name,
        "settings": asdict(adapters.settings),
        "seed": adapters.seed,
        "width": adapters.width,
        "tasks": adapters.tasks,
        "needs_task_identity": True,
        "loss": losses,
    }


def card(adapters: Adapters) -> str:
    """README.md of the folder."""
    lines = [f"# {TITLES[adapters.settings.name]} adapters", "", NOTE, "", "| setting | value |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in {**asdict(adapters.settings), "seed": adapters.seed}.items()]
    lines += [f"| width of the features | {adapters.width} |"]
    if adapters.losses:
        lines += ["", "| task | loss at the first step | at the last |", "|---|---|---|"]
    lines += [f"| {task} | {curve[0]:.5f} | {curve[-1]:.5f} |" for task, curve in adapters.losses.items()]
    return "\n".join([*lines, ""])


def read_adapters(folder: str | Path) -> Adapters:
    """What write_adapters wrote, on the CPU.

    Raises: MissingPath, BadFile, BadSetting, UnknownKey for the record; for the weights TruncatedFile, MissingTensor,
    AdapterMisfit, NotFinite, naming file and tensor.
    """
    path, again = Path(folder) / RECORD, "train the adapters again"
    if not Path(folder).is_dir():
        raise MissingPath(folder, "a folder of adapters", again)
    content = read_json(path)
    wanted = {"method": str, "settings": dict, "seed": int, "width": int, "tasks": list, "loss": dict}
    for key, kind in wanted.items():
        if not isinstance(content, dict) or not isinstance(content.get(key), kind):
            raise BadFile(path, f"{key} is missing or not a {kind.__name__}", again)
    if content["method"] not in METHODS:
        raise BadFile(path, f"method is {content['method']!r}", f"the methods are {', '.join(METHODS)}")
    settings = from_mapping(METHODS[content["method"]], content["settings"], str(path))
    tensors = checked(Path(folder) / WEIGHTS, content["tasks"], correction_of(settings).shapes(content["width"]))
    weights = {
        task: {name: tensors[f"{task}/{name}"] for name in correction_of(settings).shapes(content["width"])}
        for task in content["tasks"]
    }
    return Adapters(settings, content["seed"], weights, content["loss"])


def checked(path: Path, tasks: list[str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors of a file, each there, of its shape, and finite."""
    if not path.is_file():
        raise MissingPath(path, "the weights of the adapters", "train the adapters again")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise TruncatedFile(path, error) from None
    for name, shape in ((f"{task}/{part}", shape) for task in tasks for part, shape in shapes.items()):
        if name not in tensors:
            raise MissingTensor(path, name, get_close_matches(name, tensors, n=3, cutoff=0.0))
        if tuple(tensors[name].shape) != shape:
            raise AdapterMisfit(path, name, tuple(tensors[name].shape), shape)
        if not torch.isfinite(tensors[name]).all():
            raise NotFinite(path, name)
    return tensors
