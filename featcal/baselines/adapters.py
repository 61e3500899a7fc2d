"""Adapters, one per task: applied to features, or set before the head of a language model.

Which task a picture or text belongs to must be known at test time. d width of a feature.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featcal.baselines.corrections import Weights, correction_of
from featcal.baselines.features import output_embeddings
from featcal.baselines.settings import AdapterMethod
from featcal.errors import AdapterMisfit, BadPlan, BadSetting, UnknownKey


@dataclass(frozen=True)
class Adapters:
    """What `surgery`, `prob_surgery` and `mean_shift` return.

    settings: of the method.   seed: of every draw.   weights: by task and name, on the CPU.   losses: by task, one per step;
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

        Features are divided by their norm first where the adapters are made for such; the result is not.
        Raises: UnknownKey, AdapterMisfit.
        """
        weights = {name: weight.to(features) for name, weight in self.of(task).items()}
        if features.shape[-1] != self.width:
            raise AdapterMisfit(f"features of {task}", "their width", features.shape[-1], self.width)
        rows = unit(features) if self.settings.features == "unit" else features
        return rows - correction_of(self.settings).correction(weights, rows)

    @contextmanager
    def before_head(self, model: nn.Module, task: str) -> Iterator[None]:
        """Inside, the model's language head receives hidden states that the task's adapter has corrected.

        Raises: BadPlan for a model without such a head; BadSetting for adapters of unit-length features; UnknownKey.
        """
        head = output_embeddings(model)
        if head is None:
            raise BadPlan(type(model).__name__, "has no language head", "apply the adapter to its features: adapters.apply(...)")
        if self.settings.features == "unit":
            raise BadSetting(f"{self.settings.name}.features", "unit", "must be raw for a language model")
        self.of(task)

        def corrected(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (self.apply(task, args[0]), *args[1:])

        handle = head.register_forward_pre_hook(corrected)
        try:
            yield
        finally:
            handle.remove()

    def save(self, folder: str | Path) -> Path:
        """Write adapters.safetensors, adapters.json and README.md; the folder appears complete or not at all."""
        from featcal.baselines.adapter_folder import write_adapters

        return write_adapters(self, folder)

    @classmethod
    def load(cls, folder: str | Path) -> "Adapters":
        """What `save` wrote. Raises: MissingPath, BadFile, TruncatedFile, MissingTensor, AdapterMisfit, NotFinite."""
        from featcal.baselines.adapter_folder import read_adapters

        return read_adapters(folder)


def unit(features: Tensor) -> Tensor:
    """Rows of length one."""
    return features / torch.linalg.vector_norm(features, dim=-1, keepdim=True)
