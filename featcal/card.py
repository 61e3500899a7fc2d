"""Model cards (README.md) of result folders: the hub's front matter, licences of the inputs, and
text. Knows no calibration.

A card holds no path of the machine it was written on: a folder is called by its last part, a hub
checkpoint by its name there."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from featcal.errors import BadFile
from featcal.files import atomic_path

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

CARD = "README.md"
_FRONT = re.compile(r"\A---[ \t]*\r?\n(.*?)^---[ \t]*$", re.S | re.M)
_CACHED = re.compile(
    r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})$"
)
UNTOLD = "No accuracy was measured in this run: how well the model does the experts' tasks is not told here."
MEASURED = "## How well it does the experts' tasks"
SETTLE = "The inputs have different licences; which terms hold for this model has to be settled before it is passed on."
LICENCE_KEYS = ("license", "license_name", "license_link")  # as the hub spells them


@dataclass(frozen=True)
class Hub:
    """A checkpoint of the hub at one commit."""

    name: str
    commit: str


def hub_of(folder: Path) -> Hub | None:
    """What a folder of the hub's local cache is on the hub; None for any other folder."""
    found = _CACHED.search(folder.resolve().as_posix())
    return Hub(f"{found['owner']}/{found['name']}", found["commit"]) if found else None


def name_of(model: object) -> str:
    """How a card calls a model: its name on the hub with the commit, the last part of its folder,
    or that it was in memory.
    """
    if not isinstance(model, str | Path):
        return f"a {type(model).__name__} in memory"
    hub = hub_of(Path(model))
    return f"{hub.name} at {hub.commit[:12]}" if hub else Path(model).resolve().name


def front_matter(folder: Path) -> dict[str, Any]:
    """The metadata at the head of a folder's card; empty where there is none that can be read."""
    try:
        found = _FRONT.match((folder / CARD).read_text("utf-8"))
        content = yaml.safe_load(found[1]) if found else None
    except (
        OSError,
        UnicodeDecodeError,
        yaml.YAMLError,
    ):  # the card of somebody else: what it does not tell is not told
        return {}
    return content if isinstance(content, dict) else {}


@dataclass(frozen=True)
class Licence:
    """What the cards of the inputs say together.

    front: keys for the result's card; empty where the inputs differ or say nothing.  told: one
    sentence for each finding.
    """

    front: dict[str, Any]
    told: tuple[str, ...]
    differs: bool


def inherited(models: Mapping[str, object]) -> Licence:
    """The licence that all inputs share, of models by role; inputs without a card are named, inputs
    that differ too.
    """
    said = {role: _licence(model) for role, model in models.items()}
    found: dict[tuple[Any, ...], list[str]] = {}
    for role, licence in said.items():
        if licence is not None:
            found.setdefault(tuple(licence.get(key) for key in LICENCE_KEYS), []).append(role)
    silent = [role for role, licence in said.items() if licence is None]
    told = [f"{_words(licence)}: {', '.join(roles)}." for licence, roles in found.items()]
    if silent:
        told.append(f"No licence is told by: {', '.join(silent)}.")
    if len(found) > 1:
        told.append(SETTLE)
    front = (
        {}
        if len(found) != 1
        else {
            key: value for key, value in zip(LICENCE_KEYS, next(iter(found)), strict=True) if value
        }
    )
    return Licence(front, tuple(told), len(found) > 1)


def _licence(model: object) -> dict[str, str] | None:
    front = front_matter(Path(model)) if isinstance(model, str | Path) else {}
    written = {
        key: value for key in LICENCE_KEYS if isinstance(value := front.get(key), str) and value
    }
    return written if "license" in written else None


def _words(licence: Sequence[Any]) -> str:
    kind, name, link = licence
    return f"`{kind}`" + (f" ({name})" if name else "") + (f", {link}" if link else "")


def card(
    title: str,
    models: Mapping[str, object],
    tags: Sequence[str],
    more: Mapping[str, Any],
    sections: Sequence[str],
) -> str:
    """A card: front matter (licence, base_model of the inputs that the hub has, tags, `more`),
    title, sections, licence.
    """
    licence = inherited(models)
    on_hub = sorted(
        {
            hub.name
            for model in models.values()
            if isinstance(model, str | Path) and (hub := hub_of(Path(model)))
        }
    )
    front: dict[str, Any] = dict(licence.front)
    if on_hub:
        front |= {"base_model": on_hub, "base_model_relation": "merge"}
    front |= {"library_name": "transformers", "tags": list(tags), **more}
    head = yaml.safe_dump(front, sort_keys=False, allow_unicode=True, width=120)
    parts = [
        f"---\n{head}---\n",
        f"# {title}",
        *sections,
        "## Licence",
        "\n".join(f"- {line}" for line in licence.told),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
        for line in lines
    )


def shown(value: object) -> str:
    """A value of a setting in words."""
    if value is None:
        return "all"
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def use(kind: str) -> str:
    """How a folder is loaded with a class of transformers."""
    return f'```python\nfrom transformers import {kind}\n\nmodel = {kind}.from_pretrained("path/to/this/folder")\n```'


def add_results(folder: Path, results: Sequence["EvalResult"]) -> None:
    """Numbers measured of a folder's model, into its card: as the hub's model-index, and accuracies
    as a table for people.

    A number of the same metric on the same data is replaced. Raises: BadFile for a folder without a
    card.
    """
    from huggingface_hub import ModelCard

    if not (folder / CARD).is_file():
        raise BadFile(
            folder,
            f"no card ({CARD}) in this folder",
            "give a folder that featcal merge or calibrate wrote",
        )
    found = ModelCard.load(folder / CARD)
    kept = [
        one
        for one in found.data.eval_results or ()
        if not any(one.is_equal_except_value(new) for new in results)
    ]
    found.data.eval_results = [*kept, *results]
    found.data.model_name = found.data.model_name or folder.resolve().name
    right = [one for one in found.data.eval_results if one.metric_type == "accuracy"]
    rows = [
        [one.dataset_name, one.dataset_split or "", f"{100 * one.metric_value:.2f}"]
        for one in right
    ]
    text = found.text
    if right:
        section = f"{MEASURED}\n\n{table(['task', 'split', 'percent correct'], rows)}"
        pattern = f"{re.escape(UNTOLD)}|{re.escape(MEASURED)}\n\n(?:\\|.*\n?)+"
        there = re.search(pattern, text)
        text = (
            text.replace(there[0].rstrip("\n"), section)
            if there
            else f"{text.rstrip()}\n\n{section}\n"
        )
    write_card(folder, f"---\n{found.data.to_yaml(line_break=None)}\n---\n{text}")


def write_card(folder: Path, text: str) -> None:
    """Write or replace the card of a folder. Raises: DiskFull."""
    with atomic_path(folder / CARD) as hidden:
        hidden.write_text(text, encoding="utf-8", newline="\n")
