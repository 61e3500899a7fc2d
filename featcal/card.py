"""The model card (README.md, from card_template.md) and the record (featcal.json) of a result folder.

Neither holds a path of the machine. A card names a folder by the last part of its path, a cached hub
checkpoint by its name on the hub. A record names models relative to its folder, or by name and
commit on the hub, so that later commands find base and experts by themselves.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from featcal.errors import BadFile
from featcal.files import atomic_path, read_json, write_json

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

CARD, RECORD = "README.md", "featcal.json"
TEMPLATE = Path(__file__).with_name("card_template.md")
SENTENCE_CLASS = "SentenceTransformer"  # what loads a folder with a modules.json
LICENCE_KEYS = ("license", "license_name", "license_link")  # as the hub spells them
Licence = tuple[tuple[str, str], ...]  # keys and values of a card's licence; () if it has none


def hub_checkpoint(model: object) -> tuple[str, str] | None:
    """Return name and commit of a folder in the hub's local cache, or None."""
    if not isinstance(model, str | Path):
        return None
    cached = r"models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})$"
    match = re.search(cached, Path(model).resolve().as_posix())
    return (f"{match[1]}/{match[2]}", match[3]) if match else None


def name_of(model: object) -> str:
    """Return the name of a model in a card: hub name and commit, folder name, or class."""
    if hub := hub_checkpoint(model):
        return f"{hub[0]} at {hub[1][:12]}"
    if isinstance(model, str | Path):
        return Path(model).resolve().name
    return f"a {type(model).__name__} in memory"


def front_matter(folder: Path) -> dict[str, Any]:
    """Return the metadata of a folder's card; empty if there is none or it cannot be read."""
    from huggingface_hub import metadata_load

    try:
        return metadata_load(folder / CARD) or {}
    except (OSError, ValueError, yaml.YAMLError):  # somebody else's card
        return {}


def licences_of(models: Mapping[str, object]) -> dict[Licence, list[str]]:
    """Return the licences that the cards of the models state, each with the models' roles."""
    roles: dict[Licence, list[str]] = {}
    for role, model in models.items():
        front = front_matter(Path(model)) if isinstance(model, str | Path) else {}
        given = {key: front[key] for key in LICENCE_KEYS if isinstance(front.get(key), str)}
        stated = tuple((key, value) for key, value in given.items() if value)
        roles.setdefault(stated if given.get("license") else (), []).append(role)
    return dict(sorted(roles.items(), key=lambda one: not one[0]))  # no licence last


def licences_differ(models: Mapping[str, object]) -> bool:
    """Return True if two of the models state different licences."""
    return len([licence for licence in licences_of(models) if licence]) > 1


def render_card(
    title: str,
    summary: str,
    models: Mapping[str, object],
    settings: Sequence[Sequence[object]],
    front: Mapping[str, Any],
    **sections: Any,
) -> str:
    """Return the text of a card.

    models: the inputs by role. The front matter names those on the hub and a licence shared by all.
    settings: rows of name and value.   front: more of the front matter.
    sections: other variables of the template.
    """
    from huggingface_hub import ModelCard, ModelCardData

    if sections.get("class_name") == SENTENCE_CLASS:
        front = {"library_name": "sentence-transformers", **front}
    licences = licences_of(models)
    stated = [dict(licence) for licence in licences if licence]
    on_hub = sorted({hub[0] for hub in map(hub_checkpoint, models.values()) if hub})
    data: dict[str, Any] = {"library_name": "transformers", "tags": ["merge", "featcal"], **front}
    data |= {"base_model": on_hub, "base_model_relation": "merge"} if on_hub else {}
    data |= stated[0] if len(stated) == 1 else {}
    card = ModelCard.from_template(
        ModelCardData(**data),
        template_path=str(TEMPLATE),
        table=table,
        title=title,
        summary=summary,
        settings=settings,
        inputs=[[role, name_of(model)] for role, model in models.items()],
        licences=[[dict(licence), roles] for licence, roles in licences.items()],
        licences_differ=len(stated) > 1,
        **sections,
    )
    return f"{card}\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; a list is joined by commas, None is shown as "all"."""

    def cell(value: object) -> str:
        values = value if isinstance(value, tuple | list) else ["all" if value is None else value]
        return ", ".join(map(str, values)).replace("|", "\\|").replace("\n", " ")

    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


def add_results(folder: Path, results: Sequence["EvalResult"]) -> None:
    """Add measured results to a folder's card: all to the hub's model-index, accuracies to a table.

    A result replaces an older one of the same metric and data. Raises: BadFile without a card.
    """
    from huggingface_hub import ModelCard

    if not (folder / CARD).is_file():
        way_out = "give a folder that featcal merge or calibrate wrote"
        raise BadFile(folder, f"no card ({CARD}) in this folder", way_out)
    card = ModelCard.load(folder / CARD)
    older = card.data.eval_results or []
    kept = [one for one in older if not any(one.is_equal_except_value(new) for new in results)]
    card.data.eval_results = [*kept, *results]
    card.data.model_name = card.data.model_name or folder.resolve().name
    rows = [
        [one.dataset_name, one.dataset_split or "", f"{100 * one.metric_value:.2f}"]
        for one in card.data.eval_results
        if one.metric_type == "accuracy"
    ]
    if rows:
        section = f"## Accuracy\n\n{table(['task', 'split', 'percent correct'], rows)}\n"
        pattern = re.compile(r"^## Accuracy\n.*?(?=^## |\Z)", re.S | re.M)
        replaced, count = pattern.subn(lambda _: f"{section}\n", card.text, count=1)
        card.text = replaced if count else f"{card.text.rstrip()}\n\n{section}"
    write_card(folder, f"{str(card).rstrip()}\n")


def write_card(folder: Path, text: str) -> None:
    """Write or replace the card of a folder. Raises: DiskFull."""
    with atomic_path(folder / CARD) as hidden:
        hidden.write_text(text, encoding="utf-8", newline="\n")


def models_record(base: object, experts: Mapping[str, Any], out: str | Path) -> dict[str, Any]:
    """Return base and experts as the record in the folder `out` names them; {} for modules."""

    def name(model: str | Path) -> str:
        if hub := hub_checkpoint(model):
            return "@".join(hub)
        return Path(os.path.relpath(Path(model).resolve(), Path(out).resolve())).as_posix()

    if not all(isinstance(model, str | Path) for model in (base, *experts.values())):
        return {}
    return {"base": name(base), "experts": {task: name(experts[task]) for task in sorted(experts)}}  # type: ignore[arg-type]


def read_record(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's record; {} without one. Raises: BadFile if it is no JSON."""
    record = read_json(folder / RECORD) if (folder / RECORD).is_file() else {}
    return record if isinstance(record, dict) else {}


def add_to_record(folder: Path, **content: Any) -> None:
    """Add entries to a folder's record."""
    write_json(folder / RECORD, dict(sorted({**read_record(folder), **content}.items())))
