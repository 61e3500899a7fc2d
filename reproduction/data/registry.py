"""The paper's twenty image tasks: where each lies on the hub, which splits are used, and how a
table's column is headed.

Sizes, prompts and class names stand elsewhere; images are read by load.py. Knows nothing of models.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Task:
    """One task. `columns`: the source's own column names -> image, label, where they differ."""

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
