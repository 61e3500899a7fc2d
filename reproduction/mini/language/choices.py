"""What the bases, experts and merged models of the mini suite scored on validation texts when they
were chosen.

Written by scripts/choose_language.py and scripts/choose_llama.py, which know neither calibration
nor adapters.
"""

import json
from pathlib import Path
from typing import Any

FILES = ("choice_t5.json", "choice_llama.json")

Scores = dict[str, dict[str, float]]  # by model, by column


def measured(folder: Path = Path(__file__).parent) -> dict[str, Scores]:
    """By role: scores of the base, the experts, their average and task arithmetic at several
    scales; nothing where not chosen.
    """
    found: dict[str, Scores] = {}
    for name in FILES:
        file = folder / name
        recorded: dict[str, Any] = (
            json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        )
        found |= {role: _scores(record) for role, record in recorded.items()}
    return found


def _scores(record: dict[str, Any]) -> Scores:
    models = record.get("validation", record)
    return {
        model: {task: value for task, value in values.items() if task != "average"}
        for model, values in models.items()
    }
