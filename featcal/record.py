"""featcal.json, which says what a folder was made from and how.

Models are named relative to the folder, or by name and commit on the hub, so that a result folder
holds no path of the machine and later commands find base and experts by themselves.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from featcal.card import hub_checkpoint
from featcal.files import read_json, write_json

RECORD = "featcal.json"


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
