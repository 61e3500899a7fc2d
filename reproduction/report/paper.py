"""The values that the paper prints, and their errata."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import pandas as pd
import yaml

DOUBTS = '<a href="differences.html#cells-of-the-paper-that-cannot-be-right">in doubt</a>'
AVERAGE = "average"  # the column of a row's mean; a merger has the same name


@cache
def packaged(name: str) -> Any:
    """Return the content of a YAML file of this folder, not to be changed."""
    return yaml.safe_load(files("reproduction.report").joinpath(name).read_text(encoding="utf-8"))


TASKS, TEXT_TASKS = packaged("tasks.yaml")["images"], packaged("tasks.yaml")["texts"]
TEXT_SETS, IMAGE_SETS = packaged("texts.yaml"), packaged("photos.yaml")  # of the real models
_TITLES = TASKS | {task: name for pool in TEXT_TASKS.values() for task, name in pool.items()}
_COLUMNS = {printed: task for task, printed in _TITLES.items()} | {"Avg.": AVERAGE}
_WORDS = {
    "simple_averaging": "average", "pretrained": "base", "finetuned": "expert", "probsurgery": "prob_surgery",
}  # fmt: skip
PRINTED = {  # which table has the scores of a role and pool, task by task; two models may share one
    ("clip_b32", "8"): "table01", ("clip_l14", "8"): "table07", ("clip_b32", "14"): "table08", ("clip_l14", "14"): "table09",
    ("clip_b32", "20"): "table10", ("clip_l14", "20"): "table11",
    ("flan_t5_base", "glue"): "table03", ("flan_t5_large", "glue"): "table03", ("llama_3b", "mergebench"): "table04",
    ("llama_8b", "mergebench"): "table04",
}  # fmt: skip
EXTENDED = {  # columns of Table 2, as printed → role, pool
    "8-Task L/14": ("clip_l14", "8"), "14-Task B/32": ("clip_b32", "14"), "14-Task L/14": ("clip_l14", "14"),
    "20-Task B/32": ("clip_b32", "20"), "20-Task L/14": ("clip_l14", "20"),
}  # fmt: skip
# real models have the smaller image model's experiments: encoders on texts, a tower on images
REAL, SECOND, VISION, IMAGES = "minilm", "mpnet", "vit_s", "clip_b32"
LANGUAGE = ("smollm2", "chat")  # role and pool of the real language model
REAL_NAMES = {
    REAL: "MiniLM, real texts", VISION: "ViT-S/14, real images", LANGUAGE[0]: "SmolLM2, chats",
}  # fmt: skip
# A note on the image model, by suite. The suite `paper` uses the published model and needs none.
VISION_BASE = {"mini": 'ViT-S/14 is <a href="real_encoder.html">not Meta’s DINOv2-small</a>'}
SIZES = {REAL: "MiniLM", IMAGES: "smaller model", "clip_l14": "larger model"}
PAPER_NAMES = {
    "clip_b32": "CLIP-ViT-B/32", "clip_l14": "CLIP-ViT-L/14",
    "flan_t5_base": "FLAN-T5-base", "flan_t5_large": "FLAN-T5-large", "llama_3b": "Llama-3.2-3B-Instruct",
    "llama_8b": "Llama-3.1-8B-Instruct",
}  # fmt: skip
# names of the roles' models in the printed tables
PAPER_MODELS = {role: name.lower().replace("/", "") for role, name in PAPER_NAMES.items()}
TEXT_SIZES = {
    "flan_t5_base": "Smaller T5", "flan_t5_large": "Larger T5", "llama_3b": "Smaller Llama", "llama_8b": "Larger Llama",
}  # fmt: skip
# λ and ρ that Section 5.1 prints for language models
PAPER_SETTINGS = {
    "flan_t5_base": (1e-5, 2.0), "flan_t5_large": (1e-5, 2.0), "llama_3b": (1e-5, 0.5), "llama_8b": (3.0, 0.5),
}  # fmt: skip


@cache
def paper_table(table: str, model: str = "") -> pd.DataFrame:
    """Return one table of the paper with our names. model: one model's rows of a joint table."""
    path = files("reproduction.report").joinpath("paper_tables", f"{table}.csv")
    dtypes = {"model": str, "upstream": str, "method": str}
    with path.open(encoding="utf-8") as text:
        frame = pd.read_csv(text, dtype=dtypes, keep_default_na=False)
    for column in ("upstream", "method"):
        if column in frame:
            frame[column] = frame[column].replace(_WORDS)
    if "method" in frame:
        alone = frame["method"].str.endswith("_expert")  # of one domain, in Table 14
        frame["setting"] = frame["method"].str.removesuffix("_expert").where(alone, "")
        frame.loc[alone, "method"] = "expert"
    if "column" in frame:
        frame["task"] = frame["column"].replace(_COLUMNS)
        frame["value"] = pd.to_numeric(frame["value"])
    return frame[frame["model"] == model] if model and frame["model"].nunique() > 1 else frame


@cache
def paper_row(
    table: str,
    upstream: str,
    method: str,
    model: str = "",
    setting: str = "",
    read: Callable[..., pd.DataFrame] = paper_table,  # or corrected_table
) -> pd.Series:
    """Return one printed row by task, empty if not printed. setting: the domain of an expert."""
    frame = read(table, model)
    matches = (frame["upstream"] == upstream) & (frame["method"] == method)
    return frame[matches & (frame["setting"] == setting)].set_index("task")["value"]


def title_of(task: str) -> str:
    """Return the heading of a task's column; empty for a task that the paper lacks."""
    return _TITLES.get(task) or (TEXT_SETS | IMAGE_SETS).get(task, {}).get("name", "")


def table_name(number: str) -> str:
    """Return how a table is called: Table 1 for table01."""
    return f"Table {int(number.removeprefix('table'))}"


def experiment_name(role: str, pool: str) -> str:
    """Return the name of an experiment on pages: tasks and size, or the language model."""
    sizes = SIZES | {VISION: "real images"}
    return f"{pool} tasks, {sizes[role]}" if role in sizes else TEXT_SIZES[role]


def model_name(role: str, suite: str) -> str:
    """Return the name of a model in titles: the paper's, or the model in its role."""
    if role in REAL_NAMES:
        return REAL_NAMES[role]
    name = PAPER_NAMES[role]
    kind = "synthetic" if suite == "mini" else f"{suite} suite"
    return name if suite == "paper" else f"{kind}, in the role of {name}"


@dataclass(frozen=True)
class Erratum:
    """One printed row whose cells cannot all be right."""

    id: str
    table: str
    kind: str
    row: list[str]  # upstream and method
    cells: list[str]  # tasks or "average"
    reason: str
    corrected: dict[str, float] = field(default_factory=dict)  # by cell, where it is known
    model: str = ""  # where a table has two
    facts: str = ""  # evidence from other printed cells


@cache
def errata() -> tuple[Erratum, ...]:
    return tuple(Erratum(**entry) for entry in packaged("errata.yaml"))


def row_errata(table: str, upstream: str, method: str, model: str = "") -> list[Erratum]:
    """Return the errata of one printed row."""
    row = (table, upstream, method)
    return [e for e in errata() if (e.table, *e.row) == row and e.model in ("", model)]


def reason(table: str, upstream: str, method: str, cell: str, model: str = "") -> str:
    """Return why this printed cell is in doubt; empty where it is not."""
    entries = row_errata(table, upstream, method, model)
    return " ".join(entry.reason for entry in entries if cell in entry.cells)


@cache
def corrected_table(table: str, model: str = "") -> pd.DataFrame:
    """Return a printed table with corrected values in place of wrong ones."""
    frame = paper_table(table, model).copy()
    for entry in errata():
        if entry.table == table and entry.corrected:
            upstream, method = entry.row
            row = (frame["upstream"] == upstream) & (frame["method"] == method)
            row &= (frame["model"] == entry.model) if entry.model else True
            for cell, value in entry.corrected.items():
                frame.loc[row & (frame["task"] == cell), "value"] = value
    return frame
