"""The search for λ, ρ and α: its settings, held-out samples, proposals, and finished trials.

optuna's TPE sampler proposes settings; the trials can be kept in a file.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from zlib import crc32

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor

from featcal import __version__
from featcal.calibration.resume import Digest, add_model
from featcal.errors import BadBatches, BadEnvironment
from featcal.files import read_json, write_json
from featcal.models.batch import Batch, Batches, Model, TaskBatches
from featcal.settings import Calibration, Settings

Origin = Literal["start", "path", "search"]

# First, last and step. log₁₀ λ goes from where a Cholesky factor still exists in float64 to where
# the anchor alone is left; log₂(1 + ρ) from the base (0) to fifteen times the merged change (4),
# where ratios matter more than differences. All values that the paper uses and sweeps lie inside.
LOG_RIDGE = (-6.0, 1.0, 0.25)
LOG_BLEND = (0.0, 4.0, 0.1)
INTERPOLATION = (0.0, 1.0, 0.05)
GRIDS = {"log_ridge": LOG_RIDGE, "log_blend": LOG_BLEND, "interpolation": INTERPOLATION}
RANDOM_TRIALS = 6  # before the sampler draws conclusions from earlier trials
ATTEMPTS = 20  # to propose settings that were not tried


class Search(Settings):
    """How λ, ρ and α are searched for.

    trials:  number of calibrated models.   holdout: share of every task's samples that no
             calibration sees.
    n_jobs:  trials that are proposed together and can run in parallel; each knows only trials of
             earlier rounds.
    """

    section = "tune"
    trials: PositiveInt = 16
    holdout: Annotated[float, Field(gt=0, lt=1)] = 0.25
    seed: NonNegativeInt = 42
    n_jobs: PositiveInt = 1


@dataclass(frozen=True)
class Proposal:
    """Settings to try. origin: the start, the λ of the regularisation path, or the sampler."""

    number: int
    origin: Origin
    settings: Calibration


@dataclass(frozen=True)
class Candidate(Proposal):
    """Settings that were tried. divergence: by task, from the expert on the held-out samples;
    smaller is better.
    """

    divergence: Mapping[str, float]

    @property
    def mean(self) -> float:
        """Return the mean over tasks."""
        return sum(self.divergence.values()) / len(self.divergence)

    @property
    def content(self) -> dict[str, Any]:
        """Return the fields for a JSON file."""
        return vars(self) | {"settings": self.settings.model_dump()}


@dataclass(frozen=True)
class Tuned:
    """The result of `tune`: the chosen settings, and all candidates in the order of trials."""

    settings: Calibration
    candidates: Sequence[Candidate]

    @property
    def best(self) -> Candidate:
        """Return the candidate whose settings were chosen."""
        return best(self.candidates)


def best(candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate nearest to the experts; of equals the first."""
    return min(candidates, key=lambda candidate: (candidate.mean, candidate.number))


Split = tuple[dict[str, list[Batch]], dict[str, list[Batch]]]  # kept and held out, by task


def split_all(batches: TaskBatches, share: float, seed: int) -> Split:
    """Split every task's samples into batches to keep and batches to hold out."""
    parts = {task: split(task, batches[task], share, seed) for task in sorted(batches)}
    kept, held_out = ({task: pair[i] for task, pair in parts.items()} for i in (0, 1))
    return kept, held_out


def split(task: str, batches: Batches, share: float, seed: int) -> tuple[list[Batch], list[Batch]]:
    """Split one task; at least one sample on either side. Raises: BadBatches for fewer than two
    samples, or for a batch that is no mapping.
    """
    batches = list(batches)
    sizes = [sample_count(task, number, batch) for number, batch in enumerate(batches)]
    count = sum(sizes)
    if count < 2:
        samples = f"{count} sample{'s' * (count != 1)}"
        raise BadBatches(task, f"has {samples}; two are needed, as one is held out")
    draws = np.random.default_rng([seed, crc32(task.encode()), crc32(b"holdout")])
    chosen = draws.permutation(count)[: min(max(1, round(share * count)), count - 1)]
    is_held_out = torch.zeros(count, dtype=torch.bool)
    is_held_out[torch.from_numpy(chosen)] = True
    kept, held_out = [], []
    for batch, mask in zip(batches, is_held_out.split(sizes), strict=True):
        kept += [select_samples(batch, ~mask)] if not mask.all() else []
        held_out += [select_samples(batch, mask)] if mask.any() else []
    return kept, held_out


def sample_count(task: str, number: int, batch: Batch) -> int:
    """Return the number of samples of a batch. Raises: BadBatches for one without a tensor."""
    values = batch.values() if isinstance(batch, Mapping) else ()
    for value in values:
        if isinstance(value, Tensor):
            return len(value)
    expected = "expected a mapping such as {'pixel_values': tensor}"
    raise BadBatches(task, f"batch {number} holds no tensor; {expected}")


def select_samples(batch: Batch, chosen: Tensor) -> Batch:
    """Return some samples of a batch; values that are no tensor with one row per sample stay."""
    return {
        name: value[chosen.to(value.device)]
        if isinstance(value, Tensor) and len(value) == len(chosen)
        else value
        for name, value in batch.items()
    }


def rounds(search: Search) -> Iterator[range]:
    """Yield the numbers of the trials that are proposed together."""
    for first in range(0, search.trials, search.n_jobs):
        yield range(first, min(first + search.n_jobs, search.trials))


def proposals(
    search: Search, indices: range, start: Calibration, path_ridge: float, known: list[Candidate]
) -> list[Proposal]:
    """Return the trials with these indices.

    start: where the search begins; settings other than λ, ρ and α stay as there.
    path_ridge: λ of the regularisation path.   known: all trials of earlier rounds.
    """
    proposed: list[Proposal] = []
    for number in indices:
        if number == 0:
            proposed.append(Proposal(0, "start", start))
        elif number == 1:
            settings = rounded(start, path_ridge, start.anchor_blend, start.interpolation)
            proposed.append(Proposal(1, "path", settings))
        else:
            tried = {one.settings for one in (*known, *proposed)}
            settings = sampled(search.seed, number, start, known, tried)
            proposed.append(Proposal(number, "search", settings))
    return proposed


def sampled(
    seed: int, number: int, start: Calibration, known: list[Candidate], tried: set[Calibration]
) -> Calibration:
    """Return one proposal of the sampler (TPE; Bergstra et al., 2011): random in early trials, then
    where trials were good.
    """
    optuna = imported()
    space = {
        name: optuna.distributions.FloatDistribution(low, high, step=step)
        for name, (low, high, step) in GRIDS.items()
    }
    settings = start
    for attempt in range(ATTEMPTS):
        draw = np.random.SeedSequence([seed, number, attempt, crc32(b"tune")]).generate_state(1)[0]
        sampler = optuna.samplers.TPESampler(seed=int(draw), n_startup_trials=RANDOM_TRIALS)
        study = optuna.create_study(sampler=sampler)
        for one in known:
            trial = optuna.trial.create_trial(
                params=grid_point(one.settings), distributions=space, value=one.mean
            )
            study.add_trial(trial)
        params = study.ask(space).params
        log_ridge, log_blend, interpolation = (params[name] for name in GRIDS)
        settings = rounded(start, 10**log_ridge, 2**log_blend - 1, interpolation)
        if settings not in tried:
            break
    return settings


def rounded(settings: Calibration, ridge: float, blend: float, interpolation: float) -> Calibration:
    """Return the settings with λ, ρ and α in as many digits as one would type."""
    return settings.but(
        ridge=float(f"{ridge:.2g}"),
        anchor_blend=round(blend, 2),
        interpolation=round(interpolation, 4),
    )


def grid_point(settings: Calibration) -> dict[str, float]:
    """Return the nearest point of the search space; the start need not lie on its grid."""
    values = {
        "log_ridge": math.log10(settings.ridge),
        "log_blend": math.log2(1 + max(settings.anchor_blend, 0)),
        "interpolation": settings.interpolation,
    }
    return {
        name: min(max(low + round((values[name] - low) / step) * step, low), high)
        for name, (low, high, step) in GRIDS.items()
    }


def imported() -> Any:
    """Return optuna, without its messages. Raises: BadEnvironment if it is not installed."""
    try:
        import optuna
    except ImportError:
        way_out = "install it: pip install 'featcal[tune]'"
        problem = "the package that searches is not installed"
        raise BadEnvironment("optuna", problem, way_out) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


@dataclass
class Trials:
    """Finished trials, kept in a file if there is one.

    mark: a hash of what the search depends on.   path_ridge: λ of the path, None until it is known.
    """

    file: Path | None
    mark: str
    path_ridge: float | None = None
    finished: dict[int, Candidate] = field(default_factory=dict)

    @classmethod
    def opened(cls, file: Path | None, mark: str, resume: bool) -> "Trials":
        """Return the trials of an earlier run of the same search; none without `resume`."""
        trials = cls(file, mark)
        content = read_json(file) if file is not None and resume and file.is_file() else {}
        if isinstance(content, dict) and content.get("search") == mark:
            trials.path_ridge = content["path"]
            for entry in content["trials"]:
                settings = Calibration.from_mapping(entry["settings"], "trials")
                candidate = Candidate(**{**entry, "settings": settings})
                trials.finished[candidate.number] = candidate
        return trials

    def add(self, *candidates: Candidate, path_ridge: float | None = None) -> None:
        """Add trials, or the λ of the path, and write the file."""
        self.finished |= {candidate.number: candidate for candidate in candidates}
        self.path_ridge = self.path_ridge if path_ridge is None else path_ridge
        if self.file is not None:
            trials = [candidate.content for candidate in self.in_order]
            content = {"search": self.mark, "path": self.path_ridge, "trials": trials}
            write_json(self.file, content)

    @property
    def in_order(self) -> list[Candidate]:
        """Return the finished trials in the order of their numbers."""
        return [self.finished[number] for number in sorted(self.finished)]


def mark_of(models: Mapping[str, Model], batches: Mapping[str, list[Batch]], *more: object) -> str:
    """Return a hash of models by role, samples by task, and whatever else a search depends on."""
    digest = Digest()
    for role, model in sorted(models.items()):
        digest.add(role)
        add_model(digest, Path(model) if isinstance(model, str) else model)
    for task, own in sorted(batches.items()):
        digest.add(task, len(own))
        for batch in own:
            digest.add(*batch, *(value for value in batch.values() if isinstance(value, Tensor)))
    digest.add(__version__, *more)
    return str(digest)
