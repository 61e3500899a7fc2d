"""Class names and prompt templates of the paper's tasks, as the published experts were trained with
(`{}` is the class name).

Names are kept to the letter, with their underscores and misspellings: another spelling is another
text feature.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from featcal.errors import UnknownKey


@dataclass(frozen=True)
class Prompts:
    """Classes in the order of their labels, and templates."""

    classes: tuple[str, ...]
    templates: tuple[str, ...]


def load_prompts(task: str) -> Prompts:
    """Prompts of one task key. Raises: UnknownKey with the nearest key."""
    known = _all_prompts()
    if task not in known:
        raise UnknownKey("task", task, list(known))
    return Prompts(tuple(known[task]["classes"]), tuple(known[task]["templates"]))


@cache
def _all_prompts() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        files("reproduction.data").joinpath("prompts.json").read_text("utf-8")
    )
    return content
