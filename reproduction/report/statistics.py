"""Errors of measured means: from test samples, paired where possible, and from seeds."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import stdev, variance
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from featcal.errors import BadData, BadFile

TRAINED = "value of training "  # prefix of columns from further trainings of the experts


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks (and blocks) and seeds, in the unit of its column, and its rows."""

    mean: float
    spread: float | None  # standard deviation over seeds, None with fewer than two
    seeds: int  # how many distinct seeds, 0 where nothing was drawn
    rows: pd.DataFrame | None = field(default=None, repr=False, compare=False)
    measure: str = "value"
    known_variance: float = 0.0  # of a mean whose rows are unknown

    @property
    def one_run(self) -> bool:
        """Return True if something was drawn, but only once: its spread is unknown."""
        return self.seeds == 1

    @cached_property
    def image_variances(self) -> dict[Hashable, float]:
        """Return each task's part of the variance; computed on first use."""
        return {} if self.rows is None else image_variances(self.rows, self.measure)

    @property
    def variance(self) -> float:
        """Return the variance of the mean, in the square of its unit."""
        if self.rows is None:
            return self.known_variance
        return math.fsum(self.image_variances.values()) + self.seed_variance

    @property
    def seed_variance(self) -> float:
        """Return the part of the variance from seeds, s²/S; 0 where it is unknown."""
        return 0.0 if self.spread is None else self.spread**2 / self.seeds


def estimate(rows: pd.DataFrame, measure: str = "value") -> Estimate | None:
    """Return the mean of a column, first over the rows of one seed, then over seeds.

    The variance adds two parts. Test samples: an accuracy p of n samples has variance p(1 − p)/n, and
    the mean over T tasks Σ pₜ(1 − pₜ)/nₜ / T²; more seeds do not shrink it, since all are scored on
    the same samples. Seeds: s²/S for S ≥ 2 seeds with standard deviation s. A rank correlation has
    `spearman_variance`, a mean cosine of n samples with standard deviation s has s²/n; other columns
    have the part of the seeds only. Return None without rows.
    """
    if rows.empty or measure not in rows:
        return None
    seeds = rows["seed"].tolist() if "seed" in rows else [""] * len(rows)
    means = {seed: mean(values) for seed, values in grouped(seeds, rows[measure].tolist()).items()}
    spread = stdev(means.values()) if len(means) > 1 else None
    seed_count = sum(1 for seed in means if seed != "")
    return Estimate(mean(means.values()), spread, seed_count, rows, measure)


def highest(estimates: Iterable[Estimate | None]) -> Estimate | None:
    """Return the estimate with the highest mean, ignoring None."""
    return max(filter(None, estimates), key=lambda estimate: estimate.mean, default=None)


def grouped(keys: Iterable[Hashable], values: Iterable[Any]) -> dict[Hashable, list[Any]]:
    """Return values by key; pandas' own groups are slow for a few rows."""
    groups: dict[Hashable, list[Any]] = {}
    for key, value in zip(keys, values, strict=True):
        groups.setdefault(key, []).append(value)
    return groups


def first_known(keys: Iterable[Hashable], values: Iterable[Any]) -> dict[Hashable, Any]:
    """Return the first value of every key that is not NaN, or NaN."""
    groups = grouped(keys, values).items()
    return {key: next((v for v in group if v == v), math.nan) for key, group in groups}


def mean(values: Iterable[float]) -> float:
    """Return the mean of the values that are not NaN, summed exactly; NaN without any."""
    measured = [value for value in values if not math.isnan(value)]
    return math.fsum(measured) / len(measured) if measured else math.nan


def image_variances(rows: pd.DataFrame, measure: str) -> dict[Hashable, float]:
    """Return each task's part of a mean's variance from its test samples; empty if unknown."""
    if "count" not in rows or "task" not in rows:
        return {}
    tasks = rows["task"].tolist()
    counts = first_known(tasks, rows["count"].tolist())
    if f"{measure}_sd" in rows:
        spreads = first_known(tasks, rows[f"{measure}_sd"].tolist())
        variances = {task: sd**2 / counts[task] for task, sd in spreads.items()}
    elif measure == "value" and "metric" in rows and set(rows["metric"]) <= set(VARIANCES):
        metrics = first_known(tasks, rows["metric"].tolist())
        values = grouped(tasks, rows["value"].tolist())
        means = {task: mean(group) for task, group in values.items()}
        variances = {task: VARIANCES[metrics[task]](m, counts[task]) for task, m in means.items()}
    else:
        return {}
    known = {task: 0.0 if math.isnan(part) else part for task, part in variances.items()}
    return {task: part / len(counts) ** 2 for task, part in known.items()}


def spearman_variance(value: float, count: int) -> float:
    """Return the variance of Spearman's ρ of n pairs, in squared percent; 0 for n ≤ 3.

    (1 − ρ²)² (1 + ρ²/2) / (n − 3), as dρ/dz = 1 − ρ² (Bonett and Wright, Psychometrika 65, 2000).
    """
    squared = (value / 100) ** 2
    return 100**2 * (1 - squared) ** 2 * (1 + squared / 2) / (count - 3) if count > 3 else 0.0


VARIANCES: dict[str, Callable[[float, int], float]] = {  # of one task's value, by metric
    "accuracy": lambda value, count: value * (100 - value) / count,  # p(1 − p)/n, squared percent
    "spearman": spearman_variance,
}


@dataclass(frozen=True)
class WeightedSum:
    """A weighted sum of means, Σ wₖ·meanₖ."""

    means: list[float]
    value: float
    variance: float
    seed_variance: float  # the part from seeds
    training_variance: float  # the part from trainings of the experts
    has_error: bool  # whether its error is known
    one_run: bool  # whether something was drawn only once
    pairing: str  # "unpaired", "partly unpaired": errors added as if of other test rows

    @property
    def noise(self) -> float:
        """Return two standard errors."""
        return 2 * math.sqrt(self.variance)


def difference(parts: Sequence[tuple[float, Estimate]]) -> WeightedSum:
    """Return a weighted sum of the means of several models, with the error of the sum.

    Test rows: tasks add `paired_variances` where every model's correctness is known row by row, else
    Σ wₖ² times each model's own variance. Seeds: Σ wₖ²·s²ₖ/Sₖ. Experts: the sum's variance between
    their trainings, where every model was made from at least three; the sum is of the first.
    """
    rows = [(weight, part.rows) for weight, part in parts if part.rows is not None]
    models = [(w**2, part.image_variances) for w, part in parts if part.rows is not None]
    tasks = dict.fromkeys(task for _, variances in models for task in variances)
    is_score = all(part.measure == "value" for _, part in parts)
    paired = paired_variances(rows, tasks) if is_score else dict.fromkeys(tasks)
    unpaired = [task for task, value in paired.items() if value is None]
    for task in unpaired:
        paired[task] = math.fsum(w * variances.get(task, 0.0) for w, variances in models)
    images = list(paired.values())
    images += [weight**2 * part.variance for weight, part in parts if part.rows is None]
    seeds = [weight**2 * part.seed_variance for weight, part in parts if part.rows is not None]
    one_run = any(part.one_run for _, part in parts)
    has_error = bool(tasks) or (any(part.spread is not None for _, part in parts) and not one_run)
    whole = len(unpaired) == len(tasks) or len(rows) < len(parts)
    pairing = ("unpaired" if whole else "partly unpaired") if unpaired else ""
    value = math.fsum(weight * part.mean for weight, part in parts)
    sums = [value, *by_training(parts)] if is_score else []
    experts = variance(sums) if len(sums) > 2 else 0.0
    total, means = math.fsum([*images, *seeds, experts]), [part.mean for _, part in parts]
    seed_variance = math.fsum(seeds)
    return WeightedSum(means, value, total, seed_variance, experts, has_error, one_run, pairing)


def by_training(parts: Sequence[tuple[float, Estimate]]) -> list[float]:
    """Return the weighted sum of means for each further training that all models were run with."""
    frames = [(weight, part.rows) for weight, part in parts if part.rows is not None]
    names = dict.fromkeys(name for _, rows in frames for name in rows if name.startswith(TRAINED))
    sums = []
    for name in names:
        runs = [(weight, rows, rows[rows[name].notna()]) for weight, rows in frames if name in rows]
        same_tasks = all(set(scored["task"]) == set(rows["task"]) for _, rows, scored in runs)
        if same_tasks and len(runs) == len(parts):
            sums.append(math.fsum(weight * mean(scored[name]) for weight, _, scored in runs))
    return sums


def lead(left: Estimate, right: Estimate) -> tuple[float, float]:
    """Return left's mean minus right's, and two standard errors of it, paired where possible."""
    result = difference([(1.0, left), (-1.0, right)])
    return result.value, result.noise


RESULTS = ("value", "count", "correct")  # columns of scores or of correctness that name no row
ROUNDED = 1e-4  # values have four decimals
_AGAIN = "write the result files again: dvc repro"


@lru_cache(maxsize=4096)
def bits(text: str, count: int) -> npt.NDArray[np.bool_]:
    """Return which of `count` samples were right, from the text that `results.packed` wrote."""
    try:
        right = np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8)).astype(bool)
    except ValueError:
        right = np.zeros(0, bool)
    if len(right) != count + -count % 8 or right[count:].any():
        problem = f"not the hexadecimal text of {count} samples"
        raise BadData(f"correctness {text[:16]!r}…", problem, _AGAIN)
    right.flags.writeable = False  # every caller gets the same array
    return right[:count]


def with_correct(scores: pd.DataFrame, correct: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Return scores with the column `correct`; empty where a metric counts no single row."""
    keys = [column for column in scores.columns if column in correct and column not in RESULTS]
    if correct.duplicated(keys).any():
        raise BadFile(path, "two rows are about the same model and task", _AGAIN)
    merged = scores.merge(correct[[*keys, "correct"]], on=keys, how="left").fillna({"correct": ""})
    columns = (merged[name] for name in ("correct", "count", "value", "task"))
    for text, count, value, task in zip(*columns, strict=True):
        try:
            share_right = 100 * bits(text, int(count)).mean() if text else value
        except BadData:
            problem = f"{task}: {text[:16]}… is not the hexadecimal text of {count} rows"
            raise BadFile(path, problem, _AGAIN) from None
        if abs(share_right - value) > ROUNDED:
            problem = f"{task}: {share_right:.4f} % are correct, but the scores say {value:.4f}"
            raise BadFile(path, problem, _AGAIN)
    return merged


def paired_variances(
    parts: Sequence[tuple[float, pd.DataFrame]], tasks: Iterable[Hashable]
) -> dict[Hashable, float | None]:
    """Return the variance of Σ wₖ·meanₖ from the test rows of each task. parts: wₖ, rows of model k.
    With cᵢ = Σ wₖ·xₖᵢ/Tₖ, where xₖᵢ in percent says whether model k got row i right (its mean over
    seeds) and Tₖ is how many tasks the model's mean is over: s²(c)/n. For two models of one seed each,
    c counts discordant rows only (McNemar). None where the correctness of some row is unknown, or the
    models have different numbers of rows.
    """
    by_task: dict[Hashable, list[tuple[float, str, float]]] = {task: [] for task in tasks}
    for weight, rows in parts:  # lists: pandas takes ten times as long
        empty = [""] * len(rows)
        seeds, texts = (rows[n].tolist() if n in rows else empty for n in ("seed", "correct"))
        row_counts = Counter(seeds)
        for row in zip(rows["task"].tolist(), seeds, texts, rows["count"].tolist(), strict=True):
            task, seed, text, count = row
            if task in by_task:  # share: of this row in the mean over seeds of means over tasks
                share = weight / (len(row_counts) * row_counts[seed])
                by_task[task].append((share, text, count))
    return {task: _paired_variance(shares) for task, shares in by_task.items()}


def _paired_variance(shares: Sequence[tuple[float, str, float]]) -> float | None:
    if not shares or not all(isinstance(text, str) and text for _, text, _ in shares):
        return None
    right = [100 * share * bits(text, int(count)) for share, text, count in shares]
    if len({len(answers) for answers in right}) > 1 or len(right[0]) < 2:
        return None
    sums = np.sum(right, axis=0)
    return float(sums.var(ddof=1)) / len(sums)
