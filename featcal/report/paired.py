"""Differences between models that were scored on the same test rows: which rows each got right, and the paired error.

Two models that mostly stumble over the same images differ by less than their own errors say. Knows bits and result rows; knows
nothing of claims or pages.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from featcal.errors import BadFile
from featcal.report.estimate import estimate, image_variances

Bits = npt.NDArray[np.bool_]
Part = tuple[float, pd.DataFrame]  # a weight, and the rows of one model
KEPT = ("value", "count", "correct")  # columns of scores or of correctness that name no row
ROUNDED = 1e-4  # values have four decimals
_AGAIN = "write both again: dvc repro"


@lru_cache(maxsize=4096)
def bits(text: str, count: int) -> Bits:
    """Which of `count` test rows, (count,), from the hexadecimal text of bits packed first row first, padded with zeros.

    Raises: ValueError where the text holds another number of rows.
    """
    packed = np.frombuffer(bytes.fromhex(text), np.uint8)
    found = np.unpackbits(packed, bitorder="big")
    if len(packed) != math.ceil(count / 8) or found[count:].any():
        raise ValueError(f"{len(packed)} bytes do not hold {count} rows padded with zeros")
    return found[:count].astype(bool)


def text_of(rows: Bits) -> str:
    """The text that `bits` reads."""
    return np.packbits(rows, bitorder="big").tobytes().hex()


def with_correct(scores: pd.DataFrame, correct: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Scores with the column `correct` of the file beside them; empty where a metric counts no single row.

    Raises: BadFile where a text cannot be read, or says another accuracy than the score.
    """
    keys = [column for column in scores.columns if column in correct and column not in KEPT]
    if correct.duplicated(keys).any():
        raise BadFile(path, "two rows are about the same model and task", _AGAIN)
    found = scores.merge(correct[[*keys, "correct"]], on=keys, how="left").fillna({"correct": ""})
    for text, count, value, task in zip(found["correct"], found["count"], found["value"], found["task"], strict=True):
        try:
            said = 100 * bits(text, int(count)).mean() if text else value
        except ValueError as error:
            raise BadFile(path, f"{task}: {error}", _AGAIN) from None
        if abs(said - value) > ROUNDED:
            raise BadFile(path, f"{task}: {said:.4f} % are correct, but the scores say {value:.4f}", _AGAIN)
    return found


@dataclass(frozen=True)
class Difference:
    """A weighted sum of means, Σ wₖ·meanₖ.

    means: of the parts.   variance: of the sum.   known: whether its error is, be it of the test rows or of all that was
    drawn.   one_run: whether something
    was drawn, but only once.   pairing: "unpaired" where errors were added as if the models had seen other rows, "partly unpaired" where
    that is so of some tasks, else empty.
    """

    means: list[float]
    value: float
    variance: float
    known: bool
    one_run: bool
    pairing: str

    @property
    def noise(self) -> float:
        """Two standard errors."""
        return 2 * math.sqrt(self.variance)


def difference(parts: Sequence[Part], measure: str = "value") -> Difference | None:
    """A weighted sum of the means of several models, with the error of the sum.

    Test rows: with cₜᵢ = Σ wₖ·xₖₜᵢ/Tₖ, where xₖₜᵢ in percent says whether model k got row i of task t right (its mean over seeds)
    and Tₖ is its number of tasks, the sum is Σₜ meanᵢ cₜᵢ, with variance Σₜ s²(cₜ)/nₜ. For two models and one seed cₜᵢ counts the
    discordant rows (McNemar). Tasks where the correctness of some model is unknown add Σₖ wₖ² times each model's own variance.
    Seeds: Σ wₖ²·s²ₖ/Sₖ, as `estimate` has it.
    """
    found = [estimate(rows, measure) for _, rows in parts]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None
    seeds = sum(weight**2 * one.seed_variance for (weight, _), one in zip(parts, known, strict=True))
    apart = [image_variances(rows, measure) for _, rows in parts]
    tasks = dict.fromkeys(task for variances in apart for task in variances)
    images, unpaired = 0.0, 0
    for task in tasks:
        together = _paired(parts, task) if measure == "value" else None
        if together is None:
            unpaired += 1
            together = math.fsum(w**2 * variances.get(task, 0.0) for (w, _), variances in zip(parts, apart, strict=True))
        images += together
    value = math.fsum(weight * one.mean for (weight, _), one in zip(parts, known, strict=True))
    sure = bool(tasks) or (any(one.spread is not None for one in known) and not any(one.one_run for one in known))
    one_run = any(one.one_run for one in known)
    pairing = "" if not unpaired else "unpaired" if unpaired == len(tasks) else "partly unpaired"
    return Difference([one.mean for one in known], value, images + seeds, sure, one_run, pairing)


def noise_of(left: pd.DataFrame, right: pd.DataFrame) -> float:
    """Two standard errors of the difference of two models' means, paired where that is known. Both must have rows."""
    found = difference([(1.0, left), (-1.0, right)])
    assert found is not None
    return found.noise


def _paired(parts: Sequence[Part], task: object) -> float | None:
    """s²(c)/n of one task; None where the correctness of some row is unknown or the rows are not of the same test set."""
    sums: npt.NDArray[np.float64] | None = None
    for weight, rows in parts:
        own = rows[rows["task"] == task]
        if own.empty:
            continue
        if "correct" not in own or (own["correct"].fillna("") == "").any():
            return None
        drawn = rows["seed"].tolist()
        for seed, text, count in zip(own["seed"], own["correct"], own["count"], strict=True):
            share = weight / (len(set(drawn)) * drawn.count(seed))  # of this row in the mean over seeds of means over tasks
            right = 100 * share * bits(text, int(count))
            if sums is not None and len(sums) != len(right):
                return None
            sums = right if sums is None else sums + right
    return None if sums is None or len(sums) < 2 else float(sums.var(ddof=1)) / len(sums)
