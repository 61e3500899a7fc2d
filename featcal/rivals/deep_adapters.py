"""Adapters inside a merged model, of every task behind several of its modules and of its last
feature.

d width where an adapter sits. The model itself stays as it is. Which task a sample is of must be
known at test time.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featcal.blocks.capture import hooked
from featcal.errors import BadFile
from featcal.rivals.adapters import Adapters, rounded
from featcal.rivals.corrections import Weights, correction_of
from featcal.rivals.settings import IntervMerge, SurgeryV2
from featcal.storage.atomic import atomic_folder
from featcal.storage.results import read_json, write_json

Settings = SurgeryV2 | IntervMerge
FEATURE = "feature"  # the place behind the model, of its last feature
RECORD = "places.json"


@dataclass(frozen=True)
class DeepAdapters:
    """What `surgery_v2` and `interv_merge` return.

    places: by path of a module, the adapters behind it; at "feature" those of the last feature.
    losses: by task, one per step.
    """

    places: Mapping[str, Adapters]
    losses: Mapping[str, list[float]] = field(default_factory=dict)

    def apply(self, task: str, features: Tensor) -> Tensor:
        """The last features (…, d) of a forward inside `inside`, as the task's adapter corrects
        them, if there is one.
        """
        return self.places[FEATURE].apply(task, features) if FEATURE in self.places else features

    @contextmanager
    def inside(self, model: nn.Module, task: str) -> Iterator[None]:
        """Inside, the model runs with the task's adapters in it. Raises: UnknownKey for another
        task.
        """
        own = {path: adapters.of(task) for path, adapters in self.places.items()}
        with corrected(model, next(iter(self.places.values())).settings, own):  # type: ignore[arg-type]
            yield

    def save(self, folder: str | Path) -> Path:
        """Write a folder of adapters for each place, and places.json; complete or not there at
        all.
        """
        numbered = {f"{number:02d}": path for number, path in enumerate(self.places)}
        with atomic_folder(folder) as hidden:
            for number, path in numbered.items():
                self.places[path].save(hidden / number)
            write_json(
                hidden / RECORD,
                {"places": numbered, "needs_task_identity": True, "loss": rounded(self.losses)},
            )
        return Path(folder)

    @classmethod
    def load(cls, folder: str | Path) -> "DeepAdapters":
        """What `save` wrote. Raises: MissingPath, BadFile, TruncatedFile, MissingTensor,
        NotFinite.
        """
        told = read_json(Path(folder) / RECORD)
        if not isinstance(told, dict) or not told.get("places"):
            raise BadFile(Path(folder) / RECORD, "places are missing", "train the adapters again")
        return cls(
            {path: Adapters.load(Path(folder) / number) for number, path in told["places"].items()},
            told["loss"],
        )


def hidden_of(output: Any) -> Tensor:
    """The hidden states of what a module puts out."""
    hidden: Tensor = output if isinstance(output, Tensor) else output[0]
    return hidden


@contextmanager
def corrected(
    model: nn.Module, settings: Settings, places: Mapping[str, Weights]
) -> Iterator[None]:
    """Inside, what the modules at these paths put out is corrected: every token of it, or the first
    by IntervMerge.
    """
    method = correction_of(settings)

    def change(path: str, output: Any) -> Any:
        hidden = hidden_of(output)
        weights = {name: weight.to(hidden) for name, weight in places[path].items()}
        if isinstance(settings, IntervMerge):
            first = hidden[:, :1]
            result = torch.cat([first - method.correction(weights, first), hidden[:, 1:]], dim=1)
        else:
            result = hidden - method.correction(weights, hidden)
        return result if isinstance(output, Tensor) else (result, *output[1:])

    inner = [path for path in places if path != FEATURE]
    handles = [
        model.get_submodule(path).register_forward_hook(lambda _m, _a, out, p=path: change(p, out))
        for path in inner
    ]
    with hooked(handles):
        yield
