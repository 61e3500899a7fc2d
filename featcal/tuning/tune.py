"""How far a calibrated model's answers are from its experts', without labels. Every task counts
alike, every row of a task too:

    D = 1/T Σ_t 1/n_t Σ_r KL(p_r^t ‖ p_r),    p = softmax(z).

z_r are the scores that row r leads to: of a text one row for every token (of a decoder, those it
reads), z over the vocabulary by the model's own language head; of a picture one row, z = H_t f/‖f‖
by the head of its task. Without a head for pictures there are no answers, and the summand is 1 −
cos(f_r, f_r^t) of the features instead. KL is what log-likelihood under the expert loses.

Legend: T tasks · n_t rows of task t · K scores · p width of a feature."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, kl_div, log_softmax

from featcal.baselines.features import Head, output_embeddings, rows_before_head
from featcal.calibration.block import add_task, load, solve
from featcal.calibration.calibrate import budgets, calibrate
from featcal.calibration.features import (
    EncoderOutputs,
    Spool,
    StudentTeacherFeatures,
    advance_student,
)
from featcal.calibration.models import open_models
from featcal.calibration.observe import BlockView, Systems, calibrated_modules, observe
from featcal.calibration.ranks import Ranks, current
from featcal.calibration.resume import block_name
from featcal.calibration.stacks import Run, handed_over, opened, started
from featcal.core.moments import TokenRule
from featcal.core.path import ridge_path
from featcal.core.precision import SUM_DTYPE, exact_products, wide
from featcal.core.ridge import anchor
from featcal.errors import NotFinite
from featcal.models.batch import Model, TaskBatches, check_tasks, naming
from featcal.models.load import evaluation_mode, load_as_calibrated
from featcal.models.modules import side_by_side
from featcal.models.plan import BlockPlan, Stack, blocks_of
from featcal.models.streamed import in_turn
from featcal.settings import OFF, Calibration, require
from featcal.tuning.search import (
    LOG_RIDGE,
    Batch,
    Candidate,
    Proposal,
    Search,
    Trials,
    Tuned,
    best,
    imported,
    mark_of,
    proposals,
    rounds,
    split_all,
)

SCORES_AT_ONCE = 2**24  # numbers of one matrix of scores: a vocabulary is wide


def task_divergence(
    task: str,
    model: nn.Module,
    expert: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    head: Head = None,
    scores: Tensor | None = None,
) -> float:
    """The mean over the rows of one task.

    head:   of CLIP, the weight (p, h) of visual_projection or a function; None where the model
            projects itself, or for text.
    scores: H_t (K, p) for pictures, with the temperature in it: of CLIP its logit scale times the
    classes' unit vectors.
    Raises: NotFinite for a model that puts out NaN; BadBatches.
    """
    total = torch.zeros((), dtype=SUM_DTYPE)
    count = 0
    model, expert = comparable(model, expert)
    with evaluation_mode([model, expert]):
        for number, batch in enumerate(batches):
            with naming(task, number):
                ours, theirs = (rows_before_head(one, batch, head)[0] for one in (model, expert))
            theirs = theirs.to(ours.device)
            if scores is None and output_embeddings(model) is None:
                found = 1 - cosine_similarity(wide(ours), wide(theirs), dim=-1)  # (rows,)
            else:
                pairs = answer_pairs(scored(model, ours, scores), scored(expert, theirs, scores))
                found = torch.cat([divergences(*pair) for pair in pairs])
            total += found.sum(dtype=SUM_DTYPE).cpu()
            count += len(found)
    if not torch.isfinite(total):
        raise NotFinite(f"model, task {task}", "its answers")
    return float(total) / count


def comparable(model: nn.Module, expert: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Both as they are, or their towers where heads answer other questions: other classes, other
    words, or one has none.
    """
    kinds = {type(one) for one in (model, expert)}
    words = {getattr(output_embeddings(one), "out_features", None) for one in (model, expert)}
    if len(kinds) == len(words) == 1 and not type(expert).__name__.endswith("Classification"):
        return model, expert
    return getattr(model, "base_model", model), getattr(expert, "base_model", expert)


class Scored:
    """Rows whose scores are made a few at a time."""

    def __init__(self, rows: Tensor, head: nn.Module | None, scores: Tensor | None):
        self.rows, self._head, self._scores = rows, head, scores
        self.width = len(scores) if scores is not None else int(getattr(head, "out_features", 1))

    def between(self, start: int, end: int) -> Tensor:
        """log softmax(z) of some rows, (rows, K)."""
        rows = self.rows[start:end]
        if self._scores is not None:
            rows = wide(rows)
            z = rows / rows.norm(dim=-1, keepdim=True) @ self._scores.to(rows).T
        else:
            assert self._head is not None
            z = wide(self._head(rows))
        return log_softmax(z, dim=-1)


def scored(model: nn.Module, rows: Tensor, scores: Tensor | None) -> Scored:
    """Rows with what turns them into scores: the task's head, or the model's own language head."""
    return Scored(rows, None if scores is not None else output_embeddings(model), scores)


def answer_pairs(ours: Any, theirs: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """log softmax(z) of both, some rows at a time, (rows, K) each on one device."""
    size = max(1, SCORES_AT_ONCE // ours.width)
    for start in range(0, len(ours.rows), size):
        here = ours.between(start, start + size)
        yield here, theirs.between(start, start + size).to(here.device)


def divergences(here: Tensor, there: Tensor) -> Tensor:
    """KL(p^t ‖ p) of every row, (rows,)."""
    return kl_div(here, there, reduction="none", log_target=True).sum(-1)


Gains = dict[str, Tensor]  # by site, for every λ

RIDGES = tuple(
    10 ** (LOG_RIDGE[0] + LOG_RIDGE[2] * n)
    for n in range(round((LOG_RIDGE[1] - LOG_RIDGE[0]) / LOG_RIDGE[2]) + 1)
)


def ridge_of(gains: Gains) -> float:
    """The λ with the largest sum over sites of gain(λ) / largest gain; sites without any gain are
    left out.

    The largest λ where no site gains anything: the anchor is best everywhere.
    """
    shares = [gain / gain.max() for gain in gains.values() if gain.max() > 0]
    return RIDGES[int(torch.stack(shares).sum(0).argmax())] if shares else RIDGES[-1]


def path_gains(
    merged: Model,
    base: Model,
    experts: Mapping[str, Model],
    kept: TaskBatches,
    held: TaskBatches,
    settings: Calibration,
    *,
    plan: BlockPlan | None = None,
    token_weights: TokenRule | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    host_memory: int | None = None,
    work: str | Path | None = None,
) -> Gains:
    """Gains of every site at every λ of RIDGES, on the way of a calibration with `settings` in
    forward order, as in the paper.

    What goes beyond the paper is left out here: the λ found is a candidate, which is calibrated
    with all of the settings.
    kept, held: batches of every task; blocks are solved on the former.   Raises: as `calibrate`.
    """
    settings = settings.but(order="forward", **OFF)
    with ExitStack() as open_:
        models = open_models(
            merged, base, experts, plan, settings, whole=True, device=device, dtype=dtype
        )
        open_.enter_context(models.evaluated())
        open_.enter_context(exact_products())
        spool = open_.enter_context(
            Spool(*budgets(models.device, host_memory), Path(work or tempfile.gettempdir()))
        )
        run = Run(models, len(experts), settings, token_weights, spool, None, False, Ranks(), None)
        parts = opened(run, kept), opened(run, held)
        handed: tuple[dict[str, EncoderOutputs], ...] = ({}, {})
        gains: Gains = {}
        for source, stack in models.plan.in_order:
            tracks = [
                started(run, source, stack, part, given)
                for part, given in zip(parts, handed, strict=True)
            ]
            gains |= stack_gains(run, stack, tracks[0], tracks[1], source.feeds if source else "")
            handed = tuple(handed_over(run, stack, each) if stack.feeds else {} for each in tracks)
        return gains


def stack_gains(
    run: Run,
    stack: Stack,
    kept: Mapping[str, StudentTeacherFeatures],
    held: Mapping[str, StudentTeacherFeatures],
    fed: str,
) -> Gains:
    """One stack, block by block: gains first, then the block is solved and both parts of the
    samples move behind it.
    """
    models, settings, gains = run.models, run.settings, Gains()
    rule = run.token_weights or models.plan.rule(stack)
    count = len(blocks_of(models.student.module, stack))
    for index in range(count):
        path = f"{stack.blocks}.{index}"
        with models.student.block(path) as block, models.base.block(path) as base:
            modules = calibrated_modules(block, settings.norm, settings.modules)
            view = BlockView(
                block_name(stack, index), stack, index + 1 == count, modules, rule, fed
            )
            seen, apart = Systems(), Systems()
            for task, teacher in in_turn(models.experts, path):
                add_task(seen, observe(block, teacher, kept[task], view), teacher, settings)
                add_task(apart, observe(block, teacher, held[task], view), teacher, settings)
            gains |= block_gains(seen, apart, block, base, view.name, settings)
            load(block, solve(seen, block, base, view.name, settings, run.ranks), settings)
            for task in models.experts:
                advance_student(block, stack, kept[task])
                advance_student(block, stack, held[task])
    return gains


def block_gains(
    seen: Systems,
    apart: Systems,
    block: nn.Module,
    base: nn.Module,
    place: str,
    settings: Calibration,
) -> Gains:
    """Gains at the sites of one block, which still holds the merged weights."""
    gains = Gains()
    for site, system in seen.sites.items():
        W, W_base = (
            side_by_side(module.get_submodule(name) for name in site)[0] for module in (block, base)
        )
        name = f"{place}.{'+'.join(site)}"
        gains[name] = ridge_path(system, anchor(W, W_base, settings.anchor_blend), site=name).gains(
            apart.sites[site], RIDGES
        )
    return gains


DEFAULT = Search()


def tune(
    merged: Model,
    *,
    base: Model,
    experts: Mapping[str, Model],
    batches: Mapping[str, Iterable[Batch]],
    settings: Calibration,
    head: Head = None,
    heads: Mapping[str, Tensor] | None = None,
    trials: int = DEFAULT.trials,
    holdout: float = DEFAULT.holdout,
    seed: int = DEFAULT.seed,
    plan: BlockPlan | None = None,
    token_weights: TokenRule | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    host_memory: int | None = None,
    work: str | Path | None = None,
    kept_in: str | Path | None = None,
    resume: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Tuned:
    """Choose λ, ρ and α from the inputs that a calibration sees, part of which is held out; no
    label is looked at.

    Every trial is a whole calibration in forward order, scored by `tuning.divergence`. The first is
    `settings`, the second the same with the λ of one pass along the path of every site
    (`tuning.path`), the others come from optuna's TPE sampler.

    Args:
        merged, base, experts, plan, token_weights, device, dtype, host_memory, work: as for
        `calibrate`.
        batches: as for `calibrate`; all are read before the first trial and stay in memory.
        settings: where the search begins; what is not λ, ρ or α stays as it is here.
        head, heads: of CLIP, the weight (p, h) of visual_projection and by task the scores' weights
        (K, p): the logit scale times
            the classes' unit vectors. Without `heads` features are compared instead of answers;
            text needs neither.
        trials, holdout, seed: how many calibrations, the share of samples held out, which samples
        and proposals are drawn.
        kept_in: a JSON file from which an interrupted search goes on; none where None.   resume:
        whether to.
        progress: called with one line of text per trial, and for the path.

    Returns: Tuned: the settings with the smallest divergence, and every candidate.
    Raises: what `calibrate` raises; BadSetting; MissingPath without the extra `tune`.
    """
    search = Search(trials=trials, holdout=holdout, seed=seed)
    require(
        isinstance(settings, Calibration),
        "settings",
        type(settings).__name__,
        "must be a featcal.Calibration",
    )
    check_tasks(experts, batches)
    require(
        current().world == 1,
        "tune",
        current().world,
        "must run in one process; start it without torchrun",
    )
    require(
        settings.interpolation != "auto",
        "calibrate.interpolation",
        "auto",
        "must be a number: α is what is searched for",
    )
    for task in experts if heads is not None else ():
        require(
            task in (heads or {}),
            "heads",
            sorted(heads or {}),
            f"must hold one for every task; {task} has none",
        )
    imported()  # before anything is computed
    own = {task: list(those) for task, those in batches.items()}
    kept, held = split_all(own, holdout, seed)
    models = {"merged": merged, "base": base} | {
        f"expert {task}": expert for task, expert in experts.items()
    }
    given: dict[str, Any] = {
        "plan": plan,
        "token_weights": token_weights,
        "device": device,
        "dtype": dtype,
    }
    given |= {"host_memory": host_memory, "work": work}
    told = (
        head if isinstance(head, Tensor) else repr(head),
        repr(plan and plan.stacks),
        repr(token_weights),
    )
    told += (settings, search, dtype)
    scores = [part for pair in sorted((heads or {}).items()) for part in pair]
    done = Trials.opened(
        Path(kept_in) if kept_in else None, mark_of(models, own, *told, *scores), resume
    )

    def tried(proposal: Proposal) -> Candidate:
        model = calibrate(
            merged, base=base, experts=experts, batches=kept, settings=proposal.settings, **given
        ).model
        assert model is not None
        return Candidate(
            proposal.number,
            proposal.origin,
            proposal.settings,
            distances(model, experts, held, head, heads),
        )

    if done.path is None:
        done.keep(path=ridge_of(path_gains(merged, base, experts, kept, held, settings, **given)))
        _tell(progress, f"path of every site: λ {done.path:.2g}")
    assert done.path is not None
    for numbers in rounds(search):
        known = [one for one in done.listed if one.number < numbers[0]]
        for proposal in proposals(search, numbers, settings, done.path, known):
            if proposal.number not in done.done:
                done.keep(tried(proposal))
            _tell(progress, line(done.done[proposal.number], trials))
    return Tuned(best(done.listed).settings, done.listed)


def distances(
    model: nn.Module,
    experts: Mapping[str, Model],
    held: Mapping[str, Iterable[Batch]],
    head: Head = None,
    heads: Mapping[str, Tensor] | None = None,
) -> dict[str, float]:
    """Divergence of one model from every expert, by task. Of experts given as folders one at a time
    is in memory.

    Experts answer anew for every model: to keep the scores of a whole vocabulary would take
    gigabytes.
    """
    weight = next(model.parameters())
    found = {}
    for task in sorted(experts):
        expert = experts[task]
        if not isinstance(expert, nn.Module):
            expert = load_as_calibrated(expert, weight.dtype).to(weight.device)
        found[task] = task_divergence(
            task, model, expert, held[task], head, heads[task] if heads else None
        )
    return found


def line(one: Candidate, trials: int) -> str:
    """One line of progress."""
    s = one.settings
    values = f"λ {s.ridge:.2g}  ρ {s.anchor_blend:g}  α {s.interpolation:g}"
    return f"trial {one.number + 1} of {trials}  {values}  divergence {one.mean:.4f}"


def _tell(progress: Callable[[str], None] | None, text: str) -> None:
    if progress:
        progress(text)
