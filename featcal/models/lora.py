"""LoRA adapters, added to the weights of their base by peft, which is imported only when needed.

The dense weight is W + (α / r) B A with A (r, inputs) and B (outputs, r). The base is read in
float32 or wider, so that the sum is not rounded to bfloat16.
"""

import copy
import os
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from featcal.errors import BadEnvironment, BadFile, TruncatedFile
from featcal.files import read_json
from featcal.models.batch import Model
from featcal.models.checkpoint import LazyCheckpoint, check_tensor, folder_path, no_safetensors
from featcal.models.load import ADAPTER as CONFIG
from featcal.models.load import load_as_calibrated
from featcal.models.modules import tied_names
from featcal.models.save import save_model

WEIGHTS = "adapter_model.safetensors"
# what peft adds to the names of a model's own parameters
PEFT_NAMES = re.compile(r"^base_model\.model\.|\b(base_layer|original_module)\.")


def dense_model(base: Model, adapter: str | Path) -> Any:
    """Return a copy of the base with the adapter of a folder added, in float32 or wider.

    base: a module, or a model folder. Raises: BadEnvironment without peft; MissingPath, BadFile,
    TruncatedFile for anything but a LoRA adapter of this base.
    """
    if isinstance(base, nn.Module):
        model = copy.deepcopy(base)
    else:
        stored = LazyCheckpoint(base)
        wide = any(stored.kind(name) == "float64" for name in stored.names)
        model = load_as_calibrated(base, torch.float64 if wide else torch.float32)
    return merged_adapter(with_adapter(model, adapter), adapter)


def dense_folder(base: Path, adapter: Path, out: Path) -> Path:
    """Write the base with the adapter added as a model folder. Raises: as dense_model; DiskFull.

    Its files get the date of the newest input, by which a resumed run recognises them.
    """
    save_model(dense_model(base, adapter), out, like=base)
    inputs = [adapter / CONFIG, adapter / WEIGHTS, base / "config.json"]
    newest = max(file.stat().st_mtime_ns for file in (*inputs, *base.glob("*.safetensors")))
    for file in out.rglob("*"):
        os.utime(file, ns=(newest, newest))
    return out


def with_adapter(model: nn.Module, folder: str | Path) -> Any:
    """Return the model, changed in place, as a PeftModel with the adapter of a folder.

    Dtypes narrower than float32 are widened. Also works on meta. Raises: as dense_model.
    """
    config, state = _read_adapter(Path(folder))
    peft, first = peft_package(), next(model.parameters())
    base, way_out = type(model).__name__, "give the base that it was trained on"
    mismatch = f"the adapter does not fit the base, a {base}"
    model = model.to(torch.promote_types(first.dtype, torch.float32))
    try:
        # peft draws an adapter before it is loaded, and warns of what is checked below
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
            adapted = peft.get_peft_model(model, config, low_cpu_mem_usage=first.is_meta)
        if not any("vision_model." in name for name in adapted.state_dict()):
            # the prefix of a CLIP vision tower before transformers 5
            state = {name.replace("vision_model.", "", 1): t for name, t in state.items()}
        loaded = peft.set_peft_model_state_dict(adapted, state, low_cpu_mem_usage=first.is_meta)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
        raise BadFile(folder, f"{mismatch} ({reason[:300]})", way_out) from None
    heads = tuple(f".{name}." for name in config.modules_to_save or ())  # a base may lack them
    surplus = [n for n in loaded.unexpected_keys if not any(head in n for head in heads)]
    missing = [n for n in loaded.missing_keys if ".lora_" in n]
    for names, reason in ((surplus, "the base has no"), (missing, "the file has no")):
        if names:
            raise BadFile(folder, f"{mismatch} ({reason} {', '.join(sorted(names)[:3])})", way_out)
    return adapted


def _read_adapter(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return peft's configuration and the tensors of an adapter folder. Raises: as dense_model."""
    file = folder_path(folder) / WEIGHTS
    kind = read_json(folder / CONFIG).get("peft_type")
    if kind != "LORA":
        raise BadFile(folder / CONFIG, f"peft_type is {kind!r}", "only LoRA adapters are read here")
    if not file.is_file():
        raise no_safetensors(folder, WEIGHTS)
    try:
        config = peft_package().PeftConfig.from_pretrained(str(folder))
        state = load_file(file)
    except (ValueError, TypeError, KeyError) as error:
        raise BadFile(folder / CONFIG, str(error), "save the adapter again with peft") from None
    except SafetensorError as error:
        raise TruncatedFile(file, error) from None
    config.base_model_name_or_path = config.task_type = None  # the base is given
    for name, tensor in state.items():
        check_tensor(str(file), name, tensor)
    return config, state


def merged_adapter(adapted: Any, source: str | Path, precision: torch.dtype | None = None) -> Any:
    """Return the plain model of a PeftModel, which is used up.

    precision: dtype in which the layers that have an adapter are computed and returned.
    Raises: BadFile for an adapter of one of two tied tensors.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    ties = [names for names in tied_names(adapted) if len(names) > 1]
    if precision is not None:
        for layer in [each for each in adapted.modules() if isinstance(each, BaseTunerLayer)]:
            layer.to(precision)  # type: ignore[attr-defined]
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        dense = adapted.merge_and_unload().eval()
    kept = {frozenset(names) for names in tied_names(dense)}
    for names in ties:
        plain = [PEFT_NAMES.sub("", name) for name in names]
        if frozenset(plain) not in kept or any(".base_layer." in name for name in names):
            problem = f"changes one of {' and '.join(plain)}, which the base ties to each other"
            way_out = "save the base with tie_word_embeddings=False, or train the adapter without"
            raise BadFile(source, problem, way_out)
    return dense


def without_adapters(model: Any, precision: torch.dtype | None = None) -> Any:
    """Return the plain model of a PeftModel in memory, as a copy; other models as they are."""
    if not is_peft(model):
        return model
    return merged_adapter(copy.deepcopy(model), type(model).__name__, precision)


def is_peft(model: object) -> bool:
    """Return whether a model is a PeftModel, without importing peft."""
    return isinstance(model, nn.Module) and type(model).__module__.startswith("peft.")


def peft_package() -> ModuleType:
    """Return the package peft. Raises: BadEnvironment if it is not installed."""
    try:
        import peft
    except ImportError:
        problem = "the package that reads LoRA adapters is not installed"
        way_out = "install it: pip install 'featcal[lora]'"
        raise BadEnvironment("peft", problem, way_out) from None
    return peft
