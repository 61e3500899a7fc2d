"""The paper's twenty image tasks: their data sets on the hub, splits, class names and prompts."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from featcal.errors import UnknownKey


@dataclass(frozen=True)
class Task:
    """One task. columns: the source's names of image and label, where they differ."""

    key: str
    column: str  # heading in the paper's tables
    hub_id: str
    config: str | None = None
    train_split: str = "train"
    test_split: str = "test"
    columns: Mapping[str, str] = field(default_factory=dict)


_FER_COLUMNS = {"jpg": "image", "cls": "label"}  # a webdataset, named by file suffix

TASKS = {
    task.key: task
    for task in (
        Task("sun397", "SUN397", "tanganke/sun397"),
        Task("stanford-cars", "Cars", "tanganke/stanford_cars"),
        Task("resisc45", "RESISC45", "tanganke/resisc45"),
        Task("eurosat", "EuroSAT", "tanganke/eurosat"),
        Task("svhn", "SVHN", "ufldl-stanford/svhn", config="cropped_digits"),
        Task("gtsrb", "GTSRB", "tanganke/gtsrb"),
        Task("mnist", "MNIST", "ylecun/mnist"),
        Task("dtd", "DTD", "tanganke/dtd"),
        Task("oxford_flowers102", "Flowers", "dpdl-benchmark/oxford_flowers102"),
        Task("pcam", "PCAM", "1aurent/PatchCamelyon"),
        Task("fer2013", "FER", "clip-benchmark/wds_fer2013", columns=_FER_COLUMNS),
        Task("oxford-iiit-pet", "Pets", "timm/oxford-iiit-pet"),
        Task("stl10", "STL10", "tanganke/stl10"),
        Task("cifar100", "C100", "tanganke/cifar100"),
        Task("cifar10", "C10", "tanganke/cifar10"),
        Task("food101", "Food", "ethz/food101", test_split="validation"),  # has no test split
        Task("fashion_mnist", "F-MNIST", "zalando-datasets/fashion_mnist"),
        Task("emnist_letters", "EMNIST", "tanganke/emnist_letters"),
        Task("kmnist", "KMNIST", "tanganke/kmnist"),
        Task("rendered-sst2", "Rendered", "nateraw/rendered-sst2"),
    )
}

POOLS: dict[int, tuple[str, ...]] = {size: tuple(TASKS)[:size] for size in (8, 14, 20)}


@dataclass(frozen=True)
class Prompts:
    """Classes in the order of their labels, and templates with {} for the class."""

    classes: tuple[str, ...]
    templates: tuple[str, ...]


def load_prompts(task: str) -> Prompts:
    """Return what the published experts of a task were trained with, to the letter.

    Underscores and misspellings stay: another spelling is another text feature. Raises: UnknownKey.
    """
    known = _all_prompts()
    if task not in known:
        raise UnknownKey("task", task, list(known))
    return Prompts(tuple(known[task]["classes"]), tuple(known[task]["templates"]))


@cache
def _all_prompts() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        files("reproduction.prepare").joinpath("prompts.json").read_text("utf-8")
    )
    return content
