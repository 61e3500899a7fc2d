"""Two gains of one model over another by task: cosine of final features, and accuracy."""

import math
from typing import Any

import pandas as pd

from reproduction.report.evidence import Evidence, select
from reproduction.report.statistics import estimate, noise

FEWEST = 4  # tasks from which a correlation is told
Judged = tuple[str, float, float, str]  # word, margin, two standard errors, the numbers in words


def gains(evidence: Evidence, left: dict[str, Any], right: dict[str, Any]) -> pd.DataFrame:
    """Return per task the cosine and accuracy of `left` minus those of `right`, with two SE each.

    Accuracies are those of the models whose features were measured, so of one seed each. left, right:
    column values that name one model. No row where something was not run.
    """
    rows = []
    for task in evidence.tasks:
        row: dict[str, Any] = {"task": task}
        for name, kind, measure in (
            ("cosine", "alignment", "cosine"),
            ("accuracy", "scores", "value"),
        ):
            pair = [
                estimate(_of_one_seed(evidence, kind, side, task), measure)
                for side in (left, right)
            ]
            if pair[0] is not None and pair[1] is not None:
                row |= {name: pair[0].mean - pair[1].mean, f"{name}_noise": noise(pair[0], pair[1])}
        rows += [row] if len(row) == 5 else []
    return pd.DataFrame(
        rows, columns=["task", "cosine", "cosine_noise", "accuracy", "accuracy_noise"]
    )


def _of_one_seed(evidence: Evidence, kind: str, side: dict[str, Any], task: str) -> pd.DataFrame:
    measured = select(evidence.table("alignment"), side | {"task": task})
    seed = {"seed": measured["seed"].iloc[0]} if len(measured) else {}
    return select(evidence.table(kind), side | {"task": task} | seed)


def correlation(x: pd.Series, y: pd.Series) -> tuple[float, float]:
    """Return Pearson's r over tasks, and two SE of it, 2 √((1 − r²)/(T − 2)); maybe NaN."""
    r = float(x.corr(y)) if len(x) >= FEWEST else math.nan
    return r, 2 * math.sqrt((1 - r * r) / (len(x) - 2)) if not math.isnan(r) else math.nan


def together(found: pd.DataFrame) -> Judged:
    """Hold when the correlation is positive by two standard errors."""
    r, room = correlation(found["cosine"], found["accuracy"])
    if math.isnan(r):
        return (
            "within noise",
            math.nan,
            math.nan,
            f"{len(found)} tasks are too few for a correlation",
        )
    word = "holds" if r > room else "does not hold" if r < -room else "within noise"
    return word, r, room, f"correlation {r:+.2f} over {len(found)} tasks"


def apart(found: pd.DataFrame, evidence: Evidence) -> Judged:
    """Hold when accuracy clearly rises while cosine clearly falls on some task."""
    slightly = found[(found["accuracy"] > 0) & (found["cosine"] < 0)]
    clearly = slightly[
        (slightly["accuracy"] > slightly["accuracy_noise"])
        & (-slightly["cosine"] > slightly["cosine_noise"])
    ]
    word = "holds" if len(clearly) else "within noise" if len(slightly) else "does not hold"
    named = [
        f"{evidence.title(row.task)} {row.cosine:+.3f} and {row.accuracy:+.1f}"
        for row in (clearly if len(clearly) else slightly).sort_values("cosine").itertuples()
    ]
    return (
        word,
        math.nan,
        math.nan,
        "cosine and accuracy: " + "; ".join(named) if named else "no task of that kind",
    )
