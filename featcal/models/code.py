"""Code that a checkpoint folder names: it is never run, and nobody is asked whether it may be.

Transformers asks at the terminal before it imports such code, and takes a "y" for consent. Here the folder is refused beforehand,
unless transformers' own class of that name is used anyway.
"""

from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from featcal.errors import BadFile
from featcal.storage.results import read_json

CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"


def refuse_code(folder: str | Path, name: str = CONFIG) -> None:
    """Raise BadFile where loading config.json or tokenizer_config.json would need code from the folder, or is no mapping."""
    path = Path(folder) / name
    if not path.is_file():
        return
    content = read_json(path)
    if not isinstance(content, dict):
        raise BadFile(path, "not a mapping of settings", f"give the {name} that was saved with this model")
    if name == TOKENIZER and _named(content, "AutoTokenizer"):
        raise BadFile(path, "auto_map names code for the tokenizer, and no code from a checkpoint is run", _OWN)
    if name == CONFIG and _named(content, "AutoConfig") and content.get("model_type") not in CONFIG_MAPPING:
        problem = f"auto_map names code for a model of type {content.get('model_type')!r}, and no code from a checkpoint is run"
        raise BadFile(path, problem, "only models whose class transformers itself has can be used")


_OWN = "where a class of transformers reads this tokenizer (tokenizer.json is there), remove the entry auto_map"


def _named(content: dict[str, Any], what: str) -> bool:
    """Whether auto_map, a mapping or in old files a list, names code for this."""
    named = content.get("auto_map")
    return what in named if isinstance(named, dict) else bool(named)
