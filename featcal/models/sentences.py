"""The folder of a SentenceTransformer besides its transformer: the prompt and the limit of its
texts, and further modules, such as pooling or a dense layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from featcal.errors import BadFile
from featcal.files import read_json

MODULES = "modules.json"  # the modules, each in a sub-folder
PICKLED = (".bin", ".pt", ".pth")


@dataclass(frozen=True)
class Texts:
    """How a folder prepares texts; without a modules.json it leaves them as they are.

    prompt: put before every text.   lower: lower-case texts.   longest: maximum number of tokens.
    """

    prompt: str = ""
    lower: bool = False
    longest: int | None = None

    @classmethod
    def of_folder(cls, folder: Path) -> "Texts":
        """Read a folder's settings. Raises: BadFile."""
        if not (folder / MODULES).is_file():
            return cls()
        limits = [optional_json(file) for file in sorted(folder.glob("sentence_*_config.json"))]
        limits = limits[0] if limits else {}
        prompts = optional_json(folder / "config_sentence_transformers.json")
        prompt = (prompts.get("prompts") or {}).get(prompts.get("default_prompt_name")) or ""
        return cls(prompt, bool(limits.get("do_lower_case")), limits.get("max_seq_length"))

    def prepared(self, text: str) -> str:
        """Return a text as the model reads it."""
        return self.prompt + (text.lower() if self.lower else text)


def optional_json(file: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; an empty one if there is none."""
    content = read_json(file) if file.is_file() else {}
    return content if isinstance(content, dict) else {}


def modules_of(folder: Path) -> dict[str, str]:
    """Return the class names of a folder's modules by sub-folder, without the transformer.

    Raises: BadFile for an unreadable modules.json.
    """
    file = folder / MODULES
    if not file.is_file():
        return {}
    try:
        parts = {PurePosixPath(part["path"]).as_posix(): part["type"] for part in read_json(file)}
        return {path: str(kind).rpartition(".")[2] for path, kind in parts.items() if path != "."}
    except (TypeError, KeyError, AttributeError):
        problem = "is not the list of a SentenceTransformer's parts"
        raise BadFile(file, problem, "copy or download it again, or remove it") from None


def merge_modules(base: Path, experts: Mapping[str, Path], out: Path | None = None) -> list[str]:
    """Write the means of the experts' weights of each module, such as Dense, into a merged folder
    that has the base's modules.

    An expert without a modules.json has the base's modules.
    out: None checks only.
    Returns: a sentence for each module that is averaged, or in which models differ otherwise.
    Raises: BadFile for a module that the base lacks, or whose weights cannot be averaged.
    """
    ours, sentences = modules_of(base), []
    own = {name: path for name, path in experts.items() if (path / MODULES).is_file()}
    for name, folder in own.items():
        for path, kind in modules_of(folder).items():
            weights = any((folder / path).glob("*.safetensors"))
            if ours.get(path) != kind and (weights or ours):
                problem = f"expert {name!r} has the module {kind} ({path}), which the base lacks"
                raise BadFile(folder / MODULES, problem, "give a base with the same modules")
    for path, kind in ours.items():
        for file in sorted((base / path).glob("*")):
            theirs = {name: folder / path / file.name for name, folder in own.items()}
            read = read_json if file.suffix == ".json" else Path.read_bytes
            differ = [n for n, f in theirs.items() if not f.is_file() or read(f) != read(file)]
            if not differ:
                continue
            where = f"{kind} ({path}/{file.name})"
            if file.suffix == ".safetensors":
                tensors = mean_of(file, theirs)
                sentences.append(f"The weights of {where} are the mean over the experts.")
                if out is not None:
                    save_file(tensors, out / path / file.name, metadata={"format": "pt"})
            elif file.suffix in PICKLED:
                problem = f"experts differ in {where}, which is not safetensors"
                raise BadFile(file, problem, "save base and experts anew as safetensors")
            elif file.suffix == ".json":
                sentences.append(f"{where} differs in {', '.join(differ)}; the base's is used.")
    return sentences


def mean_of(file: Path, experts: Mapping[str, Path]) -> dict[str, torch.Tensor]:
    """Return the means of the experts' tensors, in the base's precision. Raises: BadFile."""
    base, sums = load_file(file), {}
    for name, own in sorted(experts.items()):
        theirs = load_file(own) if own.is_file() else {}
        for key, tensor in base.items():
            if key not in theirs or theirs[key].shape != tensor.shape:
                problem = f"expert {name!r} has no tensor {key} of shape {[*tensor.shape]}"
                raise BadFile(own, problem, "give a base with the same modules")
            sums[key] = sums.get(key, 0) + theirs[key].double()
    return {key: (total / len(experts)).to(base[key].dtype) for key, total in sums.items()}
