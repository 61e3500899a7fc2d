"""The model card of a calibrated folder: what was merged, how it was calibrated, and how far it is from its experts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from featcal.calibration.record import BlockRecord
from featcal.settings import Calibration
from featcal.storage.model_card import UNTOLD, card, front_matter, name_of, shown, table, use
from featcal.version import __version__

SYMBOLS = {"ridge": "λ", "anchor_blend": "ρ", "interpolation": "α"}
RECIPE = "mergekit_config.yml"
DRIFT = """Relative drift ‖H − H_exp‖ / ‖H_exp‖ of the features H that leave a block from the expert's, and their cosine, as means
over the experts. *Before*: the block with its merged weights, on the first batch of every expert's samples. *After*: with its
calibrated weights, on all of them. These are the samples that the model was calibrated on."""


@dataclass(frozen=True)
class Drawn:
    """Where the samples came from, for those who know: of each task its place, and how they were drawn."""

    places: Mapping[str, str]
    how: Mapping[str, object]  # such as samples of each task, split, seed
    datasets: Sequence[str] = field(default_factory=tuple)  # those of the hub


def calibration_card(
    merged: object,
    base: object,
    experts: Mapping[str, Any],
    settings: Calibration,
    blocks: Sequence[BlockRecord],
    drawn: Drawn | None = None,
) -> str:
    """The card's text; it holds nothing that varies between two runs, and no number that was not measured."""
    models = {"base": base, "merged model": merged} | {f"expert {task}": experts[task] for task in sorted(experts)}
    how = merge_method(merged)
    rows = [[role, name_of(model) + (f", merged by {how}" if how and model is merged else "")] for role, model in models.items()]
    sections = [
        f"{len(experts)} fine-tuned models merged into one, whose weights were then calibrated to the experts' features with "
        f"[FeatCal](https://arxiv.org/abs/2605.13030) (featcal {__version__}): in closed form, without training.",
        "## What was merged",
        table(["role", "model"], rows),
        "## How it was calibrated",
        table(["setting", "value"], setting_rows(settings, drawn)),
        "## How far it is from its experts",
        DRIFT,
        drift_table(blocks),
        UNTOLD,
        "## Use",
        use(class_name(merged)),
    ]
    more = {"datasets": sorted(set(drawn.datasets))} if drawn and drawn.datasets else {}
    return card(f"{name_of(base)}: {len(experts)} experts merged and calibrated", models, ("merge", "featcal"), more, sections)


def setting_rows(settings: Calibration, drawn: Drawn | None) -> list[list[str]]:
    """Every setting, then where the samples came from."""
    rows = [[f"{SYMBOLS[key]}, {key}" if key in SYMBOLS else key, shown(value)] for key, value in settings.stated.items()]
    if drawn:
        rows += [[key, shown(value)] for key, value in drawn.how.items()]
        rows += [[f"samples of {task}", place] for task, place in sorted(drawn.places.items())]
    return rows


def drift_table(blocks: Sequence[BlockRecord]) -> str:
    """A row for each block and their mean."""
    keys = ("relative_drift_before", "relative_drift_after", "cosine_before", "cosine_after")
    rows = [[block.name, *(f"{getattr(block, key):.3f}" for key in keys), f"{block.tokens:,}"] for block in blocks]
    if len(blocks) > 1:
        rows.append(["mean", *(f"{sum(getattr(block, key) for block in blocks) / len(blocks):.3f}" for key in keys), ""])
    return table(["block", "drift before", "drift after", "cosine before", "cosine after", "tokens"], rows)


def merge_method(merged: object) -> str | None:
    """How a merged folder says it was merged: mergekit's recipe in it, or the card that featcal wrote."""
    if not isinstance(merged, str | Path):
        return None
    try:
        recipe = yaml.safe_load((Path(merged) / RECIPE).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):  # nothing is told, which is no fault of the merged model
        recipe = None
    if isinstance(recipe, dict) and isinstance(recipe.get("merge_method"), str):
        return f"mergekit's {recipe['merge_method']}"
    method = front_matter(Path(merged)).get("merge_method")
    return f"featcal's {method}" if isinstance(method, str) else None


def class_name(merged: object) -> str:
    """The class of transformers that loads the result."""
    if not isinstance(merged, str | Path):
        return type(merged).__name__
    return str(json.loads((Path(merged) / "config.json").read_text("utf-8"))["architectures"][0])
