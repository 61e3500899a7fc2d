"""Adapters, one per task: applied to features, or set before the head of a language model.

Which task a picture or text belongs to must be known at test time. d width of a feature. A folder
holds nothing that varies
between two runs: the weights of every task in one safetensors file, settings and loss curves as
JSON, a card.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from featcal.baselines.corrections import Weights, correction_of
from featcal.baselines.features import output_embeddings
from featcal.baselines.settings import (
    AdapterMethod,
    MeanShift,
    ProbSurgery,
    Surgery,
)
from featcal.card import render_card, write_card
from featcal.errors import (
    BadData,
    BadFile,
    BadPlan,
    BadSetting,
    MissingPath,
    MissingTensor,
    NotFinite,
    TruncatedFile,
    UnknownKey,
)
from featcal.files import atomic_folder, read_json, write_json

WEIGHTS, RECORD = "adapters.safetensors", "adapters.json"
TITLES: dict[type[AdapterMethod], str] = {
    Surgery: "Representation Surgery",
    ProbSurgery: "ProbSurgery",
    MeanShift: "Mean shift",
}
METHODS = {method.name: method for method in TITLES}
OWN_MODEL = "use adapters with the merged model they were trained for; rank and width stand in their adapters.json"
DIGITS = 6  # of a loss; beyond them the rounding of the machine shows
NOTE = (
    "These adapters correct features of one merged model. **They need the task's identity at test time**: every task\n"
    "has its own, and nothing here tells which task a picture or text belongs to. The merged model alone does not need it."
)


@dataclass(frozen=True)
class Adapters:
    """What `surgery`, `prob_surgery` and `mean_shift` return.

    settings: of the method.   seed: of every draw.   weights: by task and name, on the CPU.
    losses: by task, one per step;
              empty where nothing is trained.
    """

    settings: AdapterMethod
    seed: int
    weights: Mapping[str, Weights]
    losses: Mapping[str, list[float]] = field(default_factory=dict)

    @property
    def tasks(self) -> list[str]:
        return list(self.weights)

    @property
    def width(self) -> int:
        """d of the features that are corrected."""
        first = next(iter(next(iter(self.weights.values())).values()))
        return int(first.shape[1])

    def of(self, task: str) -> Weights:
        """The weights of one task. Raises: UnknownKey with the nearest task."""
        if task not in self.weights:
            raise UnknownKey("adapters", task, self.tasks)
        return self.weights[task]

    def apply(self, task: str, features: Tensor) -> Tensor:
        """The merged model's features (…, d) as the task's adapter corrects them.

        Features are divided by their norm first where the adapters are made for such; the result is
        not.
        Raises: UnknownKey; BadData for another width.
        """
        weights = {name: weight.to(features) for name, weight in self.of(task).items()}
        if features.shape[-1] != self.width:
            problem = f"their width is {features.shape[-1]}, but {self.width} is expected"
            raise BadData(f"features of {task}", problem, OWN_MODEL)
        rows = unit(features) if self.settings.features == "unit" else features
        return rows - correction_of(self.settings).correction(weights, rows)

    @contextmanager
    def before_head(self, model: nn.Module, task: str) -> Iterator[None]:
        """Inside, the model's language head receives hidden states that the task's adapter has
        corrected.

        Raises: BadPlan for a model without such a head; BadSetting for adapters of unit-length
        features; UnknownKey.
        """
        head = output_embeddings(model)
        if head is None:
            raise BadPlan(
                type(model).__name__,
                "has no language head",
                "apply the adapter to its features: adapters.apply(...)",
            )
        if self.settings.features == "unit":
            raise BadSetting(
                f"{self.settings.name}.features", "unit", "must be raw for a language model"
            )
        self.of(task)

        def corrected(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (self.apply(task, args[0]), *args[1:])

        with head.register_forward_pre_hook(corrected):
            yield

    def save(self, folder: str | Path) -> Path:
        """Write adapters.safetensors, adapters.json and README.md, all or nothing. Raises:
        DiskFull.
        """
        tensors = {
            f"{task}/{name}": w.contiguous()
            for task, named in self.weights.items()
            for name, w in named.items()
        }
        with atomic_folder(folder, sum(tensor.nbytes for tensor in tensors.values())) as hidden:
            save_file(tensors, hidden / WEIGHTS, metadata={"format": "pt"})
            write_json(hidden / RECORD, record(self))
            write_card(hidden, card(self))
        return Path(folder)

    @classmethod
    def load(cls, folder: str | Path) -> "Adapters":
        """What `save` wrote, on the CPU.

        Raises: MissingPath, BadFile, BadSetting, UnknownKey for the record; for the weights
        TruncatedFile, MissingTensor, BadFile for another shape, NotFinite, naming file and tensor.
        """
        path, again = Path(folder) / RECORD, "train the adapters again"
        if not Path(folder).is_dir():
            raise MissingPath(folder, "a folder of adapters", again)
        content = read_json(path)
        wanted = {
            "method": str,
            "settings": dict,
            "seed": int,
            "width": int,
            "tasks": list,
            "loss": dict,
        }
        for key, kind in wanted.items():
            if not isinstance(content, dict) or not isinstance(content.get(key), kind):
                raise BadFile(path, f"{key} is missing or not a {kind.__name__}", again)
        if content["method"] not in METHODS:
            raise BadFile(
                path, f"method is {content['method']!r}", f"the methods are {', '.join(METHODS)}"
            )
        settings = METHODS[content["method"]].from_mapping(content["settings"], str(path))
        shapes = correction_of(settings).shapes(content["width"])
        tensors = checked(Path(folder) / WEIGHTS, content["tasks"], shapes)
        weights = {
            task: {name: tensors[f"{task}/{name}"] for name in shapes} for task in content["tasks"]
        }
        return cls(settings, content["seed"], weights, content["loss"])


def unit(features: Tensor) -> Tensor:
    """Rows of length one."""
    return features / torch.linalg.vector_norm(features, dim=-1, keepdim=True)


def record(adapters: Adapters) -> dict[str, Any]:
    """What adapters.json holds."""
    return {
        "method": adapters.settings.name,
        "settings": adapters.settings.model_dump(),
        "seed": adapters.seed,
        "width": adapters.width,
        "tasks": adapters.tasks,
        "needs_task_identity": True,
        "loss": rounded(adapters.losses),
    }


def rounded(losses: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Losses with the digits that are the same on every machine."""
    return {task: [float(f"{loss:.{DIGITS}g}") for loss in curve] for task, curve in losses.items()}


def card(adapters: Adapters) -> str:
    """Return the text of README.md."""
    values = {**dict(adapters.settings), "seed": adapters.seed, "width": adapters.width}
    losses = [[task, f"{c[0]:.5f}", f"{c[-1]:.5f}"] for task, c in adapters.losses.items()]
    title = f"{TITLES[type(adapters.settings)]} adapters"
    front = {"library_name": "featcal", "tags": ["featcal"]}
    return render_card(title, NOTE, {}, list(values.items()), front, losses=losses)


def checked(
    path: Path, tasks: list[str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """The tensors of a file, each there, of its shape, and finite."""
    if not path.is_file():
        raise MissingPath(path, "the weights of the adapters", "train the adapters again")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise TruncatedFile(path, error) from None
    for name, shape in (
        (f"{task}/{part}", shape) for task in tasks for part, shape in shapes.items()
    ):
        if name not in tensors:
            raise MissingTensor(path, name, tensors)
        if tuple(tensors[name].shape) != shape:
            raise BadFile(
                path, f"{name} is {tuple(tensors[name].shape)}, but {shape} is expected", OWN_MODEL
            )
        if not torch.isfinite(tensors[name]).all():
            raise NotFinite(path, name)
    return tensors
