"""What a model answers to a batch: features behind the last block, and scores where it has a head,
beside another model's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from featcal.baselines.features import output_embeddings, rows_before_head
from featcal.calibration.drift import last_outputs
from featcal.calibration.features import on_device
from featcal.core.drift import Drift
from featcal.core.precision import exact_products, wide
from featcal.errors import BadBatches, BadSetting, NotFinite
from featcal.models.batch import (
    Batches,
    Model,
    check_batch,
    check_tasks,
    naming,
    pad_token,
    padding_mask,
)
from featcal.models.capture import model_call
from featcal.models.families import plan_for
from featcal.models.load import evaluation_mode, torch_device
from featcal.models.lora import without_adapters
from featcal.models.plan import BlockPlan
from featcal.models.streamed import InMemoryModel, ModelHandle, StreamedModel, require_same_tensors
from featcal.settings import require
from featcal.tuning.tune import Scored, answer_pairs, divergences


@dataclass(frozen=True)
class Answers:
    """Of one batch: features behind the last block (n, tokens, d), which tokens count, and the
    scores of n samples' rows.
    """

    hidden: Tensor
    mask: Tensor | None
    scores: "Scored | Table | None"
    sizes: Tensor  # rows of each sample, (n,)


@dataclass(frozen=True)
class Table:
    """Scores that the model made itself, (rows, K)."""

    rows: Tensor

    @property
    def width(self) -> int:
        return self.rows.shape[1]

    def between(self, start: int, end: int) -> Tensor:
        """log softmax of some rows."""
        return log_softmax(wide(self.rows[start:end]), dim=-1)


def answered(model: nn.Module, batch: Mapping[str, Any], given: BlockPlan | None) -> Answers:
    """Features and scores of one forward; of a vocabulary the scores are made when they are asked
    for, a few rows at a time.
    """
    plan, language = plan_for(model, given), output_embeddings(model)
    stack = plan.stacks[-1]
    with last_outputs(model, plan) as seen:
        if language is not None:
            rows, sizes = rows_before_head(model, batch, None)
            scores: Scored | Table | None = Scored(rows, language, None)
        else:
            out = model(**model_call(model, batch))
            made = getattr(out, "logits", None)
            scores = Table(made) if isinstance(made, Tensor) and made.dim() == 2 else None
            sizes = torch.ones(len(seen[stack.name]), dtype=torch.long)
    hidden = seen[stack.name]
    return Answers(hidden, padding_mask(batch, hidden, stack.mask, pad_token(model)), scores, sizes)


def scored_alike(ours: Scored | Table, theirs: Scored | Table) -> tuple[Tensor, Tensor]:
    """KL(p_exp ‖ p) of every row and whether both have one largest score, (rows,) each, on the
    CPU.
    """
    kl, same = [], []
    for here, there in answer_pairs(ours, theirs):
        kl.append(divergences(here, there).double().cpu())
        same.append((here.argmax(-1) == there.argmax(-1)).double().cpu())
    return torch.cat(kl), torch.cat(same)


@dataclass(frozen=True)
class Difference:
    """Mean over samples of a value minus that of the first model on the same sample, and the mean's
    standard error.
    """

    mean: float
    error: float


@dataclass(frozen=True)
class Agreement:
    """One model against one expert, on the inputs of that expert's task.

    relative_drift: ‖H − H_exp‖_F / ‖H_exp‖_F of the features behind the last block.   cosine: mean
    over tokens.
    kl:   mean over rows of KL(p_exp ‖ p), of models with a head.   top1: share of rows where both
          have one answer.
    than_first: by measure the paired difference to the first model; empty for that one.
    """

    model: str
    expert: str
    samples: int
    relative_drift: float
    cosine: float
    kl: float | None
    top1: float | None
    than_first: Mapping[str, Difference] = field(default_factory=dict)


def compare(
    models: Mapping[str, Model],
    experts: Mapping[str, Model],
    batches: Mapping[str, Batches],
    *,
    plan: BlockPlan | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[Agreement]:
    """How far each model agrees with every expert; best on inputs that none of them was calibrated
    or merged on.

    models:  by name: modules or folders. Each is compared with the first one, sample by sample.
    experts: by task: modules or folders of the same architecture.
    batches: by task as for `calibrate`, best ones that it does not see; read once.
    device, dtype: of folders, of which one block at a time is in memory; modules stay as they are.
    Returns: one record for each expert and model, in the order of names of experts.
    Raises:  BadBatches; MissingTensor, TensorsDiffer for models of another shape; what opening
             folders raises.
    """
    check_tasks(experts, batches)
    if not (isinstance(models, Mapping) and models):
        raise BadSetting(
            "compare.models",
            type(models).__name__,
            "must be a dictionary with at least one model by its name",
        )
    require(
        dtype.is_floating_point,
        "compare.dtype",
        str(dtype),
        "must be a floating-point type, such as torch.float32",
    )
    place = torch_device(device)

    def held(model: Model) -> ModelHandle:
        return (
            InMemoryModel(without_adapters(model))
            if isinstance(model, nn.Module)
            else StreamedModel(model, dtype=dtype, device=place)
        )

    ours = {name: held(model) for name, model in models.items()}
    found = []
    for task in sorted(experts):
        expert = held(experts[task])
        # heads of its own task's number of classes are compared with none; blocks must be alike
        require_same_tensors(
            {
                name: blocks_alone(model, plan)
                for name, model in {f"expert {task!r}": expert, **ours}.items()
            }
        )
        with evaluation_mode([each.module for each in (expert, *ours.values())]), exact_products():
            found += agreements(task, ours, expert, batches[task], plan, place)
    return found


def blocks_alone(held: ModelHandle, plan: BlockPlan | None) -> ModelHandle:
    """The blocks of a model as one module."""
    stacks = plan_for(held.module, plan).stacks
    parts = {
        stack.name.replace(".", "_"): held.module.get_submodule(stack.blocks) for stack in stacks
    }
    return InMemoryModel(nn.ModuleDict(parts))


@dataclass
class Sums:
    """What is added up of one model."""

    drift: Drift = field(default_factory=Drift)
    kl: list[float] = field(default_factory=list)  # mean over the rows of each sample
    same: list[float] = field(default_factory=list)  # share of them
    drifts: list[float] = field(default_factory=list)  # relative drift of each sample
    rows: int = 0
    kl_sum: float = 0.0
    same_sum: float = 0.0


def agreements(
    task: str,
    models: Mapping[str, ModelHandle],
    expert: ModelHandle,
    batches: Batches,
    plan: BlockPlan | None,
    device: torch.device,
) -> Iterator[Agreement]:
    """The records of one task. Raises: BadBatches; NotFinite."""
    sums = {name: Sums() for name in models}
    for number, given in enumerate(batches):
        check_batch(task, number, given, expert.module)
        with naming(task, number), expert.running() as teacher:
            batch = on_device(given, device)
            theirs = answered(teacher, batch, plan)
            for name, held in models.items():
                with held.running() as model:
                    add(sums[name], answered(model, batch, plan), theirs, name)
    if not next(iter(sums.values())).drifts:
        raise BadBatches(task, "is empty; at least one batch is needed")
    first = next(iter(sums.values()))
    for name, own in sums.items():
        if not torch.tensor(own.drift.relative).isfinite():
            raise NotFinite(f"model {name}, task {task}", "its features")
        yield Agreement(
            name,
            task,
            len(own.drifts),
            own.drift.relative,
            own.drift.cosine,
            own.kl_sum / own.rows if own.rows else None,
            own.same_sum / own.rows if own.rows else None,
            {} if own is first else paired(own, first),
        )


def add(sums: Sums, ours: Answers, theirs: Answers, name: str) -> None:
    """Add one batch."""
    sums.drift.add(ours.hidden, theirs.hidden, ours.mask)
    for i in range(len(ours.hidden)):
        own = Drift()
        own.add(ours.hidden[i], theirs.hidden[i], None if ours.mask is None else ours.mask[i])
        sums.drifts.append(own.relative)
    if ours.scores is None or theirs.scores is None or ours.scores.width != theirs.scores.width:
        return
    kl, same = scored_alike(ours.scores, theirs.scores)
    sums.rows, sums.kl_sum, sums.same_sum = (
        sums.rows + len(kl),
        sums.kl_sum + float(kl.sum()),
        sums.same_sum + float(same.sum()),
    )
    sizes = ours.sizes.tolist()
    sums.kl += [float(part.mean()) for part in kl.split(sizes) if len(part)]
    sums.same += [float(part.mean()) for part in same.split(sizes) if len(part)]


def paired(own: Sums, first: Sums) -> dict[str, Difference]:
    """The paired differences to the first model, by measure."""
    pairs: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        "relative_drift": (own.drifts, first.drifts)
    }
    if own.rows and first.rows:
        pairs |= {"kl": (own.kl, first.kl), "top1": (own.same, first.same)}
    found = {}
    for name, (here, there) in pairs.items():
        difference = torch.tensor(here, dtype=torch.float64) - torch.tensor(
            there, dtype=torch.float64
        )
        error = (
            float(difference.std()) / sqrt(len(difference)) if len(difference) > 1 else float("nan")
        )
        found[name] = Difference(float(difference.mean()), error)
    return found
