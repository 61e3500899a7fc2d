"""Which test rows every model got right, or an adapter was shown, and what that says of the error
of a difference between models.

Two models that mostly stumble over the same images differ by less than their own errors say. Knows
result rows; knows nothing of seeds' spread, claims or pages.
"""

from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from featcal.errors import BadData, BadFile

Bits = npt.NDArray[np.bool_]
Part = tuple[float, pd.DataFrame]  # a weight, and the rows of one model
KEPT = ("value", "count", "correct")  # columns of scores or of correctness that name no row
ROUNDED = 1e-4  # values have four decimals
_AGAIN = "write both again: dvc repro"


@lru_cache(maxsize=4096)
def bits(text: str, count: int) -> Bits:
    """True and false of every test sample, eight to a byte, the first one highest: what
    `results.packed` wrote.

    Returns: (count,), read-only.  Raises: BadData where the text is not that of `count` samples
    with zeros behind the last.
    """
    try:
        whole = np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8)).astype(bool)
    except ValueError:
        whole = np.zeros(0, bool)
    if len(whole) != count + -count % 8 or whole[count:].any():
        problem = f"not the hexadecimal text of {count} samples"
        raise BadData(
            f"correctness {text[:16]!r}…", problem, "write the result files again: dvc repro"
        )
    whole.flags.writeable = False  # every caller gets the same array
    return whole[:count]


def mean_variance(each: npt.NDArray[np.float64]) -> float | None:
    """Variance of the mean of n values, s²/n; None where n < 2."""
    return float(each.var(ddof=1)) / len(each) if len(each) > 1 else None


def with_correct(scores: pd.DataFrame, correct: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Scores with the column `correct` of the file beside them; empty where a metric counts no
    single row.

    Raises: BadFile where a text cannot be read, or says another accuracy than the score.
    """
    keys = [column for column in scores.columns if column in correct and column not in KEPT]
    if correct.duplicated(keys).any():
        raise BadFile(path, "two rows are about the same model and task", _AGAIN)
    found = scores.merge(correct[[*keys, "correct"]], on=keys, how="left").fillna({"correct": ""})
    for text, count, value, task in zip(
        found["correct"], found["count"], found["value"], found["task"], strict=True
    ):
        try:
            said = 100 * bits(text, int(count)).mean() if text else value
        except BadData:
            raise BadFile(
                path, f"{task}: {text[:16]}… is not the hexadecimal text of {count} rows", _AGAIN
            ) from None
        if abs(said - value) > ROUNDED:
            raise BadFile(
                path, f"{task}: {said:.4f} % are correct, but the scores say {value:.4f}", _AGAIN
            )
    return found


def paired_variances(
    parts: Sequence[Part], tasks: Iterable[Hashable]
) -> dict[Hashable, float | None]:
    """What the test rows of every task add to the variance of Σ wₖ·meanₖ, where all models were
    scored on the same rows.

    With cᵢ = Σ wₖ·xₖᵢ/Tₖ, where xₖᵢ in percent says whether model k got row i right (its mean over
    seeds) and Tₖ is how many tasks the model's mean is over: s²(c)/n. For two models of one seed
    each, c counts discordant rows only (McNemar).

    Args:    parts: weights and all rows of each model, with the column `correct`.   tasks: of
             theirs.
    Returns: variances; None where the correctness of some row is unknown, or the models have other
    numbers of rows.
    """
    columns = ("task", "seed", "correct", "count")
    listed = [
        (weight, {name: rows[name].tolist() for name in columns if name in rows})
        for weight, rows in parts
    ]
    return {
        task: _paired_variance(listed, task) for task in tasks
    }  # of lists: pandas takes ten times as long


def _paired_variance(parts: Sequence[tuple[float, dict[str, Any]]], task: Hashable) -> float | None:
    total: npt.NDArray[np.float64] | None = None
    for weight, rows in parts:
        places = [i for i, name in enumerate(rows["task"]) if name == task]
        if not places:
            continue
        if "correct" not in rows:
            return None
        drawn, texts, counts = (rows[column] for column in ("seed", "correct", "count"))
        if not all(isinstance(texts[i], str) and texts[i] for i in places):
            return None
        for seed, text, count in ((drawn[i], texts[i], counts[i]) for i in places):
            share = weight / (
                len(set(drawn)) * drawn.count(seed)
            )  # of this row in the mean over seeds of means over tasks
            right = 100 * share * bits(text, int(count))
            if total is not None and len(total) != len(right):
                return None
            total = right if total is None else total + right
    return None if total is None else mean_variance(total)
