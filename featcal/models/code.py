"""Folders that are no models by themselves: LoRA adapters, and checkpoints that name code of their
own.

Such code is never run, and nobody is asked whether it may be.

Transformers asks at the terminal before it imports such code, and takes a "y" for consent. Here the
folder is refused beforehand, unless transformers' own classes of the same names are used anyway.
"""

from pathlib import Path
from typing import Any

from featcal.errors import BadFile
from featcal.storage.jsonfile import read_json

CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"
ADAPTER = "adapter_config.json"
MODULES = "modules.json"  # the parts of a SentenceTransformer, each a sub-folder


def is_adapter(model: object) -> bool:
    """Whether a model is given as a folder with an adapter and no model of its own."""
    return (
        isinstance(model, str | Path)
        and (Path(model) / ADAPTER).is_file()
        and not (Path(model) / CONFIG).is_file()
    )


def refuse_adapter(folder: str | Path) -> None:
    """Raise BadFile for an adapter where a model of its own is needed."""
    if is_adapter(folder):
        whole = f"featcal merge average --base BASE --expert NAME={folder} --out WHOLE makes a model of it and its base"
        raise BadFile(
            folder,
            "a LoRA adapter, not a model",
            "merge, calibrate and compare take it as an expert",
            whole,
        )


def refuse_code(folder: str | Path, name: str = CONFIG) -> None:
    """Raise BadFile where loading config.json or tokenizer_config.json would need code from the
    folder, or is no mapping.
    """
    path = Path(folder) / name
    if not path.is_file():
        return
    content = read_json(path)
    if not isinstance(content, dict):
        raise BadFile(
            path, "not a mapping of settings", f"give the {name} that was saved with this model"
        )
    if name == TOKENIZER and _named(content, "AutoTokenizer"):
        raise BadFile(
            path,
            "auto_map names code for the tokenizer, and no code from a checkpoint is run",
            _OWN,
        )
    if name != CONFIG or not content.get("auto_map"):
        return
    import transformers  # a second, and most folders name no code
    from transformers import CONFIG_MAPPING

    if _named(content, "AutoConfig") and content.get("model_type") not in CONFIG_MAPPING:
        problem = f"auto_map names code for a model of type {content.get('model_type')!r}, and no code from a checkpoint is run"
        raise BadFile(path, problem, "only models whose class transformers itself has can be used")
    foreign = [
        place
        for place in model_code(content)
        if not hasattr(transformers, place.rpartition(".")[2])
    ]
    if foreign:
        problem = f"auto_map names code for the model ({foreign[0]}), and no code from a checkpoint is run"
        raise BadFile(
            path,
            problem,
            "where the class that architectures names computes the same, remove the entry auto_map",
        )


_OWN = "where a class of transformers reads this tokenizer (tokenizer.json is there), remove the entry auto_map"


def model_code(config: dict[str, Any]) -> list[str]:
    """The classes in a folder's code that auto_map names for the model, such as
    modeling_own.OwnModel.
    """
    named = config.get("auto_map")
    entries = named.items() if isinstance(named, dict) else ()
    return [str(place) for auto, place in entries if auto.startswith("AutoModel")]


def _named(content: dict[str, Any], what: str) -> bool:
    """Whether auto_map, a mapping or in old files a list, names code for this."""
    named = content.get("auto_map")
    return what in named if isinstance(named, dict) else bool(named)
