"""Which settings are tried next: what was started from, the λ of the path, then optuna's sampler.

Every proposal comes from a sampler of its own, seeded by its number and told the trials before it.
So a search that was interrupted goes on as if it had not been, from a list of numbers alone.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

import numpy as np

from featcal.errors import BadEnvironment
from featcal.settings import Calibration
from featcal.tuning.settings import (
    INTERPOLATION,
    LOG_BLEND,
    LOG_RIDGE,
    Candidate,
    Proposal,
    Search,
    at,
)

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
