"""Agreement of models with experts: drift and cosine of features, KL and top-1 of answers.

n samples · d width of a feature · K scores of a row, which is an image or one token of a text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import repeat
from math import isfinite, nan, sqrt

import torch
from torch import Tensor, nn

from featcal.calibration.choose import (
    Answers,
    answers,
    check_labels,
    comparable_scores,
    kl_and_top1,
    relational_divergence,
)
from featcal.core.moments import Drift
from featcal.core.precision import SUM_DTYPE, exact_products
from featcal.errors import BadBatches, BadSetting, NotFinite
from featcal.models.batch import Batches, Model, check_batch, check_tasks, naming
from featcal.models.load import evaluation_mode, torch_device
from featcal.models.lora import without_adapters
from featcal.models.plan import BlockPlan, blocks_of, plan_for
from featcal.models.sentences import Sentences
from featcal.models.streamed import (
    InMemoryModel,
    ModelHandle,
    StreamedModel,
    require_one_family,
    require_same_configs,
    require_same_tensors,
)
from featcal.settings import require


@dataclass(frozen=True)
class Difference:
    """Mean and standard error of a value minus the first model's on the same samples."""

    mean: float
    error: float


@dataclass(frozen=True)
class Agreement:
    """Agreement of one model with one expert, on the inputs of that expert's task.

    relative_drift: ‖H − H_exp‖_F / ‖H_exp‖_F of the features after the last block.
    cosine:     mean over tokens.
    kl:         mean over rows of KL(p_exp ‖ p); None without a head.
    top1:       share of rows with the same largest score; None without a head.
    relations:  without a head, the mean divergence of the softmax of each sample's cosines to the
                expert's features of the others, or with `labels` to those
                (`calibration/choose.py`); else None.
    than_first: by measure, the paired difference to the first model; empty for that one.
    """

    model: str
    expert: str
    samples: int
    relative_drift: float
    cosine: float
    kl: float | None
    top1: float | None
    relations: float | None = None
    than_first: Mapping[str, Difference] = field(default_factory=dict)


def compare(
    models: Mapping[str, Model],
    experts: Mapping[str, Model],
    batches: Mapping[str, Batches],
    *,
    labels: Mapping[str, Tensor] | None = None,
    plan: BlockPlan | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[Agreement]:
    """Measure how closely each model matches every expert.

    Use inputs that no model was merged or calibrated on. Over the samples x of an expert's task,
    relative drift is ‖H − H_exp‖_F / ‖H_exp‖_F, and KL is the mean over rows of KL(p_exp ‖ p).

    Args:
        models: by name, modules or folders. Each is compared with the first one, sample by sample.
        experts: by task, modules or folders of the same architecture.
        batches: by task, as for `calibrate`; read once.
        labels: per task the vectors (K, d) of its classes' texts, as for `calibrate`.
        plan: the blocks. Default: the plan of the model's family.
        device, dtype: of folders, of which one block at a time is in memory; modules stay as they
            are.

    Returns: one record for each expert and model, sorted by the expert's name.
    Raises: BadSetting; BadBatches; NotFinite; MissingTensor, TensorsDiffer for models of another
        family or shape; BadFile and others for folders that cannot be opened.
    """
    check_tasks(experts, batches)
    check_labels(labels or {}, experts)
    if not (isinstance(models, Mapping) and models):
        expected = "must be a dictionary with at least one model by its name"
        raise BadSetting("compare.models", type(models).__name__, expected)
    expected = "must be a floating-point type, such as torch.float32"
    require(dtype.is_floating_point, "compare.dtype", str(dtype), expected)
    target = torch_device(device)

    def opened(model: Model) -> ModelHandle:
        if isinstance(model, nn.Module):
            return InMemoryModel(without_adapters(model))
        return StreamedModel(model, dtype=dtype, device=target)

    def blocks_alone(handle: ModelHandle) -> ModelHandle:
        stacks = plan_for(handle.module, plan).stacks
        parts = {f"stack{i}": blocks_of(handle.module, s) for i, s in enumerate(stacks)}
        return InMemoryModel(nn.ModuleDict(parts))

    ours = {name: opened(model) for name, model in models.items()}
    agreements: list[Agreement] = []
    for task in sorted(experts):
        expert = opened(experts[task])
        # only blocks must be alike: experts may have heads with their own numbers of classes
        handles = {f"expert {task!r}": expert, **ours}
        require_one_family({label: type(handle.module) for label, handle in handles.items()})
        require_same_configs({n: getattr(m.module, "config", None) for n, m in handles.items()})
        require_same_tensors({label: blocks_alone(handle) for label, handle in handles.items()})
        with evaluation_mode([handle.module for handle in handles.values()]), exact_products():
            classes = (labels or {}).get(task)
            agreements += task_agreements(task, ours, expert, batches[task], plan, classes)
    return agreements


class Totals:
    """Sums of one model over the batches of one task, and the values of each sample by measure."""

    def __init__(self, classes: Tensor | None) -> None:
        self.classes, self.drift, self.rows = classes, Drift(), 0
        self.sums = {"kl": 0.0, "top1": 0.0}  # over rows
        self.by_sample: dict[str, list[float]] = {
            name: [] for name in ("relative_drift", "kl", "top1", "relations")
        }
        self.pooled: list[tuple[Tensor, Tensor]] = []  # without scores

    def add(self, ours: Answers, theirs: Answers) -> None:
        """Add one batch."""
        self.drift.add(ours.hidden, theirs.hidden, ours.mask)
        masks = repeat(None) if ours.mask is None else ours.mask
        for h, h_exp, mask in zip(ours.hidden, theirs.hidden, masks, strict=False):
            own = Drift()
            own.add(h, h_exp, mask)
            self.by_sample["relative_drift"].append(own.relative)
        scores = comparable_scores(ours, theirs)
        if scores is None or self.classes is not None:
            self.pooled.append((ours.features(theirs), theirs.features(ours)))
            return
        measured = dict(zip(self.sums, kl_and_top1(*scores), strict=True))
        for name, values in measured.items():
            self.sums[name] += float(values.sum())
            parts = values.split(ours.sizes.tolist())
            self.by_sample[name] += [float(part.mean()) for part in parts if len(part)]
        self.rows += len(measured["kl"])

    def agreement(self, model: str, expert: str, first: "Totals") -> Agreement:
        """Return the record, once all batches are added; `first` is the first model's."""
        samples, drift = len(self.by_sample["relative_drift"]), self.drift
        if samples > 2 and self.pooled and not self.rows:
            ours, theirs = (torch.cat(side) for side in zip(*self.pooled, strict=True))
            self.by_sample["relations"] = relational_divergence(ours, theirs, self.classes).tolist()
        if not isfinite(drift.relative):
            raise NotFinite(f"model {model}, task {expert}", "its features")
        kl, top1 = (total / self.rows if self.rows else None for total in self.sums.values())
        relations = self.by_sample["relations"]
        mean = sum(relations) / len(relations) if relations else None
        measured = samples, drift.relative, drift.cosine, kl, top1, mean
        differences: dict[str, Difference] = {}
        for name, values in self.by_sample.items() if self is not first else ():
            if values and first.by_sample[name]:
                pair = torch.tensor([values, first.by_sample[name]], dtype=SUM_DTYPE)
                difference = pair[0] - pair[1]
                error = float(difference.std()) / sqrt(len(values)) if len(values) > 1 else nan
                differences[name] = Difference(float(difference.mean()), error)
        return Agreement(model, expert, *measured, differences)


def task_agreements(
    task: str,
    models: Mapping[str, ModelHandle],
    expert: ModelHandle,
    batches: Batches,
    plan: BlockPlan | None,
    classes: Tensor | None,
) -> list[Agreement]:
    """Return the records of one task. Raises: BadBatches; NotFinite."""
    totals = {name: Totals(classes) for name in models}
    # a SentenceTransformer's own pooling and layers; for a module there is none
    folders = {id(h): h.folder for h in (expert, *models.values()) if isinstance(h, StreamedModel)}
    sentences = {key: Sentences.of_folder(folder) for key, folder in folders.items()}
    for number, batch in enumerate(batches):
        check_batch(task, number, batch, expert.module)
        with naming(task, number), expert.running() as teacher:
            theirs = answers(teacher, batch, plan, sentences.get(id(expert)), False)
            for name, handle in models.items():
                with handle.running() as model:
                    ours = answers(model, batch, plan, sentences.get(id(handle)), False)
                    totals[name].add(ours, theirs)  # while the model's head is loaded
    first = next(iter(totals.values()))
    if not first.by_sample["relative_drift"]:
        raise BadBatches(task, "is empty; at least one batch is needed")
    return [own.agreement(name, task, first) for name, own in totals.items()]
