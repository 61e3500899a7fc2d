"""The records of a run, its model card (README.md) and its record file (featcal.json).

Two equal runs give equal files, without a path of the machine. A card names a folder by the last
part of its path, a cached hub checkpoint by its name on the hub. A record file names models
relative to its folder, or by name and commit on the hub, so that later commands find base and
experts.
"""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from featcal import __version__
from featcal.errors import BadFile, as_bad_file, counted
from featcal.files import atomic_path, final_name, optional_json, read_json
from featcal.settings import Calibration, require

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCard
    from torch import nn

CARD, RECORD = "README.md", "featcal.json"
TEMPLATE = Path(__file__).with_name("card_template.md")
SENTENCE_CLASS = "SentenceTransformer"  # what loads a folder with a modules.json
LICENCE_KEYS = ("license", "license_name", "license_link")  # as the hub spells them
Licence = tuple[tuple[str, str], ...]  # keys and values of a card's licence; () if it has none
DIGITS = 6  # later digits differ between machines
SYMBOLS = {"ridge": "λ", "anchor_blend": "ρ", "interpolation": "α", "residual": "β"}
RECIPE = "mergekit_config.yml"


@dataclass(frozen=True)
class BlockRecord:
    """One calibrated block: its features against the teachers', means over tasks."""

    name: str
    relative_drift: float | None  # None where it was not measured
    cosine: float | None
    tokens: int  # over all tasks, without padding
    conditioning: float  # largest lower bound of a condition number among the block's sites
    experts: dict[str, int] = field(default_factory=dict)  # of a mixture: tokens of each

    @property
    def stated(self) -> dict[str, Any]:
        """Return the record by name, without `experts` where the block has none."""
        return {name: value for name, value in asdict(self).items() if name != "experts" or value}


@dataclass(frozen=True)
class Choice:
    """A choice by answers; `divergence` is by model and task, empty with too few samples."""

    chosen: str  # name of the candidate, or "merged"
    sentence: str  # the same in words
    settings: Calibration | None  # of the candidate; None for the merged model
    divergence: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def stated(self) -> dict[str, Any]:
        """Return the choice for a JSON file."""
        return {"chosen": self.chosen, "sentence": self.sentence, "divergence": self.divergence}

    @property
    def rows(self) -> list[list[str]]:
        """Return each model's name and its mean divergence, over the tasks that all models have."""
        by_model = list(self.divergence.values())
        tasks = [t for t in by_model[0] if all(t in kl for kl in by_model)] if by_model else []
        means = {name: sum(kl[t] for t in tasks) for name, kl in self.divergence.items()}
        return [[name, f"{total / len(tasks):.4f}"] for name, total in means.items()]


@dataclass(frozen=True)
class Result:
    """The calibrated model and its measurements, as `calibrate` returns them.

    settings: used for the calibration; None if the merged model was kept.
    choice:   how the settings were chosen; None if they were given.
    """

    model: "nn.Module | None"  # the calibrated module; None when a folder was written
    folder: Path | None
    blocks: list[BlockRecord]  # in forward order
    settings: Calibration | None = None
    choice: Choice | None = None

    @property
    def stated(self) -> dict[str, Any]:
        """Return settings, blocks and, if there is one, the choice for a JSON file."""
        settings = self.settings.stated if self.settings else None
        choice = {"choice": self.choice.stated} if self.choice else {}
        return {"settings": settings, "blocks": [block.stated for block in self.blocks], **choice}


def round_digits(value: float) -> float:
    """Return the value with the digits that are the same on every machine."""
    return float(f"{value:.{DIGITS}g}")


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
        texts = {k: ", ".join(map(str, v)) if isinstance(v, list) else v for k, v in front.items()}
        stated = {k: texts[k] for k in LICENCE_KEYS if texts.get(k) and isinstance(texts[k], str)}
        roles.setdefault(tuple(stated.items()) if "license" in stated else (), []).append(role)
    return dict(sorted(roles.items(), key=lambda item: not item[0]))  # no licence last


def render_card(
    title: str,
    summary: str,
    models: Mapping[str, object],  # the inputs by role
    settings: Sequence[Sequence[object]],  # rows of name and value
    front: Mapping[str, Any],  # more of the front matter
    **sections: Any,  # other variables of the template
) -> str:
    """Return the text of a card."""
    from huggingface_hub import ModelCard, ModelCardData

    if sections.get("class_name") == SENTENCE_CLASS:
        front = {"library_name": "sentence-transformers", **front}
    licences = licences_of(models)
    stated = [dict(licence) for licence in licences if licence]
    on_hub = sorted({hub[0] for hub in map(hub_checkpoint, models.values()) if hub})
    data: dict[str, Any] = {"library_name": "transformers", "tags": ["merge", "featcal"], **front}
    data |= {"base_model": on_hub, "base_model_relation": "merge"} if on_hub else {}
    data |= stated[0] if len(stated) == 1 else {}
    if ", " in data.get("license", ""):
        data["license"] = data["license"].split(", ")
    sections |= {"title": title, "summary": summary, "settings": settings, "table": table}
    sections["inputs"] = [[role, name_of(model)] for role, model in models.items()]
    sections["licences"] = [[dict(licence), roles] for licence, roles in licences.items()]
    sections["licences_differ"] = len(stated) > 1
    sections["template_path"] = str(TEMPLATE)
    return f"{ModelCard.from_template(ModelCardData(**data), **sections)}\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; a list is joined by commas, None in a row is "default"."""

    def cell(value: object) -> str:
        many = value if isinstance(value, tuple | list) else ["default" if value is None else value]
        return ", ".join(map(str, many)).replace("|", "\\|").replace("\n", " ")

    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


def calibration_card(
    merged: object,
    base: object,
    experts: Mapping[str, Any],
    result: Result,
    samples: Mapping[str, object] | None = None,
    datasets: Sequence[str] = (),
) -> str:
    """Return the model card's text; samples: rows of its section, datasets: names on the hub."""
    from featcal.models.checkpoint import encodes_sentences

    models = {"base": base, "merged model": merged}
    models |= {f"expert {task}": experts[task] for task in sorted(experts)}
    merged_by, class_name = None, type(result.model).__name__
    if isinstance(merged, str | Path):
        folder, recipe = Path(merged), None
        with suppress(OSError, UnicodeDecodeError, yaml.YAMLError):  # not mergekit's
            recipe = yaml.safe_load((folder / RECIPE).read_text("utf-8"))
        if isinstance(recipe, dict) and isinstance(recipe.get("merge_method"), str):
            merged_by = f"mergekit's {recipe['merge_method']}"
        elif isinstance(method := front_matter(folder).get("merge_method"), str):
            merged_by = f"featcal's {method}"
        sentences, config = encodes_sentences(folder), folder / "config.json"
        class_name = SENTENCE_CLASS if sentences else str(read_json(config)["architectures"][0])
    stated = result.settings.stated if result.settings else {}
    names = {key: f"{symbol}, {key}" for key, symbol in SYMBOLS.items()}
    measured = all(block.relative_drift is not None for block in result.blocks)
    rows = [[names.get(k, k), v or "all" if k == "modules" else v] for k, v in stated.items()]
    front = {"datasets": sorted(set(datasets))} if datasets else {}
    sections = {"calibration": result, "merged_by": merged_by}
    sections |= {"experts": counted(len(experts), "fine-tuned model")}
    sections |= {"blocks": block_rows(result.blocks) if measured else [], "class_name": class_name}
    sections |= {"samples": list((samples or {}).items()), "version": __version__}
    title = f"{name_of(base)}: {counted(len(experts), 'expert')} merged"
    title += " and calibrated" * bool(stated)
    return render_card(title, "", models, rows, front, **sections)


def block_rows(blocks: Sequence[BlockRecord]) -> list[list[str]]:
    """Return a row of drift, cosine and tokens for each block, and their means."""
    rows = [[b.name, f"{b.relative_drift:.3f}", f"{b.cosine:.3f}", f"{b.tokens:,}"] for b in blocks]
    if len(blocks) > 1:
        pairs = [(block.relative_drift or 0.0, block.cosine or 0.0) for block in blocks]
        means = [f"{sum(values) / len(blocks):.3f}" for values in zip(*pairs, strict=True)]
        rows.append(["mean", *means, ""])
    return rows


def add_results(folder: Path, results: Sequence["EvalResult"]) -> None:
    """Add measured results to a folder's card: all to the hub's model-index, accuracies to a table.

    A result replaces an older one of its metric and data. The table omits others' percentages.
    """
    card = read_card(folder)
    older = card.data.eval_results or []
    kept = [old for old in older if not any(old.is_equal_except_value(new) for new in results)]
    card.data.eval_results = [*kept, *results]
    card.data.model_name = card.data.model_name or final_name(folder)
    rows = [
        [r.dataset_name, r.dataset_split or "", f"{100 * r.metric_value:.2f}"]
        for r in card.data.eval_results
        if r.metric_type == "accuracy" and isinstance(v := r.metric_value, float) and v <= 1
    ]
    if rows:
        section = f"## Accuracy\n\n{table(['task', 'split', 'percent correct'], rows)}\n"
        pattern = re.compile(r"^## Accuracy\n.*?(?=^## |\Z)", re.S | re.M)
        replaced, count = pattern.subn(lambda _: f"{section}\n", card.text, count=1)
        card.text = replaced if count else f"{card.text.rstrip()}\n\n{section}"
    write_card(folder, f"{str(card).rstrip()}\n")


def read_card(folder: Path) -> "ModelCard":
    """Return a folder's card, to be changed. Raises: BadFile, also for one in the hub's cache."""
    from huggingface_hub import ModelCard

    if hub := hub_checkpoint(folder):
        way_out = f"copy it: hf download {hub[0]} --local-dir FOLDER, and give that folder"
        raise BadFile(folder, "is in the hub's cache, where no card may be changed", way_out)
    if not (folder / CARD).is_file():
        way_out = "give a folder that featcal merge or calibrate wrote"
        raise BadFile(folder, f"no card ({CARD}) in this folder", way_out)
    problem, way_out = "its YAML head or text cannot be read", "correct it, or remove the head"
    with as_bad_file(folder / CARD, problem, way_out):
        return ModelCard.load(folder / CARD)


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
    """Return the content of a folder's record; {} without one. Raises: BadFile, BadSetting."""
    record = optional_json(folder / RECORD)
    for key, kind in {"experts": dict, "samples": dict, "rows": dict, "earlier": list}.items():
        value, expected = record.get(key, kind()), "must be as featcal writes it"
        require(isinstance(value, kind), f"{folder / RECORD}: {key}", value, expected)
    return record
