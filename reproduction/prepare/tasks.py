"""The paper's tasks: twenty of images, eight of GLUE, MergeBench's three domains and six tests.

tasks.yaml has their data sets on the hub, splits, columns and prompts. MergeBench's texts are in
Alpaca's instruction format; the paper does not say which texts it calibrated on.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from featcal.errors import BadData
from reproduction.experiments import require_known

HUB_ID = "nyu-mll/glue"  # earlier `glue`; the configuration is the task's key
DRESS = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{prompt}\n\n### Response:\n"
)


@dataclass(frozen=True)
class Task:
    """One task of images. columns: the source's names of image and label, where they differ."""

    column: str  # heading in the paper's tables
    hub_id: str
    config: str | None = None
    train_split: str = "train"
    test_split: str = "test"
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GlueTask:
    """One task of GLUE as generated text.

    prompt: with the names of its columns in braces.   answers: by label; none where the answer is
    the label as a number.   aliases: columns of other collections, by the hub's name.
    """

    column: str  # heading in the paper's tables
    prompt: str
    answers: Sequence[str]
    columns: Sequence[str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    test_split: str = "validation"


@dataclass(frozen=True)
class Domain:
    """One domain of MergeBench, and the columns of its data set."""

    hub_id: str
    prompt: str
    completion: str


@dataclass(frozen=True)
class PublicTest:
    """A task of lm-evaluation-harness, by its names; `file` is below its tasks.

    data, config, split: its data set on the hub.   needs: modules that it imports and the harness
    does not install.   runs: whether it runs generated programs.
    """

    data: str
    split: str
    task: str
    metric: str
    filter: str
    file: str
    config: str | None = None
    needs: Sequence[str] = ()
    runs: bool = False


def _text(name: str) -> str:
    return files("reproduction.prepare").joinpath(name).read_text("utf-8")


_TABLES = yaml.safe_load(_text("tasks.yaml"))
TASKS = {key: Task(**entry) for key, entry in _TABLES["images"].items()}
GLUE = {key: GlueTask(**entry) for key, entry in _TABLES["glue"].items()}
DOMAINS = {key: Domain(**entry) for key, entry in _TABLES["domains"].items()}
PUBLIC = {key: PublicTest(**entry) for key, entry in _TABLES["tests"].items()}
POOLS: dict[int, tuple[str, ...]] = {size: tuple(TASKS)[:size] for size in (8, 14, 20)}


@dataclass(frozen=True)
class Prompts:
    """Classes in the order of their labels, and templates with {} for the class."""

    classes: tuple[str, ...]
    templates: tuple[str, ...]


def load_prompts(task: str) -> Prompts:
    """Return the class names and templates that the task's published experts were trained with.

    Underscores and misspellings stay: another spelling is another text feature. Raises: UnknownKey.
    """
    prompts = _all_prompts()
    require_known("task", task, prompts)
    return Prompts(tuple(prompts[task]["classes"]), tuple(prompts[task]["templates"]))


@cache
def _all_prompts() -> Mapping[str, Any]:
    return json.loads(_text("prompts.json"))  # type: ignore[no-any-return]


def glue_task(key: str) -> GlueTask:
    """Return one task. Raises: UnknownKey."""
    require_known("task", key, GLUE)
    return GLUE[key]


def prompted(key: str, row: Mapping[str, Any]) -> tuple[str, str]:
    """Return prompt and answer of a row; the answer of a label outside the map, such as -1, is empty.

    Raises: BadData for a row without the task's columns; UnknownKey.
    """
    task = glue_task(key)

    def value(name: str) -> Any:  # the alias first: STS-B may hold its score and a binned label
        for column in (task.aliases.get(name, name), name):
            if column in row:
                return row[column]
        way_out = f"name the columns {', '.join((*task.columns, 'label'))}"
        raise _lacking(key, row, name, way_out)

    prompt = task.prompt.format(**{name: str(value(name)) for name in task.columns})
    label = value("label")
    if not task.answers:  # STS-B: the score with one decimal
        return prompt, f"{label:.1f}" if label >= 0 else ""
    return prompt, task.answers[int(label)] if 0 <= int(label) < len(task.answers) else ""


def domain_text(key: str, row: Mapping[str, Any]) -> tuple[str, str]:
    """Return prompt and completion of a row, which it has or which are made from its columns.

    Raises: UnknownKey; BadData for a row without the columns.
    """
    if {"prompt", "completion"} <= set(row):
        return str(row["prompt"]), str(row["completion"])
    require_known("domain", key, DOMAINS)
    domain = DOMAINS[key]
    for column in (domain.prompt, domain.completion):
        if column not in row:
            raise _lacking(key, row, column, "name the columns prompt and completion")
    return DRESS.format(prompt=row[domain.prompt]), str(row[domain.completion])


def _lacking(key: str, row: Mapping[str, Any], column: str, way_out: str) -> BadData:
    return BadData(key, f"a row holds {', '.join(row) or 'nothing'}, but no {column}", way_out)
