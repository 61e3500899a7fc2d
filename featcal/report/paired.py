"""Which test rows every model got right, and what that says of the error of a difference between models.

Two models that mostly stumble over the same images differ by less than their own errors say. Knows bits and result rows; knows
nothing of seeds' spread, claims or pages.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from featcal.errors import BadFile

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


def paired_variance(parts: Sequence[Part], task: object) -> float | None:
    """What the test rows of one task add to the variance of Σ wₖ·meanₖ, where all models were scored on the same rows.

    With cᵢ = Σ wₖ·xₖᵢ/Tₖ, where xₖᵢ in percent says whether model k got row i right (its mean over seeds) and Tₖ is how many
    tasks the model's mean is over: s²(c)/n. For two models of one seed each, c counts discordant rows only (McNemar).

    Args:    parts: weights and all rows of each model, with the column `correct`.   task: one of their tasks.
    Returns: the variance; None where the correctness of some row is unknown, or the models have other numbers of rows.
    """
    total: npt.NDArray[np.float64] | None = None
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
            if total is not None and len(total) != len(right):
                return None
            total = right if total is None else total + right
    return None if total is None or len(total) < 2 else float(total.var(ddof=1)) / len(total)


def split_by_seen(scores: pd.DataFrame, seen: pd.DataFrame) -> pd.DataFrame:
    """Scores of adapters split into the test rows that their stream contained and those it did not.

    Args:    scores: rows of one stream and number of samples, with the column `correct`.   seen: those of the file `seen`.
    Returns: task, seed, seen (how many rows), value_seen and value_unseen in percent, NaN where there is no such row. Rows whose
             correctness or stream is unknown are left out.
    """
    found = []
    for row in scores.merge(seen[["task", "seed", "seen"]], on=["task", "seed"]).to_dict("records"):
        if row.get("correct"):
            right, known = (bits(row[column], int(row["count"])) for column in ("correct", "seen"))
            values = {f"value_{name}": 100 * right[at].mean() if at.any() else math.nan for name, at in _sides(known)}
            found.append({"task": row["task"], "seed": row["seed"], "seen": int(known.sum())} | values)
    return pd.DataFrame(found, columns=["task", "seed", "seen", "value_seen", "value_unseen"])


def _sides(known: Bits) -> list[tuple[str, Bits]]:
    return [("seen", known), ("unseen", ~known)]
