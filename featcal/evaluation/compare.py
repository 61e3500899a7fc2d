"""Agreement of models with experts: drift and cosine of features, KL and top-1 of answers.

n samples · d width of a feature · K scores of a row: an image has one row, a text one per token.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import repeat
from math import isfinite, nan, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from featcal.calibration import choose
from featcal.calibration.features import opened
from featcal.core.moments import Drift
from featcal.core.precision import FLOATS, SUM_DTYPE, exact_products
from featcal.errors import BadBatches, NotFinite, warn_once
from featcal.models import streamed
from featcal.models.batch import Batches, Model, check_batch, check_named, check_tasks, naming
from featcal.models.load import evaluation_mode, torch_device
from featcal.models.lora import class_of
from featcal.models.plan import BlockPlan, blocks_of, plan_for
from featcal.models.sentences import Sentences
from featcal.models.streamed import InMemoryModel, ModelHandle, StreamedModel
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
    kl:         mean over samples of the mean over their rows of KL(p_exp ‖ p); None without a head.
    top1:       mean over samples of the share of rows with the same largest score; None as kl.
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
    relative drift is ‖H − H_exp‖_F / ‖H_exp‖_F, and KL is the mean over x of KL(p_exp ‖ p).

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
    labels = {} if labels is None else labels
    choose.check_labels(labels, experts)
    check_named(models, "compare.models")
    require(dtype in FLOATS, "compare.dtype", str(dtype), "must be a type such as torch.float32")
    target, given = torch_device(device), (*models.values(), *experts.values())
    classes_given = {kind.__name__: kind for kind in map(class_of, given)}

    def open_model(model: Model) -> ModelHandle:
        """Open a model; of a whole SigLIP only the tower, if another model is one."""
        tower = f"{class_of(model).__name__.removesuffix('Model')}VisionModel"
        return opened(model, dtype, target, classes_given.get(tower), ())

    def blocks_alone(module: nn.Module) -> ModelHandle:
        stacks = plan_for(module, plan).stacks
        parts = {f"stack{i}": blocks_of(module, s) for i, s in enumerate(stacks)}
        return InMemoryModel(nn.ModuleDict(parts))

    tested = {name: open_model(model) for name, model in models.items()}
    agreements, kinds, configs = list[Agreement](), dict[str, type](), dict[str, Any]()
    for task in sorted(experts):
        expert = open_model(experts[task])
        # only blocks must be alike: experts may have heads with their own numbers of classes
        handles = {f"expert {task!r}": expert, **tested}
        modules = {name: handle.module for name, handle in handles.items()}
        kinds |= {name: type(module) for name, module in modules.items()}
        configs |= {name: getattr(module, "config", None) for name, module in modules.items()}
        streamed.require_one_family(kinds)
        streamed.require_same_configs(configs)
        streamed.require_same_tensors({n: blocks_alone(m) for n, m in modules.items()})
        with exact_products(), evaluation_mode([*modules.values()]):
            agreements += task_agreements(
                task, tested, expert, batches[task], plan, labels.get(task)
            )
    streamed.report_labels(kinds.values(), configs.values(), "answers are compared", warn_once)
    return agreements


class Totals:
    """Sums of one model over the batches of one task, and the values of each sample by measure."""

    def __init__(self, classes: Tensor | None) -> None:
        self.classes, self.drift = classes, Drift()
        self.by_sample = defaultdict[str, list[float]](list)
        self.pooled: list[tuple[Tensor, Tensor]] = []  # without scores

    def add(self, ours: choose.Answers, theirs: choose.Answers) -> None:
        """Add one batch."""
        self.drift.add(ours.hidden, theirs.hidden, ours.mask)
        masks = repeat(None) if ours.mask is None else ours.mask
        for h, h_exp, mask in zip(ours.hidden, theirs.hidden, masks, strict=False):
            sample_drift = Drift()
            sample_drift.add(h, h_exp, mask)
            self.by_sample["relative_drift"].append(sample_drift.relative)
        scores = choose.comparable_scores(ours, theirs)
        if scores is None or self.classes is not None:
            self.pooled.append((ours.features(theirs), theirs.features(ours)))
            return
        for name, values in zip(("kl", "top1"), choose.kl_and_top1(*scores), strict=True):
            rows = values.split(ours.sizes.tolist())
            self.by_sample[name] += [float(x.mean()) for x in rows if len(x)]

    def agreement(self, model: str, expert: str, first: "Totals") -> Agreement:
        """Return the record, once all batches are added; `first` is the first model's."""
        samples, drift = len(self.by_sample["relative_drift"]), self.drift
        if (samples > 2 or self.classes is not None) and self.pooled and not self.by_sample["kl"]:
            ours, theirs = (torch.cat(side) for side in zip(*self.pooled, strict=True))
            values = choose.relational_divergence(ours, theirs, self.classes)
            self.by_sample["relations"] = values.tolist()
        if not isfinite(drift.relative):
            raise NotFinite(f"model {model}, task {expert}", "its features")
        values = (self.by_sample[name] for name in ("kl", "top1", "relations"))
        means = (sum(own) / len(own) if own else None for own in values)
        measured = samples, drift.relative, drift.cosine, *means
        differences: dict[str, Difference] = {}
        for name, values in self.by_sample.items():
            if self is not first and values and first.by_sample[name]:
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
    # the expert's pooling and layers serve for all models, so that features compare
    sentences = Sentences.or_mean(expert.folder) if isinstance(expert, StreamedModel) else None
    options = plan, sentences, False
    for number, batch in enumerate(batches):
        check_batch(task, number, batch, expert.module)
        with naming(task, number), expert.running() as teacher:
            theirs = choose.answers(teacher, batch, *options)
            for name, handle in models.items():
                with handle.running() as model:
                    ours = choose.answers(model, batch, *options)  # its head is loaded
                    totals[name].add(ours, theirs)
    first = next(iter(totals.values()))
    if not first.by_sample["relative_drift"]:
        raise BadBatches(task, "is empty; at least one batch is needed")
    return [total.agreement(name, task, first) for name, total in totals.items()]
