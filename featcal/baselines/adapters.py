"""Adapters of a merged model, one per task: application, and their folder on disk.

n rows (images or tokens) · d width of a feature. The folder holds all tasks' weights in one
safetensors file, settings and loss curves as JSON, and a card; two equal runs write the same bytes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save
from torch import Tensor, nn

from featcal.card import render_card, round_digits, write_card
from featcal.errors import BadData, BadFile, BadPlan, MissingPath, MissingTensor, UnknownKey
from featcal.files import atomic_folder, read_json, write_json
from featcal.models.batch import output_embeddings, unit_length
from featcal.models.checkpoint import read_safetensors
from featcal.models.load import require_replaceable
from featcal.settings import Settings, require

Weights = Mapping[str, Tensor]  # by name, of one task or stacked for all tasks
Progress = Callable[[str], None] | None
Audit = Mapping[int, Callable[["Adapters"], object]] | None  # called after that many steps
WEIGHTS, RECORD = "adapters.safetensors", "adapters.json"
KINDS = {"method": str, "settings": dict, "seed": int, "width": int, "tasks": list, "loss": dict}
TRAIN_AGAIN = "train the adapters again"
OWN_MODEL = "use adapters with the model they were trained for; see rank and width in adapters.json"
NOTE = (
    "These adapters correct features of one merged model. **They need the task's identity at test"
    " time**: each\ntask has its own adapter, and nothing here recognises the task of an image or"
    " text. The merged model alone\ndoes not need it."
)


@dataclass(frozen=True)
class Pair:
    """Features (rows, d) of the same samples by two models; `sizes` are the rows of each sample."""

    merged: Tensor
    expert: Tensor
    sizes: Tensor

    def of(self, samples: Tensor) -> "Pair":
        """Return the samples with these indices, in this order."""
        rows = samples
        if len(self.sizes) != len(self.merged):  # texts
            ends = self.sizes.cumsum(0)
            spans = zip((ends - self.sizes)[samples].tolist(), ends[samples].tolist(), strict=True)
            rows = torch.cat([torch.arange(start, end) for start, end in spans])
        rows = rows.to(self.merged.device)
        return Pair(self.merged[rows], self.expert[rows], self.sizes[samples])


class Baseline(Settings):
    """Settings and formula of a baseline: `features`, `shapes`, `correction` and `fit`.

    `public` makes a function of a class under `@baseline`: same docstring, fields as keywords.
    """

    name: ClassVar[str]
    title: ClassVar[str]

    def prepared(self, features: Tensor) -> Tensor:
        """Return features in float32 or wider, divided by their norm if `features` is "unit"."""
        exact = features if features.dtype == torch.float64 else features.float()
        return unit_length(exact) if self.features == "unit" else exact


BASELINES: dict[str, type[Baseline]] = {}


def baseline(name: str, title: str) -> Callable[[type[Baseline]], type[Baseline]]:
    """Register a class under the name that folders and messages have for it."""

    def register(kind: type[Baseline]) -> type[Baseline]:
        kind.name = kind.section = name
        kind.title = title
        BASELINES[name] = kind
        return kind

    return register


@dataclass(frozen=True)
class Adapters:
    """One adapter per task: weights by task and name on the CPU, and the loss of each step."""

    settings: Baseline
    seed: int
    weights: Mapping[str, Weights]
    losses: Mapping[str, list[float]] = field(default_factory=dict)

    @property
    def tasks(self) -> list[str]:
        """Return the names of the tasks."""
        return list(self.weights)

    @property
    def width(self) -> int:
        """Return d, the width of the corrected features."""
        return int(next(iter(next(iter(self.weights.values())).values())).shape[1])

    def of(self, task: str) -> Weights:
        """Return the weights of one task. Raises: UnknownKey with the nearest task."""
        if task not in self.weights:
            raise UnknownKey("adapters", task, self.tasks)
        return self.weights[task]

    def apply(self, task: str, features: Tensor) -> Tensor:
        """Return the merged model's features (…, d), corrected. Raises: UnknownKey, BadData."""
        weights = {name: weight.to(features) for name, weight in self.of(task).items()}
        if features.shape[-1] != self.width:
            problem = f"their width is {features.shape[-1]}, but {self.width} is expected"
            raise BadData(f"features of {task}", problem, OWN_MODEL)
        rows = unit_length(features) if self.settings.features == "unit" else features
        return rows - self.settings.correction(weights, rows)

    @contextmanager
    def before_head(self, model: nn.Module, task: str) -> Iterator[None]:
        """Correct the hidden states that the model's language head receives, inside the `with`."""
        head = output_embeddings(model)
        if head is None:
            way_out = "apply the adapter to its features: adapters.apply(...)"
            raise BadPlan(type(model).__name__, "has no language head", way_out)
        key, kind = f"{self.settings.name}.features", self.settings.features
        require(kind == "raw", key, kind, "must be raw for a language model")
        self.of(task)

        def correct(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (self.apply(task, args[0]), *args[1:])

        with head.register_forward_pre_hook(correct):
            yield

    def save(self, folder: str | Path) -> Path:
        """Write weights, record and README.md, all or nothing. Raises: BadFile, DiskFull."""
        require_replaceable(Path(folder), RECORD)
        tensors = dict[str, Tensor]()
        for task, weights in self.weights.items():
            tensors |= {f"{task}/{name}": weight.contiguous() for name, weight in weights.items()}
        losses = {task: [*map(round_digits, curve)] for task, curve in self.losses.items()}
        record = {"method": self.settings.name, "settings": self.settings.model_dump()}
        record |= {"seed": self.seed, "width": self.width, "tasks": self.tasks}
        record |= {"needs_task_identity": True, "loss": losses}
        rows = [*dict(self.settings).items(), ("seed", self.seed), ("width", self.width)]
        front = {"library_name": "featcal", "tags": ["featcal"]}
        ends = [[task, f"{c[0]:.5f}", f"{c[-1]:.5f}"] for task, c in self.losses.items()]
        card = render_card(f"{self.settings.title} adapters", NOTE, {}, rows, front, losses=ends)
        with atomic_folder(folder, sum(tensor.nbytes for tensor in tensors.values())) as hidden:
            # save_file would let only its owner read it
            (hidden / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
            write_json(hidden / RECORD, record)
            write_card(hidden, card)
        return Path(folder)

    @classmethod
    def load(cls, folder: str | Path) -> "Adapters":
        """Read a folder that `save` wrote, on the CPU. Raises: MissingPath, BadFile, BadSetting,
        UnknownKey; TruncatedFile, MissingTensor, NotFinite for the weights.
        """
        path, file = Path(folder) / RECORD, Path(folder) / WEIGHTS
        needs = {path.parent: "a folder of adapters", file: "the weights of the adapters"}
        for needed, content in needs.items():
            if not needed.exists():
                raise MissingPath(needed, content, TRAIN_AGAIN)
        record = read_json(path)
        for key, kind in KINDS.items():
            if not isinstance(record, dict) or not isinstance(record.get(key), kind):
                raise BadFile(path, f"{key} is missing or not a {kind.__name__}", TRAIN_AGAIN)
        import_module("featcal.baselines.corrections")  # registers the library's own
        name = record["method"]
        if name not in BASELINES:
            raise BadFile(path, f"method is {name!r}", f"the methods are {', '.join(BASELINES)}")
        settings = BASELINES[name].from_mapping(record["settings"], str(path))
        shapes, weights = settings.shapes(record["width"]), dict[str, dict[str, Tensor]]()
        tensors = read_safetensors(file)
        for task, part in product(record["tasks"], shapes):
            name, shape = f"{task}/{part}", shapes[part]
            if name not in tensors:
                raise MissingTensor(file, name, tensors)
            if tuple(tensors[name].shape) != shape:
                problem = f"{name} is {tuple(tensors[name].shape)}, but {shape} is expected"
                raise BadFile(file, problem, OWN_MODEL)
            weights.setdefault(task, {})[part] = tensors[name]
        return cls(settings, record["seed"], weights, record["loss"])
