"""The model card of a merged folder: what was merged, by which method and settings, under which
licence.
"""

from collections.abc import Mapping
from typing import Any

from featcal.merging.methods import Method
from featcal.storage.model_card import UNTOLD, card, name_of, shown, table, use
from featcal.version import __version__


def merge_card(
    rule: Method, settings: Any, base: object, experts: Mapping[str, Any], architecture: str
) -> str:
    """The card's text, which says nothing of what the merged model can do, as nothing was
    measured.
    """
    models = {"base": base} | {f"expert {task}": experts[task] for task in sorted(experts)}
    values = [[key, shown(value)] for key, value in settings]
    note = f" {rule.note}" if rule.note else ""
    sections = [
        f"{len(experts)} fine-tuned models merged into one by `{rule.name}` (featcal {__version__}).",
        "## What was merged",
        table(["role", "model"], [[role, name_of(model)] for role, model in models.items()]),
        "## How it was merged",
        f"`{rule.name}`, {rule.source}.{note}",
        table(["setting", "value"], values) if values else "The method has no settings.",
        UNTOLD,
        "## Use",
        use(architecture),
    ]
    return card(
        f"{name_of(base)}: {len(experts)} experts merged",
        models,
        ("merge", "featcal"),
        {"merge_method": rule.name},
        sections,
    )
