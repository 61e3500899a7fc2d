"""What a search for settings without labels came to: candidates, the chosen one, the best by test labels, and their distances.

Knows the study's file; knows nothing of pages.
"""

from dataclasses import dataclass

from reproduction.report.estimate import Estimate, estimate, noise
from reproduction.report.evidence import Evidence
from reproduction.report.markup import compact

SYMBOLS = {"ridge": "λ", "anchor_blend": "ρ", "interpolation": "α"}


@dataclass(frozen=True)
class Tried:
    """One calibrated model: its settings, its divergence from the experts without labels, its score on test samples."""

    trial: int
    origin: str
    chosen: bool
    settings: dict[str, float]
    divergence: float
    score: Estimate

    @property
    def words(self) -> str:
        """λ, ρ and α as one reads them."""
        return ", ".join(f"{symbol} {compact(self.settings[name])}" for name, symbol in SYMBOLS.items())


def tried(ours: Evidence) -> list[Tried]:
    """Every candidate in the order of trials, then the reference; empty where the study was not run."""
    found = []
    for trial, rows in ours.table("tune").groupby("trial", sort=True):
        first, score = rows.iloc[0], estimate(rows)
        assert score is not None
        settings = {name: float(first[name]) for name in SYMBOLS}
        found.append(Tried(int(str(trial)), first["origin"], bool(first["chosen"]), settings, float(first["divergence"]), score))
    return found


@dataclass(frozen=True)
class Found:
    """What one search came to.

    best: of the candidates, by test labels.   reference: settings chosen on labelled validation samples, no candidate; or None.
    """

    start: Tried
    chosen: Tried
    best: Tried
    reference: Tried | None
    candidates: tuple[Tried, ...]

    @property
    def distance(self) -> tuple[float, float]:
        """How far the chosen one is below the best, and two standard errors of that."""
        return self.best.score.mean - self.chosen.score.mean, noise(self.best.score, self.chosen.score)

    @property
    def gain(self) -> tuple[float, float]:
        """How far the chosen one is above the paper's settings, and two standard errors of that."""
        return self.chosen.score.mean - self.start.score.mean, noise(self.chosen.score, self.start.score)

    @property
    def agreement(self) -> float:
        """Rank correlation of smaller divergence with higher score over the candidates: 1 where both put them in one order."""
        import pandas as pd

        ranks = pd.DataFrame([(-one.divergence, one.score.mean) for one in self.candidates]).rank()
        return float(ranks[0].corr(ranks[1]))


def found(ours: Evidence) -> Found | None:
    """The outcome of one search; None where it was not run."""
    every = tried(ours)
    if not every:
        return None
    candidates = tuple(one for one in every if one.origin != "reference")
    chosen, best = next(one for one in candidates if one.chosen), max(candidates, key=lambda one: one.score.mean)
    reference = next((one for one in every if one.origin == "reference"), None)
    return Found(candidates[0], chosen, best, reference, candidates)
