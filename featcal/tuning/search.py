"""What a search for λ, ρ and α tries and finds, as settings; and where it looks.

Knows nothing of torch or models."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from zlib import crc32

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor

from featcal import __version__
from featcal.calibration.features import rows, size
from featcal.calibration.resume import Digest, add_model
from featcal.errors import BadBatches, BadEnvironment
from featcal.files import read_json, write_json
from featcal.models.batch import Batch, Model
from featcal.settings import Calibration, Settings

Origin = Literal["start", "path", "search"]

# Ends and steps of the search. λ on a logarithmic scale, from where a Cholesky factor still exists
# in float64 to where the anchor
# is all that is left; ρ by log₂(1 + ρ), from the base (0) to fifteen times the merged change (4),
# where ratios count and not
# differences. All values that the paper uses and sweeps lie inside.
LOG_RIDGE = (-6.0, 1.0, 0.25)
LOG_BLEND = (0.0, 4.0, 0.1)
INTERPOLATION = (0.0, 1.0, 0.05)


class Search(Settings):
    """How λ, ρ and α are searched for.

    trials:  calibrated models that are tried.   holdout: share of every task's samples that no
             calibration sees.
    at_once: trials that are proposed together, knowing all that came before them; 1 unless they are
    run side by side.
    """

    section = "tune"
    trials: PositiveInt = 16
    holdout: Annotated[float, Field(gt=0, lt=1)] = 0.25
    seed: NonNegativeInt = 42
    at_once: PositiveInt = 1


@dataclass(frozen=True)
class Proposal:
    """Settings to be tried. origin: what was started from, the λ of the path, or the sampler's."""

    number: int
    origin: Origin
    settings: Calibration


@dataclass(frozen=True)
class Candidate(Proposal):
    """Settings that were tried. divergence: by task, from the expert on the samples held out;
    smaller is better.
    """

    divergence: Mapping[str, float]

    @property
    def mean(self) -> float:
        """Over tasks, which count alike."""
        return sum(self.divergence.values()) / len(self.divergence)

    @property
    def content(self) -> dict[str, Any]:
        """Return what is written to a file."""
        return vars(self) | {"settings": self.settings.model_dump()}


@dataclass(frozen=True)
class Tuned:
    """What `tune` returns."""

    settings: Calibration
    candidates: Sequence[Candidate]  # in the order of their numbers

    @property
    def best(self) -> Candidate:
        """The candidate whose settings were chosen."""
        return best(self.candidates)


def best(candidates: Sequence[Candidate]) -> Candidate:
    """The one nearest to the experts; of equals the first."""
    return min(candidates, key=lambda one: (one.mean, one.number))


def at(
    settings: Calibration, ridge: float, anchor_blend: float, interpolation: float
) -> Calibration:
    """The settings with λ, ρ and α in their place, in as many digits as one would type."""
    return settings.but(
        ridge=float(f"{ridge:.2g}"),
        anchor_blend=round(anchor_blend, 2),
        interpolation=round(interpolation, 4),
    )


Split = tuple[dict[str, list[Batch]], dict[str, list[Batch]]]  # kept and held out, by task


def split_all(batches: Mapping[str, Iterable[Batch]], share: float, seed: int) -> Split:
    """The batches of every task without the samples held out, and those samples in batches of their
    own.
    """
    parts = {task: split(task, batches[task], share, seed) for task in sorted(batches)}
    return {task: kept for task, (kept, _) in parts.items()}, {
        task: held for task, (_, held) in parts.items()
    }


def split(
    task: str, batches: Iterable[Batch], share: float, seed: int
) -> tuple[list[Batch], list[Batch]]:
    """One task; at least one sample on either side. Raises: BadBatches for fewer than two samples,
    or for no mapping.
    """
    read = list(batches)
    sizes = [size(task, number, batch) for number, batch in enumerate(read)]
    count = sum(sizes)
    if count < 2:
        raise BadBatches(
            task, f"has {count} sample{'s' * (count != 1)}; two are needed, as one is held out"
        )
    wanted = min(max(1, round(share * count)), count - 1)
    generator = np.random.default_rng([seed, crc32(task.encode()), crc32(b"holdout")])
    apart = torch.zeros(count, dtype=torch.bool)
    apart[torch.from_numpy(generator.permutation(count)[:wanted])] = True
    kept, held = [], []
    for batch, own in zip(read, apart.split(sizes), strict=True):
        kept += [rows(batch, ~own)] if not own.all() else []
        held += [rows(batch, own)] if own.any() else []
    return kept, held


AT_RANDOM = 6  # trials before the sampler draws conclusions from them
ATTEMPTS = 20  # to propose something that was not tried


def rounds(search: Search) -> Iterator[range]:
    """Numbers of the trials that are proposed together."""
    yield from (
        range(n, min(n + search.at_once, search.trials))
        for n in range(0, search.trials, search.at_once)
    )


def proposals(
    search: Search, numbers: range, start: Calibration, path: float, known: Sequence[Candidate]
) -> list[Proposal]:
    """What the trials with these numbers are.

    start: where the search begins, and all that is not searched for.   path: λ that the path gives
    there.
    known: all trials of earlier rounds.
    """
    found: list[Proposal] = []
    for number in numbers:
        if number == 0:
            found.append(Proposal(0, "start", start))
        elif number == 1:
            found.append(
                Proposal(1, "path", at(start, path, start.anchor_blend, start.interpolation))
            )
        else:
            taken = {one.settings for one in (*known, *found)}
            found.append(
                Proposal(number, "search", drawn(search.seed, number, start, known, taken))
            )
    return found


def drawn(
    seed: int, number: int, start: Calibration, known: Sequence[Candidate], taken: set[Calibration]
) -> Calibration:
    """One proposal of the sampler (TPE; Bergstra et al., 2011): at random while little is known,
    then where trials were good.
    """
    optuna = imported()
    space = {
        name: optuna.distributions.FloatDistribution(low, high, step=step)
        for name, (low, high, step) in (
            ("log_ridge", LOG_RIDGE), ("log_blend", LOG_BLEND), ("interpolation", INTERPOLATION)
        )
    }  # fmt: skip
    settings = start
    for attempt in range(ATTEMPTS):
        draw = np.random.SeedSequence([seed, number, attempt, crc32(b"tune")]).generate_state(1)[0]
        study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=int(draw), n_startup_trials=AT_RANDOM)
        )
        for one in known:
            study.add_trial(
                optuna.trial.create_trial(
                    params=place(one.settings), distributions=space, value=one.mean
                )
            )
        params = study.ask(space).params
        settings = at(
            start, 10 ** params["log_ridge"], 2 ** params["log_blend"] - 1, params["interpolation"]
        )
        if settings not in taken:
            break
    return settings


def place(settings: Calibration) -> dict[str, float]:
    """Settings as a point of the search space: the nearest one, as what was started from need not
    lie on its grid.
    """
    values = {
        "log_ridge": (math.log10(settings.ridge), LOG_RIDGE),
        "log_blend": (math.log2(1 + max(settings.anchor_blend, 0)), LOG_BLEND),
        "interpolation": (settings.interpolation, INTERPOLATION),
    }
    return {name: nearest(value, *ends) for name, (value, ends) in values.items()}


def nearest(value: float, low: float, high: float, step: float) -> float:
    """The nearest of low, low + step, … high."""
    return min(max(low + round((value - low) / step) * step, low), high)


def imported() -> Any:
    """Optuna, without its messages. Raises: BadEnvironment where it is not installed."""
    try:
        import optuna
    except ImportError:
        way_out = "install it: pip install 'featcal[tune]'"
        raise BadEnvironment(
            "optuna", "the package that searches is not installed", way_out
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


@dataclass
class Trials:
    """What is finished so far, kept in a file where there is one.

    mark: what the search depends on, as one text.   path: λ that the path gave, None until it is
    known.
    """

    file: Path | None
    mark: str
    path: float | None
    done: dict[int, Candidate]

    @classmethod
    def opened(cls, file: Path | None, mark: str, resume: bool) -> "Trials":
        """What an earlier run of the same search has finished; nothing without `resume`."""
        trials = cls(file, mark, None, {})
        found = read_json(file) if file is not None and resume and file.is_file() else {}
        if isinstance(found, dict) and found.get("search") == mark:
            trials.path = found["path"]
            trials.done = {entry["number"]: _candidate(entry) for entry in found["trials"]}
        return trials

    def keep(self, *candidates: Candidate, path: float | None = None) -> None:
        """Add trials, or the λ of the path, and write the file."""
        self.done |= {one.number: one for one in candidates}
        self.path = self.path if path is None else path
        if self.file is not None:
            listed = [one.content for one in self.listed]
            write_json(self.file, {"search": self.mark, "path": self.path, "trials": listed})

    @property
    def listed(self) -> list[Candidate]:
        """In the order of their numbers."""
        return [self.done[number] for number in sorted(self.done)]


def _candidate(entry: Mapping[str, Any]) -> Candidate:
    settings = Calibration.from_mapping(entry["settings"], "trials")
    return Candidate(entry["number"], entry["origin"], settings, entry["divergence"])


def mark_of(models: Mapping[str, Model], batches: Mapping[str, list[Batch]], *more: object) -> str:
    """Of models by role, samples by task, and whatever else a search depends on."""
    digest = Digest()
    for role, model in sorted(models.items()):
        digest.add(role)
        add_model(digest, Path(model) if isinstance(model, str) else model)
    for task, those in sorted(batches.items()):
        digest.add(task, len(those))
        for batch in those:
            digest.add(*batch, *(value for value in batch.values() if isinstance(value, Tensor)))
    digest.add(__version__, *more)
    return str(digest)
