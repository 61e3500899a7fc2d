"""The paper's own numbers as data, in this project's words, exactly as printed.

The only place that reads the paper's tables. Knows nothing of our results; what cannot be right as printed stands in errata.yaml.
"""

from functools import cache
from importlib.resources import files

import pandas as pd

from featcal.settings import Calibration

AVERAGE = "average"  # the column of a row's mean; the merger of the same name is a value of `upstream`
TASKS = {
    "sun397": "SUN397", "stanford-cars": "Cars", "resisc45": "RESISC45", "eurosat": "EuroSAT", "svhn": "SVHN", "gtsrb": "GTSRB",
    "mnist": "MNIST", "dtd": "DTD", "oxford_flowers102": "Flowers", "pcam": "PCAM", "fer2013": "FER", "oxford-iiit-pet": "Pets",
    "stl10": "STL10", "cifar100": "C100", "cifar10": "C10", "food101": "Food", "fashion_mnist": "F-MNIST",
    "emnist_letters": "EMNIST", "kmnist": "KMNIST", "rendered-sst2": "Rendered",
}  # fmt: skip
_COLUMNS = {printed: task for task, printed in TASKS.items()} | {"Avg.": AVERAGE}
_WORDS = {"simple_averaging": "average", "pretrained": "base", "finetuned": "expert", "probsurgery": "prob_surgery"}
PAPER_MODELS = {  # how the printed tables name what plays each role
    "clip_b32": "clip-vit-b32", "clip_l14": "clip-vit-l14", "flan_t5_base": "flan-t5-base", "flan_t5_large": "flan-t5-large",
    "llama_3b": "llama-3.2-3b-instruct", "llama_8b": "llama-3.1-8b-instruct",
}  # fmt: skip
PRINTED = {  # which printed table has the accuracies of a role and pool, task by task
    ("clip_b32", "8"): "table01", ("clip_l14", "8"): "table07", ("clip_b32", "14"): "table08", ("clip_l14", "14"): "table09",
    ("clip_b32", "20"): "table10", ("clip_l14", "20"): "table11",
}  # fmt: skip
SIZES = {"clip_b32": "smaller model", "clip_l14": "larger model"}
PAPER_SETTINGS = {  # section 5.1 of the paper: λ, ρ, α
    "clip_b32": Calibration(ridge=0.05, anchor_blend=2.0, interpolation=0.3),
    "clip_l14": Calibration(ridge=0.05, anchor_blend=2.0, interpolation=0.3),
    "flan_t5_base": Calibration(ridge=1e-5, anchor_blend=2.0, interpolation=0.6),
    "flan_t5_large": Calibration(ridge=1e-5, anchor_blend=2.0, interpolation=0.6),
    "llama_3b": Calibration(ridge=1e-5, anchor_blend=0.5, interpolation=0.15),
    "llama_8b": Calibration(ridge=3.0, anchor_blend=0.5, interpolation=0.15),
}


@cache
def paper_table(table: str) -> pd.DataFrame:
    """One table of the paper, as printed, with our words for methods, mergers and tasks.

    Args:    table: "table01" ... "table14".
    Returns: the columns of the file; where there is a `column` (of the printed table), `task` names it in our words.
    """
    with files("featcal.report").joinpath("paper", f"{table}.csv").open(encoding="utf-8") as text:
        frame = pd.read_csv(text, dtype={"model": str, "upstream": str, "method": str}, keep_default_na=False)
    for word in ("upstream", "method"):
        if word in frame:
            frame[word] = frame[word].replace(_WORDS)
    if "column" in frame:
        frame["task"] = frame["column"].replace(_COLUMNS)
        frame["value"] = pd.to_numeric(frame["value"])
    return frame


def paper_value(table: str, upstream: str, method: str, task: str = AVERAGE) -> float | None:
    """One printed cell of a table about a single model; None where the paper has no such cell."""
    frame = paper_table(table)
    found = frame[(frame["upstream"] == upstream) & (frame["method"] == method) & (frame["task"] == task)]["value"]
    return float(found.iloc[0]) if len(found) == 1 else None
