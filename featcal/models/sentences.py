"""Turn texts into vectors as a SentenceTransformer folder says: prompt, pooling and dense layers.

n samples · d width of a feature · p width of a vector.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.functional import normalize

from featcal.errors import BadFile, warn_once
from featcal.files import optional_json, read_json
from featcal.models.checkpoint import MODULES, encodes_sentences, modules_of, read_safetensors
from featcal.models.load import load_tokenizer

PICKLED = (".bin", ".pt", ".pth")
MODES = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken")  # in this order
# of a SentenceTransformer's dense layer; the two that are left out need arguments
ACTIVATIONS = {"Identity", *nn.modules.activation.__all__} - {"MultiheadAttention", "Threshold"}
USE_LIBRARY = "encode with sentence-transformers itself"


@dataclass(frozen=True)
class Texts:
    """How a folder prepares texts; without a modules.json it leaves them as they are."""

    prompt: str = ""  # put before every text
    lower: bool = False
    longest: int | None = None  # maximum number of tokens

    @classmethod
    def of_folder(cls, folder: Path) -> "Texts":
        """Read a folder's settings. Raises: BadFile."""
        if not (folder / MODULES).is_file():
            return cls()
        limits = next(map(optional_json, sorted(folder.glob("sentence_*_config.json"))), {})
        if "message" in (limits.get("modality_config") or {}):
            problem = "puts texts into a chat template (message), which is not supported"
            way_out = "remove message there, if it was trained on plain texts"
            raise BadFile(folder / "sentence_bert_config.json", problem, way_out)
        prompts = optional_json(folder / "config_sentence_transformers.json")
        prompt = (prompts.get("prompts") or {}).get(prompts.get("default_prompt_name")) or ""
        return cls(prompt, bool(limits.get("do_lower_case")), limits.get("max_seq_length"))

    def prepared(self, text: str) -> str:
        """Return a text as the model reads it."""
        return (self.prompt + text).lower() if self.lower else self.prompt + text


@dataclass(frozen=True)
class Sentences:
    """Settings that turn the features of texts into vectors."""

    modes: tuple[str, ...] = ("mean",)  # of pooling over tokens; several are concatenated
    layers: tuple[Callable[[Tensor], Tensor], ...] = ()  # applied to the pooled vectors, in turn
    unpooled: int = 0  # number of tokens of the prompt, which pooling leaves out
    given: bool = False  # whether the folder defines all this

    @classmethod
    def of_folder(cls, folder: str | Path) -> "Sentences":
        """Read a folder's modules.json; without one, use the mean over tokens. Raises: BadFile."""
        folder, modes, unpooled = Path(folder), ("mean",), 0
        if not encodes_sentences(folder):  # SpladePooling and the like are not used here
            return cls()
        layers: list[Callable[[Tensor], Tensor]] = []
        prompt = Texts.of_folder(folder).prepared("")
        for path, kind in modules_of(folder).items():
            if kind == "Pooling":
                config = optional_json(folder / path / "config.json")
                modes = pooling_modes(config, folder / path / "config.json")
                if prompt and not config.get("include_prompt", True):
                    tokenizer = load_tokenizer(folder)
                    ids = tokenizer(prompt)["input_ids"]
                    unpooled = len(ids) - (ids[-1] in tokenizer.all_special_ids)
            elif kind == "Dense":
                layers.append(dense_layer(folder / path))
            elif kind == "Normalize":
                layers.append(lambda vectors: normalize(vectors, dim=-1))
            elif kind != "Dropout":
                problem = f"its module {kind} ({path}) is not supported"
                raise BadFile(folder / MODULES, problem, USE_LIBRARY)
        if width := optional_json(folder / "config_sentence_transformers.json").get("truncate_dim"):
            layers.append(lambda vectors: vectors[:, :width])
        return cls(modes, tuple(layers), unpooled, True)

    @classmethod
    def or_mean(cls, folder: str | Path) -> "Sentences":
        """Read a folder's modules; if one is not supported, warn and use the mean over tokens."""
        try:
            return cls.of_folder(folder)
        except BadFile as error:
            warn_once(f"{str(error).splitlines()[0]} Texts are compared by the mean over tokens.")
            return cls()

    def vectors(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return the vectors (n, p) of features (n, tokens, d) of texts padded on the right."""
        mask = mask.to(hidden.device, copy=True)  # (n, tokens)
        mask[:, : self.unpooled] = 0
        vectors = pool(hidden, mask, self.modes)
        for layer in self.layers:
            vectors = layer(vectors)
        return vectors


def pool(hidden: Tensor, mask: Tensor, modes: Sequence[str]) -> Tensor:
    """Pool features (n, tokens, d) over the tokens of a mask (n, tokens) to (n, d · modes)."""
    counted = mask[..., None].to(hidden.dtype)
    rows = torch.arange(len(hidden), device=hidden.device)
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    first, last = mask.argmax(1), (mask * positions).argmax(1)
    weights = counted * positions[None, :, None]
    pools = {
        "cls": lambda: hidden[rows, first],
        "max": lambda: hidden.masked_fill(counted == 0, float("-inf")).amax(1),
        "mean": lambda: (hidden * counted).sum(1) / counted.sum(1).clamp_min(1e-9),
        "lasttoken": lambda: hidden[rows, last],
        "mean_sqrt_len": lambda: (hidden * counted).sum(1) / counted.sum(1).clamp_min(1e-9).sqrt(),
        "weightedmean": lambda: (hidden * weights).sum(1) / weights.sum(1).clamp_min(1e-9),
    }
    return torch.cat([pools[mode]() for mode in modes], dim=-1)


def pooling_modes(config: Mapping[str, Any], file: Path) -> tuple[str, ...]:
    """Return the modes of a Pooling module, in its old or its present form. Raises: BadFile."""
    present, old = config.get("pooling_mode"), "pooling_mode_"
    flags = [key.removeprefix(old) for key, on in config.items() if key.startswith(old) and on]
    modes = [present] if isinstance(present, str) else present or flags
    modes = [mode.removesuffix("_tokens").removesuffix("_token") for mode in modes]
    for mode in modes or ["nothing"]:
        if mode not in MODES:
            raise BadFile(file, f"pools by {mode}, which is not supported", USE_LIBRARY)
    return tuple(modes if present else sorted(modes, key=MODES.index))


def dense_layer(folder: Path) -> Callable[[Tensor], Tensor]:
    """Return a Dense module: a linear layer and its activation. Raises: BadFile."""
    config, file = optional_json(folder / "config.json"), folder / "model.safetensors"
    name = config.get("activation_function", "Tanh")
    kind = str(name).rsplit(".", 1)[-1]
    supported = file.is_file() and not config.get("use_residual")
    source = config.get("module_input_name", "sentence_embedding")
    if not supported or kind not in ACTIVATIONS or source != "sentence_embedding":
        problem = f"a dense layer of {source} with {name}, a residual or no safetensors"
        raise BadFile(folder, f"{problem} is not supported", USE_LIBRARY)
    tensors, activation = read_safetensors(file), getattr(nn, kind)()
    if (W := tensors.get("linear.weight")) is None:
        raise BadFile(file, "has no tensor linear.weight", "save the model anew")
    b = tensors.get("linear.bias", torch.zeros(len(W)))
    return lambda vectors: activation(vectors @ W.to(vectors).T + b.to(vectors))


def merge_modules(base: Path, experts: Mapping[str, Path], out: Path | None = None) -> list[str]:
    """Write the experts' mean weights of each module, such as Dense, into `out`; None checks only.

    Returns: a sentence for each averaged module and each other difference. Raises: BadFile.
    """
    base_modules, sentences = modules_of(base), []
    folders = {name: path for name, path in experts.items() if (path / MODULES).is_file()}
    if folders and not (base / MODULES).is_file():
        sentences.append("The base is no SentenceTransformer: pooling and prompts are lost.")
    for name, folder in folders.items():
        with suppress(BadFile):  # settings that only calibration has to support
            if base_modules and Texts.of_folder(folder) != Texts.of_folder(base):
                difference = "has another prompt, case or length than the base"
                sentences.append(f"Expert {name!r} {difference}.")
        modules = modules_of(folder)
        for path, kind in modules.items():
            matters = base_modules or any((folder / path).glob("*.safetensors"))
            if base_modules.get(path) != kind and matters:
                problem = f"expert {name!r} has the module {kind} ({path}), which the base lacks"
                raise BadFile(folder / MODULES, problem, "give a base with the same modules")
        for path, kind in base_modules.items():
            if modules.get(path) != kind:
                problem = f"expert {name!r} lacks the base's module {kind} ({path})"
                if any((base / path).glob("*.safetensors")):
                    raise BadFile(folder / MODULES, problem, "give a base with the same modules")
                sentences.append(f"{problem[0].upper()}{problem[1:]}; the merged model has it.")
    for path, kind in base_modules.items():
        for file in sorted((base / path).glob("*")):
            files = {name: folder / path / file.name for name, folder in folders.items()}
            read = read_json if file.suffix == ".json" else Path.read_bytes
            differ = [n for n, f in files.items() if not f.is_file() or read(f) != read(file)]
            if not differ:
                continue
            where = f"{kind} ({path}/{file.name})"
            if file.suffix == ".safetensors":
                tensors = mean_of(file, files)
                sentences.append(f"The weights of {where} are the mean over the experts.")
                if out is not None:
                    (out / path / file.name).write_bytes(save(tensors, metadata={"format": "pt"}))
            elif file.suffix in PICKLED:
                problem = f"experts differ in {where}, which is not safetensors"
                raise BadFile(file, problem, "save base and experts anew as safetensors")
            elif file.suffix == ".json":
                sentences.append(f"{where} differs in {', '.join(differ)}; the base's is used.")
    return sentences


def mean_of(file: Path, experts: Mapping[str, Path]) -> dict[str, torch.Tensor]:
    """Return the means of the experts' tensors, in the base's precision. Raises: BadFile."""
    base, sums = read_safetensors(file), {}
    for name, path in sorted(experts.items()):
        tensors = read_safetensors(path) if path.is_file() else {}
        for key, tensor in base.items():
            if key not in tensors or tensors[key].shape != tensor.shape:
                problem = f"expert {name!r} has no tensor {key} of shape {[*tensor.shape]}"
                raise BadFile(path, problem, "give a base with the same modules")
            sums[key] = sums.get(key, 0) + tensors[key].double()
    return {key: (total / len(experts)).to(base[key].dtype) for key, total in sums.items()}
