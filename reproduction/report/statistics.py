"""How sure a measured mean is: sampling of the test samples, paired where possible, and seeds."""

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

TRAINED = "value of training "  # begins the columns of further trainings of the experts


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks (and blocks) and seeds, in the unit of its column, and the rows it is of."""

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
        """Return what every task adds to the variance; computed when asked for."""
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
    the same samples. Seeds: s²/S for S ≥ 2 seeds with standard deviation s. A rank correlation has the
    variance of `of_correlation`, a mean cosine of n samples with standard deviation s has s²/n; other
    columns carry the part of the seeds only. Return None where there are no rows.
    """
    if rows.empty or measure not in rows:
        return None
    seeds = rows["seed"].tolist() if "seed" in rows else [""] * len(rows)
    means = {seed: mean(values) for seed, values in by(seeds, rows[measure].tolist()).items()}
    spread = stdev(means.values()) if len(means) > 1 else None
    drawn = sum(1 for seed in means if seed != "")
    return Estimate(mean(means.values()), spread, drawn, rows, measure)


def highest(several: Iterable[Estimate | None]) -> Estimate | None:
    """Return the estimate with the highest mean of those that were run."""
    return max((one for one in several if one), key=lambda one: one.mean, default=None)


def by(keys: Iterable[Hashable], values: Iterable[Any]) -> dict[Hashable, list[Any]]:
    """Return values by key; pandas' own groups are slow for a few rows."""
    found: dict[Hashable, list[Any]] = {}
    for key, value in zip(keys, values, strict=True):
        found.setdefault(key, []).append(value)
    return found


def firsts(keys: Iterable[Hashable], values: Iterable[Any]) -> dict[Hashable, Any]:
    """Return for every key the first value that is not NaN; NaN where there is none."""
    groups = by(keys, values).items()
    return {key: next((v for v in own if v == v), math.nan) for key, own in groups}


def mean(values: Iterable[float]) -> float:
    """Return the mean of what was measured, summed exactly; NaN where nothing was."""
    several = [value for value in values if not math.isnan(value)]
    return math.fsum(several) / len(several) if several else math.nan


def image_variances(rows: pd.DataFrame, measure: str) -> dict[Hashable, float]:
    """Return what every task adds to the variance of a mean by its test samples; else no tasks."""
    if "count" not in rows or "task" not in rows:
        return {}
    tasks = rows["task"].tolist()
    counts = firsts(tasks, rows["count"].tolist())
    if f"{measure}_sd" in rows:
        spreads = firsts(tasks, rows[f"{measure}_sd"].tolist())
        each = {task: sd**2 / counts[task] for task, sd in spreads.items()}
    elif measure == "value" and "metric" in rows and set(rows["metric"]) <= set(VARIANCES):
        metrics = firsts(tasks, rows["metric"].tolist())
        values = {task: mean(own) for task, own in by(tasks, rows["value"].tolist()).items()}
        each = {task: VARIANCES[metrics[task]](v, counts[task]) for task, v in values.items()}
    else:
        return {}
    known = {task: 0.0 if math.isnan(part) else part for task, part in each.items()}
    return {task: part / len(counts) ** 2 for task, part in known.items()}


def of_correlation(value: float, count: int) -> float:
    """Return the variance of Spearman's ρ of n pairs, in squared percent; 0 for n ≤ 3.

    (1 − ρ²)² (1 + ρ²/2) / (n − 3), as dρ/dz = 1 − ρ² (Bonett and Wright, Psychometrika 65, 2000).
    """
    squared = (value / 100) ** 2
    return 100**2 * (1 - squared) ** 2 * (1 + squared / 2) / (count - 3) if count > 3 else 0.0


VARIANCES: dict[str, Callable[[float, int], float]] = {  # of one task's value, by metric
    "accuracy": lambda value, count: value * (100 - value) / count,  # p(1 − p)/n, squared percent
    "spearman": of_correlation,
}


@dataclass(frozen=True)
class WeightedSum:
    """A weighted sum of means, Σ wₖ·meanₖ."""

    means: list[float]
    value: float
    variance: float
    drawn: float  # the variance's part from seeds
    known: bool  # whether its error is known
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
    rows = [(weight, one.rows) for weight, one in parts if one.rows is not None]
    apart = [(w**2, one.image_variances) for w, one in parts if one.rows is not None]
    tasks = dict.fromkeys(task for _, variances in apart for task in variances)
    counted = all(one.measure == "value" for _, one in parts)
    paired = paired_variances(rows, tasks) if counted else dict.fromkeys(tasks)
    unpaired = sum(one is None for one in paired.values())
    images = [
        math.fsum(w * variances.get(task, 0.0) for w, variances in apart) if one is None else one
        for task, one in paired.items()
    ]
    images += [weight**2 * one.variance for weight, one in parts if one.rows is None]
    drawn = [weight**2 * one.seed_variance for weight, one in parts if one.rows is not None]
    one_run = any(one.one_run for _, one in parts)
    known = bool(tasks) or (any(one.spread is not None for _, one in parts) and not one_run)
    whole = unpaired == len(tasks) or len(rows) < len(parts)
    pairing = ("unpaired" if whole else "partly unpaired") if unpaired else ""
    value = math.fsum(weight * one.mean for weight, one in parts)
    sums = [value, *by_training(parts)] if counted else []
    experts = variance(sums) if len(sums) > 2 else 0.0
    whole_variance, means = math.fsum([*images, *drawn, experts]), [one.mean for _, one in parts]
    return WeightedSum(means, value, whole_variance, math.fsum(drawn), known, one_run, pairing)


def by_training(parts: Sequence[tuple[float, Estimate]]) -> list[float]:
    """Return a weighted sum of means with the experts of each further training that all were run with."""
    frames = [(weight, one.rows) for weight, one in parts if one.rows is not None]
    names = dict.fromkeys(name for _, rows in frames for name in rows if name.startswith(TRAINED))
    sums = []
    for name in names:
        run = [(weight, rows, rows[rows[name].notna()]) for weight, rows in frames if name in rows]
        whole = all(set(some["task"]) == set(rows["task"]) for _, rows, some in run)
        if whole and len(run) == len(parts):
            sums.append(math.fsum(weight * mean(some[name]) for weight, _, some in run))
    return sums


def lead(left: Estimate, right: Estimate) -> tuple[float, float]:
    """Return left's mean minus right's, and two standard errors of it, paired where possible."""
    found = difference([(1.0, left), (-1.0, right)])
    return found.value, found.noise


Bits = npt.NDArray[np.bool_]
WeightedRows = tuple[float, pd.DataFrame]  # a weight, and the rows of one model
KEPT = ("value", "count", "correct")  # columns of scores or of correctness that name no row
ROUNDED = 1e-4  # values have four decimals
_AGAIN = "write the result files again: dvc repro"


@lru_cache(maxsize=4096)
def bits(text: str, count: int) -> Bits:
    """Return which of `count` samples were right, from the text that `results.packed` wrote."""
    try:
        whole = np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8)).astype(bool)
    except ValueError:
        whole = np.zeros(0, bool)
    if len(whole) != count + -count % 8 or whole[count:].any():
        problem = f"not the hexadecimal text of {count} samples"
        raise BadData(f"correctness {text[:16]!r}…", problem, _AGAIN)
    whole.flags.writeable = False  # every caller gets the same array
    return whole[:count]


def with_correct(scores: pd.DataFrame, correct: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Return scores with the column `correct`; empty where a metric counts no single row."""
    keys = [column for column in scores.columns if column in correct and column not in KEPT]
    if correct.duplicated(keys).any():
        raise BadFile(path, "two rows are about the same model and task", _AGAIN)
    found = scores.merge(correct[[*keys, "correct"]], on=keys, how="left").fillna({"correct": ""})
    columns = (found[name] for name in ("correct", "count", "value", "task"))
    for text, count, value, task in zip(*columns, strict=True):
        try:
            said = 100 * bits(text, int(count)).mean() if text else value
        except BadData:
            problem = f"{task}: {text[:16]}… is not the hexadecimal text of {count} rows"
            raise BadFile(path, problem, _AGAIN) from None
        if abs(said - value) > ROUNDED:
            problem = f"{task}: {said:.4f} % are correct, but the scores say {value:.4f}"
            raise BadFile(path, problem, _AGAIN)
    return found


def paired_variances(
    parts: Sequence[WeightedRows], tasks: Iterable[Hashable]
) -> dict[Hashable, float | None]:
    """Return what the test rows of every task add to the variance of Σ wₖ·meanₖ.

    With cᵢ = Σ wₖ·xₖᵢ/Tₖ, where xₖᵢ in percent says whether model k got row i right (its mean over
    seeds) and Tₖ is how many tasks the model's mean is over: s²(c)/n. For two models of one seed each,
    c counts discordant rows only (McNemar). None where the correctness of some row is unknown, or the
    models have other numbers of rows.
    """
    found: dict[Hashable, list[tuple[float, str, float]]] = {task: [] for task in tasks}
    for weight, rows in parts:  # lists: pandas takes ten times as long
        none = [""] * len(rows)
        seeds, texts = (rows[n].tolist() if n in rows else none for n in ("seed", "correct"))
        drawn = Counter(seeds)
        for row in zip(rows["task"].tolist(), seeds, texts, rows["count"].tolist(), strict=True):
            task, seed, text, count = row
            if task in found:  # share: of this row in the mean over seeds of means over tasks
                share = weight / (len(drawn) * drawn[seed])
                found[task].append((share, text, count))
    return {task: _paired_variance(own) for task, own in found.items()}


def _paired_variance(parts: Sequence[tuple[float, str, float]]) -> float | None:
    if not parts or not all(isinstance(text, str) and text for _, text, _ in parts):
        return None
    right = [100 * share * bits(text, int(count)) for share, text, count in parts]
    if len({len(one) for one in right}) > 1 or len(right[0]) < 2:
        return None
    each = np.sum(right, axis=0)
    return float(each.var(ddof=1)) / len(each)


FEWEST = 4  # tasks from which a correlation is reported
Comparison = tuple[str, float, float, str]  # word, margin, two standard errors, the numbers


def correlation(x: pd.Series, y: pd.Series) -> tuple[float, float]:
    """Return Pearson's r over tasks, and two SE of it, 2 √((1 − r²)/(T − 2)); maybe NaN."""
    r = float(x.corr(y)) if len(x) >= FEWEST else math.nan
    return r, 2 * math.sqrt((1 - r * r) / (len(x) - 2)) if not math.isnan(r) else math.nan


def together(found: pd.DataFrame) -> Comparison:
    """Hold when the correlation is positive by two standard errors."""
    r, room = correlation(found["cosine"], found["accuracy"])
    if math.isnan(r):
        few = f"{len(found)} tasks are too few for a correlation"
        return "within noise", math.nan, math.nan, few
    word = "holds" if r > room else "does not hold" if r < -room else "within noise"
    return word, r, room, f"correlation {r:+.2f} over {len(found)} tasks"


def apart(found: pd.DataFrame, title: Callable[[str], str]) -> Comparison:
    """Hold if accuracy clearly rises while cosine clearly falls on some task; fail if none allows it."""
    slightly = found[(found["accuracy"] > 0) & (found["cosine"] < 0)]
    higher = slightly["accuracy"] > slightly["accuracy_noise"]
    clearly = slightly[higher & (-slightly["cosine"] > slightly["cosine_noise"])]
    never = found["cosine"] > found["cosine_noise"]
    never |= -found["accuracy"] > found["accuracy_noise"]
    word = "holds" if len(clearly) else "does not hold" if never.all() else "within noise"
    listed = (clearly if len(clearly) else slightly).sort_values("cosine").itertuples()
    named = [f"{title(row.task)} {row.cosine:+.3f} and {row.accuracy:+.1f}" for row in listed]
    words = f"cosine and accuracy: {'; '.join(named)}" if named else "no task of that kind"
    return word, math.nan, math.nan, words
