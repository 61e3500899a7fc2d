"""Choose the settings of a calibration, or none, by answers to samples that no calibration sees.

The divergence of a model from the expert of task t on held-out sample i is KL(p_i^t ‖ p_i). p is
the softmax of the model's own scores (a single one is the logit of yes); a text has the mean over
its tokens. Models without a head are compared by relations: p_i = softmax_{j≠i}(cos(f_i, g_j)/τ).
f_i is the model's feature of sample i, or the expert's; g_j are the expert's features of the task's
held-out samples and of those on which candidates are calibrated; τ is the standard deviation of the
expert's cosines. Where vectors c_k of a task's classes are given, p_i = softmax_k(f_i · c_k /
τ ‖f_i‖). The feature of a text is the vector of the expert's SentenceTransformer, else the mean over
its tokens.

Legend: n samples · d width of a feature · K scores of a row. An image has one row of scores, a text
one for every token.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax, normalize, pad

from featcal.calibration.features import NO_SAMPLES, Models
from featcal.calibration.scratch import Spool, SpooledList
from featcal.card import Choice, round_digits
from featcal.core.moments import token_weights
from featcal.core.precision import SUM_DTYPE, wide
from featcal.errors import BadBatches, BadCapture, NotFinite, UnknownKey, warn_once
from featcal.models import batch as of_batches
from featcal.models.batch import Batch, Batches, TaskBatches, sample_count, token_mean
from featcal.models.blocks import last_outputs, model_call
from featcal.models.load import evaluation_mode
from featcal.models.plan import BlockPlan, plan_for
from featcal.models.sentences import Sentences
from featcal.models.streamed import ModelHandle, StreamedModel, report_labels
from featcal.settings import Calibration, require

# aims at the experts' residual stream, site by site
STREAM = Calibration(ridge="auto", interpolation=1.0, residual=1.0, order="sites", affine="joint")
CANDIDATES = {
    "paper": Calibration(),
    "large anchor": Calibration(ridge=0.01, anchor_blend=8.0, interpolation=0.3),
    "small ridge": STREAM.but(ridge=1e-4),
    **{f"stream {rho}": STREAM.but(anchor_blend=float(rho)) for rho in (1, 4, 8)},
}
CalibrationOrAuto = Calibration | Literal["auto"]
MERGED, FINAL = "merged", "calibrated"  # names of the merged model and of the last calibration
SCORES_AT_ONCE = 2**24  # scores computed at once, at most: a vocabulary is wide
CALIBRATED_ON = 32  # samples of a task on which candidates are calibrated
FEWEST_HELD_OUT, MOST_HELD_OUT = 4, 64  # samples of a task: a quarter, within these bounds
FEWEST = 2 * FEWEST_HELD_OUT  # samples that each task needs for a choice
TOO_FEW = Choice(
    MERGED,
    f"Kept the merged model: choosing and checking settings needs {FEWEST} samples of every "
    "task. The preset paper, or settings of your own, calibrate without a check.",
    None,
)


@dataclass(frozen=True)
class Part:
    """Some samples of a task, in few batches: a streamed model reads all weights for each."""

    batches: Batches
    chosen: Tensor

    def __iter__(self) -> Iterator[Batch]:
        start, pending = 0, dict[str, Any]()
        for batch in self.batches:
            count = sample_count(batch)
            rows = self.chosen[start : start + count]
            start += count
            if not rows.any():
                continue
            part = of_batches.some_samples(batch, rows)
            fits = sample_count(pending) + sample_count(part) <= count
            if fits and None not in shapes(part) and shapes(pending) == shapes(part):
                part = {name: torch.cat([pending[name], part[name]]) for name in part}
            elif pending:
                yield pending
            pending = part
        if pending:
            yield pending


Parts = Mapping[str, Part]  # by task


def shapes(batch: Batch) -> list[Any]:
    """Return each name with its tensor's shape per sample; None for other values."""
    n = sample_count(batch)
    return [
        (name, x.shape[1:]) if isinstance(x, Tensor) and x.shape[:1] == (n,) else None
        for name, x in batch.items()
    ]


def evenly(count: int, n: int) -> Tensor:
    """Return a mask (n,) of `count` samples, evenly spaced, as batches may be sorted."""
    mask = torch.zeros(n, dtype=torch.bool)
    mask[((torch.arange(count) + 0.5) * n / max(count, 1)).long()] = True
    return mask


def parts_of(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return masks (n,) of a task's samples: for candidates, the last calibration, and held out."""
    held_out = evenly(min(max(n // 4, FEWEST_HELD_OUT), MOST_HELD_OUT), n)
    rest = (~held_out).nonzero()[:, 0]
    few = torch.zeros(n, dtype=torch.bool)
    few[rest[evenly(min(CALIBRATED_ON, len(rest)), len(rest))]] = True
    return few, ~held_out | few.equal(~held_out), held_out


def split(batches: TaskBatches, models: Models, spool: Spool) -> dict[str, tuple[Part, ...]] | None:
    """Return each task's parts, or None if one has too few. Iterators are read into the spool."""
    parts = {}
    for task, expert in models.experts.items():
        task_batches = of_batches.lasting(batches[task])
        if not isinstance(task_batches, Sequence):
            task_batches = SpooledList(spool, task_batches)
        for number, batch in enumerate(task_batches):
            of_batches.check_batch(task, number, batch, expert.module)
        if (n := sum(map(sample_count, task_batches))) == 0:
            raise BadBatches(task, NO_SAMPLES)
        if n >= FEWEST:
            parts[task] = tuple(Part(task_batches, mask) for mask in parts_of(n))
    return parts if parts.keys() == models.experts.keys() else None


def divergences(
    models: Models,
    students: Mapping[str, ModelHandle],
    held_out: TaskBatches,
    seen: TaskBatches,
    labels: Mapping[str, Tensor] = {},
) -> dict[str, dict[str, list[float]]]:
    """Return held-out samples' divergence by task and model; `seen` are more, for relations."""
    by_task = dict[str, dict[str, list[float]]]()
    modules = [handle.module for handle in (*students.values(), *models.experts.values())]
    configs = [getattr(module, "config", None) for module in modules]
    report_labels(map(type, modules), configs, "answers are compared", warn_once)
    for task, samples in held_out.items():
        expert, classes = models.experts[task], labels.get(task)
        pooling, lacks_head = None, False
        if isinstance(expert, StreamedModel):  # it pools for all models, so that features compare
            pooling = Sentences.or_mean(expert.folder)
            lacks_head = any(names[0] not in expert.stored for names in expert.ties)
        options = models.plan, pooling, lacks_head
        kl: dict[str, list[float]] = {name: [] for name in students}
        features: dict[str, list[Tensor]] = {name: [] for name in students}
        expert_features: list[Tensor] = []
        with evaluation_mode([handle.module for handle in students.values()]):
            for number, batch in enumerate(samples):
                with of_batches.naming(task, number), expert.running() as teacher:
                    theirs = answers(teacher, batch, *options)
                    for name, handle in students.items():
                        with handle.running() as student:  # its head computes scores below
                            ours = answers(student, batch, *options)
                            scores = comparable_scores(ours, theirs)
                            if scores is not None and classes is None:
                                rows = kl_and_top1(*scores)[0].split(ours.sizes.tolist())
                                kl[name] += [float(r.mean()) if len(r) else 0.0 for r in rows]
                        features[name].append(ours.features(theirs))
                    expert_features.append(theirs.features(ours))
            if classes is None and not all(kl.values()):
                with expert.running() as teacher:
                    for batch in seen[task]:
                        theirs = answers(teacher, batch, *options)
                        expert_features.append(theirs.features(ours))
        for name in students:
            if not kl[name]:
                f, f_exp = torch.cat(features[name]), torch.cat(expert_features)
                kl[name] = relational_divergence(f, f_exp, classes).tolist()
            if not torch.tensor(kl[name]).isfinite().all():
                if name == MERGED:
                    raise NotFinite(f"merged model or expert, task {task}", "its answers")
                kl[name] = [inf]
        by_task[task] = kl
    return by_task


def check_labels(labels: Mapping[str, Tensor], tasks: Collection[str]) -> None:
    """Raise UnknownKey or BadSetting unless these are matrices of known tasks' classes."""
    require(isinstance(labels, Mapping), "labels", type(labels).__name__, "must be a dictionary")
    expected = "must be a finite matrix with a row for each of at least two classes"
    for task, classes in labels.items():
        if task not in tasks:
            raise UnknownKey("labels", task, tasks)
        matrix = torch.empty(0)
        with suppress(TypeError, ValueError):  # raised for names of classes in place of vectors
            matrix = torch.as_tensor(classes)
        fits = matrix.dim() == 2 and len(matrix) > 1 and matrix.isfinite().all()
        require(bool(fits), f"labels[{task!r}]", [*matrix.shape], expected)


def relational_divergence(f: Tensor, f_exp: Tensor, classes: Tensor | None = None) -> Tensor:
    """Return each sample's divergence of relations to the others, or to classes (K, d), (n,).

    f (n, d), f_exp (n or more, d).   Raises: BadSetting for classes of another width.
    """
    width = f.shape[1] if classes is None else len(classes[0])
    expected = f"must be rows of the features' width {f.shape[1]}"
    require(width == f.shape[1], "labels", f"rows of {width}", expected)
    student, expert = (normalize(x.to(SUM_DTYPE), dim=1) for x in (f, f_exp))
    others = ~torch.eye(len(student), len(expert), dtype=torch.bool, device=student.device)

    def cosines(rows: Tensor) -> Tensor:
        if classes is not None:
            return rows @ torch.as_tensor(classes).to(rows).T
        return (rows @ expert.T)[others].view(len(rows), -1)

    expert_cosines = cosines(expert[: len(student)])
    tau = expert_cosines.std().clamp_min(1e-6)
    log_p, log_p_exp = (log_softmax(c / tau, dim=1) for c in (cosines(student), expert_cosines))
    return kl_div(log_p, log_p_exp, reduction="none", log_target=True).sum(1).cpu()


def choose(
    by_task: Mapping[str, Mapping[str, Sequence[float]]], settings: Mapping[str, Calibration]
) -> Choice:
    """Choose the model of least mean divergence that is worse than the merged one on no task, beyond
    two paired standard errors. The sentence names the `settings` without a finite divergence.
    """
    divergence: dict[str, dict[str, float]] = {}
    allowed, tasks = [], by_task.values()
    for name in (n for n in next(iter(tasks)) if all(sum(kl[n]) < inf for kl in tasks)):
        worse = False
        for task, kl in by_task.items():
            values = torch.tensor(kl[name], dtype=SUM_DTYPE)
            divergence.setdefault(name, {})[task] = round_digits(float(values.mean()))
            difference = values - torch.tensor(kl[MERGED], dtype=SUM_DTYPE)
            worse |= bool(difference.mean() > 2 * difference.std() / sqrt(len(difference)))
        if not worse:
            allowed.append(name)
    chosen = min(allowed, key=lambda name: sum(divergence[name].values()))
    reason = "its answers were nearest to the experts' on held-out samples"
    sentence = f"Calibrated with {chosen}: {reason}."
    if chosen == MERGED:
        reason = f"calibration did not help on held-out samples of {', '.join(by_task)}"
        sentence = f"Kept the merged model: {reason}."
    if overflowed := [name for name in settings if name not in divergence]:
        sentence += f" Weights or answers were not finite with {', '.join(overflowed)}."
    return Choice(chosen, sentence, settings.get(chosen), divergence)


@dataclass(frozen=True)
class Scores:
    """Scores (rows, K), or rows from which a language head computes them, a few at a time."""

    rows: Tensor
    head: Any = None

    @property
    def width(self) -> int:
        """Return K."""
        return self.rows.shape[1] if self.head is None else int(self.head.out_features)

    def log_softmax(self, start: int, end: int) -> Tensor:
        """Return log softmax of some rows' scores, (rows, K)."""
        rows = self.rows[start:end]
        scores = rows if self.head is None else self.head(rows)
        return log_softmax(wide(pad(scores, (0, 1)) if self.width == 1 else scores), dim=-1)


def kl_and_top1(ours: Scores, theirs: Scores) -> tuple[Tensor, Tensor]:
    """Return KL(p_exp ‖ p) of every row and whether largest scores agree, (rows,), float64."""
    kl, same = [], []
    size = max(1, SCORES_AT_ONCE // ours.width)
    for start in range(0, len(ours.rows), size):
        log_p = ours.log_softmax(start, start + size)
        log_q = theirs.log_softmax(start, start + size).to(log_p.device)
        kl.append(kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1).double().cpu())
        same.append((log_p.argmax(-1) == log_q.argmax(-1)).double().cpu())
    return torch.cat(kl), torch.cat(same)


@dataclass(frozen=True)
class Answers:
    """A model's answers to one batch."""

    hidden: Tensor  # (n, tokens, d), after the last block
    mask: Tensor | None  # (n, tokens)
    weights: Tensor  # (n, tokens), by the plan's rule for the last block
    pooled: Tensor | None  # (n, p), if the model pools
    scores: Scores | None  # if it has a head
    sizes: Tensor  # (n,)  rows of scores of each sample

    def features(self, other: "Answers") -> Tensor:
        """Return features (n, p) of the same kind as the other's: pooled, or means over tokens."""
        if self.pooled is not None and other.pooled is not None:
            return self.pooled
        return token_mean(self.hidden, self.weights == self.weights.amax(1, keepdim=True))


def comparable_scores(ours: Answers, theirs: Answers) -> tuple[Scores, Scores] | None:
    """Return both models' scores, or None unless their rows have the same width."""
    if ours.scores is None or theirs.scores is None or ours.scores.width != theirs.scores.width:
        return None
    return ours.scores, theirs.scores


def answers(
    model: nn.Module, batch: Batch, plan: BlockPlan | None, sentences: Sentences | None, bare: bool
) -> Answers:
    """Return the answers of one forward.

    sentences: how an encoder's folder makes a vector of a text.   bare: run the blocks only.
    """
    plan, head = plan_for(model, plan), None if bare else of_batches.output_embeddings(model)
    if head is not None and of_batches.changes_logits(model):
        head = None  # take the logits that the model returns, which need more memory
    stack, scores, pooled, output = plan.stacks[-1], None, None, None
    with last_outputs(model, plan, stop=bare) as outputs:
        if head is not None:
            with suppress(BadCapture):  # forward reads the head's weight, as MobileBERT's does
                rows, sizes = of_batches.rows_before_head(model, batch, None)
                scores = Scores(rows, head)
        if scores is None:
            output = model(**model_call(model, batch))
    hidden = outputs[stack.name]
    mask = of_batches.padding_mask(batch, hidden, stack.mask, model)
    weights = token_weights(plan.rule(stack), "", True, hidden, mask)
    if scores is None:
        counted = hidden.new_ones(hidden.shape[:2], dtype=torch.long) if mask is None else mask
        sizes = torch.ones(len(hidden), dtype=torch.long)
        logits = getattr(output, "logits", None)
        if isinstance(logits, Tensor) and logits.shape[:-1] == hidden.shape[:2]:  # of each token
            logits, sizes = logits[counted.bool()], counted.bool().sum(1)
        scores = Scores(logits) if isinstance(logits, Tensor) and logits.dim() == 2 else None
        if sentences and sentences.given:
            last_hidden = getattr(output, "last_hidden_state", hidden)
            pooled = sentences.vectors(last_hidden, counted[:, : last_hidden.shape[1]])
        elif output is not None:
            pooled = of_batches.pooled_output(model, output, batch)
    return Answers(hidden, mask, weights, pooled, scores, sizes)
