"""Build a model without weights, and find each of its tensors in a checkpoint folder.

Names and conversions are transformers' own. Headers alone show which tensors are tied, missing,
surplus or misshapen, before any is read.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import CLIPModel, CLIPVisionModel, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)

from featcal.errors import BadFile, MissingTensor, WrongKeys
from featcal.models.checkpoint import LazyCheckpoint
from featcal.models.load import CONFIG, VISION, model_class, quiet_transformers, same_tower
from featcal.models.modules import tied_names

Read = Callable[[str], Tensor]


def skeleton(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    like: type[PreTrainedModel] | None = None,
) -> tuple[PreTrainedModel, str | None]:
    """Build the model of a folder in evaluation mode with parameters on meta and real buffers.

    Of a whole CLIP the vision tower is built. like: class to build instead if it has the same
    tower. Returns: the model, and the part of the checkpoint that it is (None: all).
    Raises: MissingPath; BadFile for a config.json that makes no model.
    """
    kind: Any = model_class(folder)
    if like is not None and same_tower(kind, like):
        kind = like
    kind, part = (CLIPVisionModel, VISION) if kind is CLIPModel else (kind, None)
    try:
        with (
            quiet_transformers(),
            torch.random.fork_rng(devices=[]),
        ):  # some classes draw while being built
            with torch.device("meta"):
                config = kind.config_class.from_pretrained(folder, local_files_only=True)
                module: PreTrainedModel = kind._from_config(config, dtype=dtype).eval()
            for parameter in module.parameters():
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]
            _map_buffers(module, lambda buffer: torch.empty_like(buffer, device="cpu"))
            module.init_weights()  # fills the buffers and ties parameters
    except Exception as error:  # transformers raises many kinds for a config it cannot use
        problem = f"transformers makes no {kind.__name__} of it ({' '.join(str(error).split())})"
        way_out = "give the config.json that was saved with these weights"
        raise BadFile(Path(folder) / CONFIG, problem, way_out) from None
    wide = module._get_dtype_plan(dtype)  # what transformers keeps in float32, such as T5's wo
    if wide:
        pattern, _, _ = build_glob_alternation(list(wide))
        for name, parameter in module.named_parameters():
            if pattern.search(name):
                parameter.data = parameter.data.float()
    _map_buffers(module, lambda buffer: buffer.to(device))
    return module, part


def _map_buffers(module: PreTrainedModel, make: Callable[[Tensor], Tensor]) -> None:
    for part in module.modules():
        part._buffers |= {n: make(b) for n, b in part._buffers.items() if b is not None}


# Which stored tensors make which tensor of the model


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the model: stored in the checkpoint, or made of several that are."""

    name: str
    sources: tuple[str, ...]  # stored names
    shape: tuple[int, ...]
    # makes the tensor, and others, of its sources; None if it is stored as it is
    convert: Callable[[Read], dict[str, Tensor]] | None = None

    def read(self, read: Read) -> Tensor:
        """Return the tensor in memory of its own; `read` reads each source."""
        if self.convert is None:
            return read(self.sources[0])
        return self.convert(read)[self.name].clone()

    def to_sources(
        self, tensor: Tensor, shape_of: Callable[[str], tuple[int, ...]]
    ) -> dict[str, Tensor]:
        """Return the sources of this tensor; nothing if it is not made of whole rows of them.

        Converting tensors filled with their source's number shows where each row comes from.
        """
        if self.convert is None or len(self.sources) == 1:
            return {self.sources[0]: tensor}
        marks = {
            name: torch.full((*shape_of(name)[:-1], 1), number)
            for number, name in enumerate(self.sources)
        }
        made = self.convert(marks.__getitem__)[self.name]
        if made.shape != (*self.shape[:-1], 1):
            return {}
        return {
            name: tensor[made[..., 0] == number].reshape(shape_of(name))
            for number, name in enumerate(self.sources)
        }


def stored_tensors(
    module: PreTrainedModel, checkpoint: LazyCheckpoint, heads: bool = False
) -> dict[str, StoredTensor]:
    """Return by name every tensor of the model's state that the checkpoint holds.

    heads: the checkpoint's head may differ from the model's, or be missing. Raises: WrongKeys;
    MissingTensor for a parameter stored under none of its names; BadFile.
    """
    state = module.state_dict()
    stored, surplus = dict[str, StoredTensor](), []
    for each in _matches(module, checkpoint, state):
        if each.name in state and each.name not in stored:
            stored[each.name] = each
        else:
            surplus.append(each)
    misshapen = sorted(name for name in stored if stored[name].shape != tuple(state[name].shape))
    # transformers drops tensors of old files that every model builds itself
    keys: Any = SimpleNamespace(missing_keys=set(state) - set(stored))
    keys.unexpected_keys = {each.name for each in surplus}
    module._adjust_missing_and_unexpected_keys(keys)
    unexpected = sorted(each.sources[0] for each in surplus if each.name in keys.unexpected_keys)
    ties = tied_names(module)
    missing = [names[0] for names in ties if stored.keys().isdisjoint(names)]
    missing += sorted(set(keys.missing_keys).difference(*ties))  # buffers
    if heads:
        missing = [name for name in missing if not _in_head(name, module)]
        unexpected = [name for name in unexpected if not _in_head(name, module)]
    if unexpected or misshapen:
        raise WrongKeys(checkpoint.folder, type(module).__name__, missing, unexpected, misshapen)
    if missing:
        raise MissingTensor(checkpoint.folder, missing[0], checkpoint.names)
    return stored


def _in_head(name: str, module: PreTrainedModel) -> bool:
    """Return whether a tensor belongs to a head or pooler, not to the tower below it."""
    if "pooler" in name.split("."):
        return True
    prefix, own = f"{module.base_model_prefix}.", module.state_dict().keys()
    has_head = any(each.startswith(prefix) for each in own)
    return not name.startswith(prefix) and (name not in own or has_head)


def _matches(
    module: PreTrainedModel, checkpoint: LazyCheckpoint, state: dict[str, Tensor]
) -> Iterator[StoredTensor]:
    """Yield every tensor of the checkpoint under the model's name for it. Raises: BadFile."""
    transforms = get_model_conversion_mapping(module)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    parts: dict[str, list[tuple[str, str]]] = {}  # sources and patterns by the first name made
    prefix = module.base_model_prefix
    # parts that are joined are joined in this order
    for source in sorted(checkpoint.names, key=dot_natural_key):
        name, pattern = rename_source_key(source, renamings, converters, prefix, state)
        if name not in state and source in state:  # a present name that looks like an old one
            name, pattern = rename_source_key(source, [], [], prefix, state)
        if pattern is None:
            yield StoredTensor(name, (source,), checkpoint.shape(source))
        else:
            parts.setdefault(name, []).append((source, pattern))

    def converted(read: Read, first: str) -> dict[str, Tensor]:
        """Return the tensors of one of transformers' conversions; they may share memory."""
        converter = deepcopy(by_pattern[parts[first][0][1]])  # it collects its inputs
        for source, pattern in parts[first]:
            converter.add_tensor(first, source, pattern, read(source))  # type: ignore[arg-type]
        made = converter.convert(first, model=module, config=module.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}

    for first, pairs in parts.items():
        sources, convert = tuple(source for source, _ in pairs), partial(converted, first=first)
        try:
            made = convert(lambda name: torch.empty(checkpoint.shape(name), device="meta"))
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            problem = f"{sources[0]} and its other parts make no {first} ({reason})"
            way_out = "write the model again with save_pretrained(folder)"
            raise BadFile(checkpoint.file_of(sources[0]), problem, way_out) from None
        for name, tensor in made.items():
            yield StoredTensor(name, sources, tuple(tensor.shape), convert)
