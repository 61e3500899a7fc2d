"""Adapters inside a merged model, trained with gradients through it: SurgeryV2 and IntervMerge.

n samples · d width where an adapter sits · r rank. Every task has its own adapters, so its identity
must be known at test time; the model itself stays as it is.

SurgeryV2 corrects every token after every block, and the last feature: z' = z − U relu(D z). Adam
lowers Σ_l |mean over tokens of z'_l − that of the expert|₁ + |f' − f_t|₁.
Source: Yang et al., SurgeryV2, 2024 (arXiv 2410.14389); EnnengYang/SurgeryV2, src/merging_model.py
and main_tv_surgery_v2.py.

IntervMerge moves the first token of every attention's output before it is added to the residual
stream: h' = h + Vᵀ (W h + b − V h − c). Adam lowers |f' − f_t|₁. The first token is the class token
of CLIP and BERT; through it a mean over tokens is reached too.
Source: Osial et al., Parameter-Efficient Interventions for Enhanced Model Merging, SDM 2025 (arXiv
2412.17023); MarcinOsial/IntervMerge, src/main_intervmerge.py, src/models/loreft_models.py. That
script lists each parameter three times, so its Adam steps three times per gradient, as here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from featcal.baselines.adapters import Weights
from featcal.baselines.training import as_module, batch_order, samples_of
from featcal.core import generator
from featcal.core.precision import exact_products
from featcal.errors import BadPlan, Diverged
from featcal.models.batch import (
    Batch,
    Head,
    Model,
    naming,
    output_embeddings,
    padding_mask,
    projected,
    token_mean,
)
from featcal.models.blocks import first_inputs, output_hooks, residual_streams, step
from featcal.models.load import evaluation_mode
from featcal.models.modules import solved_modules
from featcal.models.plan import Stack, blocks_of, plan_for
from featcal.settings import require
from reproduction.field.settings import IntervMerge, SurgeryV2

InnerSettings = SurgeryV2 | IntervMerge
FEATURE = "feature"  # key of the last feature, next to the paths of modules
FILE = "adapters.safetensors"


@dataclass(frozen=True)
class InnerAdapters:
    """Adapters by task, then by path of the module whose output is corrected, or "feature"."""

    method: str
    weights: Mapping[str, Mapping[str, Weights]]
    losses: Mapping[str, list[float]] = field(default_factory=dict)

    def apply(self, task: str, features: Tensor) -> Tensor:
        """Correct the last features (…, d) of a forward inside `inside`, where the method does."""
        if FEATURE not in self.weights[task]:
            return features
        return moved(self.method, self.weights[task][FEATURE], features)

    def inside(self, model: nn.Module, task: str) -> AbstractContextManager[None]:
        """Run the model with the task's adapters in it."""
        return corrected(model, self.method, self.weights[task])

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        tensors = {
            f"{task}/{path}/{name}": weight.contiguous()
            for task, by_path in self.weights.items()
            for path, by_name in by_path.items()
            for name, weight in by_name.items()
        }
        save_file(tensors, folder / FILE, metadata={"method": self.method})

    @classmethod
    def load(cls, folder: Path) -> "InnerAdapters":
        weights: dict[str, dict[str, dict[str, Tensor]]] = {}
        with safe_open(folder / FILE, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - safe_open is no mapping
                task, path, name = key.rsplit("/", 2)
                by_path = weights.setdefault(task, {})
                by_path.setdefault(path, {})[name] = file.get_tensor(key)
            return cls(file.metadata()["method"], weights)


def moved(method: str, weights: Weights, z: Tensor) -> Tensor:
    """Return z' of z (…, n, d) by one adapter."""
    W = {name: weight.to(z) for name, weight in weights.items()}
    if method == SurgeryV2.name:
        return z - torch.relu(z @ W["down"].mT) @ W["up"].mT
    target = z @ W["source"].mT + W["source_bias"]  # (…, n, r)
    return z - (z @ W["read"].mT + W["read_bias"] - target) @ W["read"]


def first_weights(
    settings: InnerSettings, like: Tensor, task: str, path: str, seed: int
) -> dict[str, Tensor]:
    """Draw weights for one path, uniform in ±1/√d; SurgeryV2's second matrix begins at zero."""
    d, r = like.shape[-1], settings.rank
    require(r <= d, f"{settings.name}.rank", r, f"must be at most {d}, the width at {path}")
    draws = generator(task, f"initialisation {path}", seed)
    if isinstance(settings, SurgeryV2):
        shapes = {"down": (r, d), "up": (d, r)}
    else:
        shapes = {"source": (r, d), "read": (r, d), "source_bias": (1, r), "read_bias": (1, r)}
    weights = {}
    for name, shape in shapes.items():
        values = torch.empty(shape).uniform_(-(d**-0.5), d**-0.5, generator=draws)
        initial = torch.zeros(shape) if name == "up" else values
        weights[name] = initial.to(like).requires_grad_()
    return weights


@contextmanager
def corrected(model: nn.Module, method: str, weights: Mapping[str, Weights]) -> Iterator[None]:
    """Correct the outputs of the modules at these paths: every token, or the first by IntervMerge."""

    def change(path: str, output: Any) -> Any:
        hidden = output if isinstance(output, Tensor) else output[0]
        if method == SurgeryV2.name:
            result = moved(method, weights[path], hidden)
        else:
            first = moved(method, weights[path], hidden[:, :1])
            result = torch.cat([first, hidden[:, 1:]], dim=1)
        return result if isinstance(output, Tensor) else (result, *output[1:])

    with output_hooks(model, [path for path in weights if path != FEATURE], change):
        yield


def inner_adapters(
    settings: InnerSettings,
    merged: Model,
    experts: Mapping[str, Model],
    batches: Mapping[str, Iterable[Batch]],
    head: Head,
    seed: int,
    device: str | torch.device | None,
) -> InnerAdapters:
    """Train adapters inside the merged model, one task after the other; its parameters are frozen.

    Raises: BadPlan for other models than encoders; BadSetting; BadBatches; Diverged.
    """
    model = as_module(merged, device).requires_grad_(False)
    stack, *other_stacks = plan_for(model).stacks
    if other_stacks or output_embeddings(model) is not None:
        problem = "is no encoder with one list of blocks, which these adapters need"
        raise BadPlan(type(model).__name__, problem)
    samples = {task: samples_of(task, batches[task]) for task in sorted(experts)}
    blocks = [f"{stack.blocks}.{number}" for number in range(len(blocks_of(model, stack)))]
    paths, compared, adapted = blocks, blocks, [*blocks, FEATURE]
    if not isinstance(settings, SurgeryV2):
        first_batch = next(iter(samples.values())).batch([0])
        paths = adapted = attention_paths(model, stack, blocks, first_batch)
        compared = []
    trained: dict[str, dict[str, Weights]] = {}
    losses: dict[str, list[float]] = {}
    for task, rows in samples.items():
        expert = as_module(experts[task], device)
        with evaluation_mode([model, expert]), exact_products():
            first = features(model, rows.batch([0]), head, paths)
            weights = {p: first_weights(settings, first[p], task, p, seed) for p in adapted}
            losses[task] = train(settings, model, expert, task, rows, head, weights, compared, seed)
        for path, by_name in weights.items():
            tensors = {name: weight.detach().cpu() for name, weight in by_name.items()}
            trained.setdefault(task, {})[path] = tensors
    return InnerAdapters(settings.name, trained, losses)


def attention_paths(model: nn.Module, stack: Stack, paths: list[str], batch: Batch) -> list[str]:
    """Return the path of every block's first linear whose output is added to the residual stream."""
    blocks, linears = blocks_of(model, stack), []
    with evaluation_mode([model]):
        hidden, arguments = first_inputs(model, stack, batch)
        for path, block in zip(paths, blocks, strict=True):
            with residual_streams(block, solved_modules(block)[0], hidden) as streams:
                hidden, arguments = step(block, stack, hidden, arguments)
            if not streams:
                problem = f"no linear of {path} writes into the residual stream"
                raise BadPlan(type(model).__name__, problem)
            linears.append(f"{path}.{next(iter(streams))}")
    return linears


def features(model: nn.Module, batch: Batch, head: Head, paths: Sequence[str]) -> dict[str, Tensor]:
    """Return the modules' outputs as means over tokens (n, d), and the last feature (n, p)."""
    means: dict[str, Tensor] = {}

    def note(path: str, out: Any) -> None:
        hidden = out if isinstance(out, Tensor) else out[0]
        mask = padding_mask(batch, hidden)
        present = hidden.new_ones(hidden.shape[:2]) if mask is None else mask
        means[path] = token_mean(hidden, present)

    with output_hooks(model, paths, note):
        last = projected(model, batch, head)
    return {**means, FEATURE: last}


@torch.enable_grad()
def train(
    settings: InnerSettings,
    model: nn.Module,
    expert: nn.Module,
    task: str,
    samples: Any,
    head: Head,
    weights: Mapping[str, Weights],
    compared: Sequence[str],
    seed: int,
) -> list[float]:
    """Run Adam on one task's weights against the expert's features; return every step's loss."""
    with torch.no_grad(), naming(task, 0):  # the expert's features of every sample are kept
        parts = torch.arange(len(samples)).split(settings.batch)
        goals = [features(expert, samples.batch(part.tolist()), head, compared) for part in parts]
        targets = {path: torch.cat([part[path] for part in goals]) for path in goals[0]}
    parameters = [w for by_name in weights.values() for w in by_name.values()]
    optimiser, losses = torch.optim.Adam(parameters, lr=settings.lr), list[float]()
    order = batch_order(task, len(samples), settings, seed)
    for number, indices in enumerate(islice(order, settings.steps)):
        batch = samples.batch(indices.tolist())
        with naming(task, number), corrected(model, settings.name, weights):
            outputs = features(model, batch, head, compared)
        if FEATURE in weights:
            outputs[FEATURE] = moved(settings.name, weights[FEATURE], outputs[FEATURE])
        pairs = ((outputs[path], rows[indices.to(rows.device)]) for path, rows in targets.items())
        differences = [(output - rows.to(output)).abs().mean() for output, rows in pairs]
        loss = torch.stack(differences).sum()
        losses.append(float(loss.detach()))
        if not torch.isfinite(loss):
            look = "NaN in the features: the merged model, the expert, or the samples of this task"
            name = settings.name
            raise Diverged(f"{name} {task!r}", number, f"{name}.lr", settings.lr, look)
        optimiser.zero_grad()
        loss.backward()
        for _ in range(getattr(settings, "repeat", 1)):
            optimiser.step()
    return losses
