"""The public function `tune`: λ, ρ and α chosen without labels, by how near calibrated models come
to their experts' answers.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featcal.baselines.features import Head
from featcal.blocks.batches import check_tasks
from featcal.blocks.plan import BlockPlan
from featcal.calibration.calibrate import calibrate
from featcal.calibration.models import Model
from featcal.calibration.ranks import current
from featcal.core.weighting import TokenRule
from featcal.models.load import load_as_calibrated
from featcal.settings import Calibration, require
from featcal.tuning.divergence import task_divergence
from featcal.tuning.holdout import Batch, split_all
from featcal.tuning.path import path_gains, ridge_of
from featcal.tuning.proposals import imported, proposals, rounds
from featcal.tuning.settings import Candidate, Proposal, Search, Tuned, best
from featcal.tuning.trials import Trials, mark_of

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
