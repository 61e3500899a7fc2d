"""Low-rank adapters of PEFT, added to the weights of their base.

The dense weight is W + (α / r) B A with A (r, inputs) and B (outputs, r). Needs the package peft,
which is only imported when one of these functions is called.
"""

import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from featcal.errors import BadEnvironment, BadFile, MissingPath, WrongKeys
from featcal.models.load import load_as_calibrated
from featcal.storage.checkpoint import no_safetensors
from featcal.storage.results import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def dense_model(base: nn.Module | str | Path, adapters: str | Path) -> Any:
    """The base, a copy or read in float32, with the adapters of a folder added to its weights.

    Raises: BadEnvironment (no peft), MissingPath, BadFile (not a LoRA folder), WrongKeys for
    adapters of another base.
    """
    folder = Path(adapters)
    if not folder.is_dir():
        raise MissingPath(
            folder, "a folder with adapters", "check the path; hub names must be fetched first"
        )
    if not (folder / CONFIG).is_file():
        there = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise BadFile(
            folder,
            f"no {CONFIG} in this folder (found: {there})",
            "give the folder that PEFT's save_pretrained wrote",
        )
    if not (folder / WEIGHTS).is_file():
        raise no_safetensors(folder, WEIGHTS)
    written = read_json(folder / CONFIG)
    kind = written.get("peft_type") if isinstance(written, dict) else None
    if kind != "LORA":
        raise BadFile(folder / CONFIG, f"peft_type is {kind!r}", "only LoRA adapters are read here")
    peft = peft_package()
    try:
        with torch.random.fork_rng(devices=[]):
            config = peft.PeftConfig.from_pretrained(str(folder))
            config.base_model_name_or_path = (
                None  # it is given; the name in the file may be that of another copy
            )
            adapted = peft.get_peft_model(
                copy.deepcopy(base) if isinstance(base, nn.Module) else load_as_calibrated(base),
                config,
            )
    except ValueError as error:  # the base has none of the modules
        raise WrongKeys(
            folder, f"the base {base}", [], [str(error).splitlines()[0][:120]], []
        ) from None
    state = load_file(folder / WEIGHTS)
    _require_fit(
        folder, base, peft.get_peft_model_state_dict(adapted, save_embedding_layers=False), state
    )
    peft.set_peft_model_state_dict(adapted, state)
    return adapted.merge_and_unload().eval()


def without_adapters(model: Any) -> Any:
    """A PeftModel in memory as the plain model it computes, a copy; anything else as it is."""
    if not (isinstance(model, nn.Module) and type(model).__module__.startswith("peft.")):
        return model
    with torch.no_grad():
        return copy.deepcopy(model).merge_and_unload().eval()  # type: ignore[operator]


def _require_fit(
    folder: Path, base: str | Path, expected: dict[str, Any], found: dict[str, Any]
) -> None:
    missing, unexpected = (
        sorted(expected.keys() - found.keys()),
        sorted(found.keys() - expected.keys()),
    )
    misshapen = sorted(
        name for name in expected.keys() & found.keys() if expected[name].shape != found[name].shape
    )
    if missing or unexpected or misshapen:
        raise WrongKeys(folder, f"the base {base}", missing, unexpected, misshapen)


def peft_package() -> ModuleType:
    """The package peft. Raises: BadEnvironment where it is not installed."""
    try:
        import peft
    except ImportError:
        way_out = "install it: pip install 'featcal[language]'"
        raise BadEnvironment(
            "peft", "the package that reads adapters is not installed", way_out
        ) from None
    return peft
