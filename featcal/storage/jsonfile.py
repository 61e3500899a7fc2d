"""JSON files."""

import json
from pathlib import Path
from typing import Any

from featcal.errors import BadFile, MissingPath
from featcal.storage.atomic import atomic_path

_AGAIN = "make or copy it again"


def write_json(path: str | Path, content: Any) -> None:
    """JSON with two blanks of indentation, keys in the order given, and a final line end. Raises:
    BadFile on NaN.
    """
    try:
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise BadFile(
            path, "NaN or infinity among the values to write", "look at the numbers that lead here"
        ) from None
    with atomic_path(path) as hidden:
        hidden.write_text(text + "\n", encoding="utf-8", newline="\n")


def read_json(path: str | Path) -> Any:
    """What write_json wrote. Raises: MissingPath, BadFile."""
    if not Path(path).is_file():
        raise MissingPath(path, "a JSON file", _AGAIN)
    try:
        return json.loads(Path(path).read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadFile(path, f"not JSON ({error})", _AGAIN) from None
