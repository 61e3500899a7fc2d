"""Find the tensors of transformers' model in a checkpoint folder, whatever names its files use.

Names and conversions are transformers' own: older names, prefixes, tied tensors, fused matrices and
packed experts. Headers alone show which tensors are tied, missing, surplus or misshapen.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPModel, CLIPVisionModel, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)

from featcal.errors import BadFile, MissingTensor, NotFinite, WrongKeys
from featcal.models.checkpoint import LazyCheckpoint, all_finite
from featcal.models.load import (
    CONFIG,
    VISION,
    in_head,
    model_class,
    quiet_transformers,
    read_config,
    same_tower,
)
from featcal.models.modules import tied_names

Read = Callable[[str], Tensor]
NamedTensors = Iterable[tuple[str, Tensor]]


def skeleton(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    like: type[PreTrainedModel] | None = None,
    whole: bool = False,
) -> tuple[PreTrainedModel, str | None]:
    """Build the model of a folder in evaluation mode with parameters on meta and real buffers.

    like: class to build instead if it has the same tower. whole: build both towers of a CLIPModel,
    not the vision tower only. Returns: the model, and the part of the checkpoint that it is (None:
    all). Raises: MissingPath; BadFile for a config.json that makes no model.
    """
    kind: Any = model_class(folder)
    if like is not None and same_tower(kind, like):
        kind = like
    kind, part = (CLIPVisionModel, VISION) if kind is CLIPModel and not whole else (kind, None)
    try:
        with (
            quiet_transformers(),
            torch.random.fork_rng(devices=[]),
        ):  # some classes draw while being built
            with torch.device("meta"):
                config = read_config(kind, folder)
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
    """One tensor of the model: stored in the checkpoint, or made of tensors that are."""

    name: str
    sources: tuple[str, ...]  # stored names
    shape: tuple[int, ...]
    # makes all tensors `made` of the sources; None if the tensor is stored as it is
    convert: Callable[[Read], dict[str, Tensor]] | None = None
    made: tuple[str, ...] = ()

    def read(self, read: Read) -> Tensor:
        """Return the tensor in memory of its own; `read` reads each source."""
        if self.convert is None:
            return read(self.sources[0])
        return self.convert(read)[self.name].clone()

    def to_sources(
        self, made: Mapping[str, Tensor], shape_of: Callable[[str], tuple[int, ...]]
    ) -> dict[str, Tensor]:
        """Return the sources that make the tensors `made`, or `made` itself if the conversion
        cannot be inverted.

        Converting the numbers of rows, or else of single values, shows where each one ends up.
        """
        if self.convert is None:
            return {self.sources[0]: made[self.name]}
        shapes = {source: shape_of(source) for source in self.sources}
        for in_rows in (True, False):
            marked = {s: (*shape[:-1], 1) if in_rows else shape for s, shape in shapes.items()}
            counts = [prod(shape) for shape in marked.values()]
            numbers = zip(marked.items(), torch.arange(sum(counts)).split(counts), strict=True)
            marks = {source: part.reshape(shape) for (source, shape), part in numbers}
            try:
                places = self.convert(marks.__getitem__)
                order = torch.cat([places[name].flatten() for name in made])
                if not torch.equal(order.sort().values, torch.arange(sum(counts))):
                    continue
                first = next(iter(made.values()))
                values = first.new_empty(sum(counts), first.shape[-1] if in_rows else 1)
                for name, tensor in made.items():
                    row = (*tensor.shape[:-1], 1) if in_rows else tensor.shape
                    values[places[name].reshape(row).flatten()] = tensor.reshape(prod(row), -1)
                parts = zip(shapes.items(), values.split(counts), strict=True)
                return {source: part.reshape(shape) for (source, shape), part in parts}
            except (LookupError, RuntimeError, TypeError, ValueError):
                continue  # rows are transposed or cut, or the conversion computes with the values
        return dict(made)


def stored_tensors(
    module: PreTrainedModel, checkpoint: LazyCheckpoint, heads: bool = False
) -> dict[str, StoredTensor]:
    """Return by name every tensor of the model's state that the checkpoint holds.

    A head that the model lacks is ignored, as transformers does. heads: the model's own head may
    be missing. Raises: WrongKeys; MissingTensor for a parameter stored under none of its names;
    BadFile.
    """
    state = module.state_dict()
    stored, surplus = match_tensors(module, checkpoint)
    misshapen = sorted(name for name in stored if stored[name].shape != tuple(state[name].shape))
    unexpected = [e.sources[0] for e in surplus if e.name in stored or not in_head(e.name, module)]
    ties = tied_names(module)
    missing = [names[0] for names in ties if stored.keys().isdisjoint(names)]
    absent, _ = reported(module, missing=set(state) - set(stored))
    missing += sorted(absent.difference(*ties))  # buffers
    if heads:
        missing = [name for name in missing if not in_head(name, module)]
    if unexpected or misshapen:
        kind = type(module).__name__
        raise WrongKeys(checkpoint.folder, kind, missing, sorted(unexpected), misshapen)
    if missing:
        raise MissingTensor(checkpoint.folder, missing[0], checkpoint.names)
    return stored


def match_tensors(
    module: PreTrainedModel, checkpoint: LazyCheckpoint
) -> tuple[dict[str, StoredTensor], list[StoredTensor]]:
    """Return the tensors of the model that the checkpoint holds, by name, and those that the model
    has no place for; buffers of older files, which every model builds itself, are left out.
    """
    state = module.state_dict()
    stored, surplus = dict[str, StoredTensor](), []
    for each in _matches(module, checkpoint, state):
        if each.name in state and each.name not in stored:
            stored[each.name] = each
        else:
            surplus.append(each)
    _, unexpected = reported(module, unexpected={each.name for each in surplus})
    return stored, [each for each in surplus if each.name in unexpected]


def reported(
    module: PreTrainedModel, missing: set[str] = frozenset(), unexpected: set[str] = frozenset()
) -> tuple[set[str], set[str]]:
    """Return the missing and unexpected tensors that transformers reports, by the model's rules."""
    keys: Any = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
    module._adjust_missing_and_unexpected_keys(keys)
    return keys.missing_keys, keys.unexpected_keys


def untied_groups(
    module: PreTrainedModel, stored: Mapping[str, StoredTensor], checkpoint: LazyCheckpoint
) -> list[list[str]]:
    """Return the names of each parameter; tied ones with different stored values are apart, as
    from_pretrained does.
    """
    groups = []
    for names in tied_names(module):
        first, *others = [name for name in names if name in stored] or [""]
        apart = []
        for name in others:
            one, other = (stored[n].read(checkpoint.tensor) for n in (first, name))
            if not torch.equal(one, other):
                apart.append(name)
        groups += [[name for name in names if name not in apart], *([name] for name in apart)]
    return groups


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
            yield StoredTensor(name, sources, tuple(tensor.shape), convert, tuple(made))


class ModelCheckpoint:
    """The tensors of a folder, one at a time, under the names of its model in transformers.

    A tied tensor has one name. Packed experts are read as the matrices that their file holds, under
    its names, so that methods see matrices. Heads that the model lacks keep their own names.

    Args:
        part: "vision_model" for the vision tower of a CLIPModel.
        like: another checkpoint, to use its names for ties and packed experts; or a module.

    Raises: as LazyCheckpoint and skeleton; BadFile for weights stored as integers.
    """

    def __init__(
        self,
        folder: str | Path,
        part: str | None = None,
        like: "ModelCheckpoint | nn.Module | None" = None,
    ):
        self.module, _ = skeleton(folder, whole=part is None)
        self.files = LazyCheckpoint(folder, part)
        self.files.require_floating()
        self.stored, surplus = match_tensors(self.module, self.files)
        self.groups = untied_groups(self.module, self.stored, self.files)
        self._like = like if isinstance(like, ModelCheckpoint) else self
        # by name the model's tensor, and the part of it where it is read in parts
        self._named: dict[str, tuple[StoredTensor, str | None]] = {}
        parameters = {name for names in self.groups for name in names}
        for names in (*self.groups, *([name] for name in self.stored.keys() - parameters)):
            each = next((self.stored[name] for name in names if name in self.stored), None)
            if each is not None:
                form = self._like.stored.get(each.name, each)
                in_parts = form.shape == each.shape and len(form.sources) > 1
                if in_parts and not isinstance(like, nn.Module):
                    self._named |= {source: (each, source) for source in form.sources}
                else:
                    self._named[names[0]] = each, None
        self._named |= {each.name: (each, None) for each in surplus if each.name not in self._named}
        if self._like is not self:
            self._tie_as(self._like)
        self._last: tuple[StoredTensor | None, dict[str, Tensor]] = None, {}

    def _tie_as(self, like: "ModelCheckpoint") -> None:
        """Name tied tensors as `like` does, where their values are those of one tensor."""
        for names in like.groups:
            present = [name for name in names if name in self._named]
            equal = [n for n in present[1:] if torch.equal(self._read(present[0]), self._read(n))]
            for name in equal:
                del self._named[name]
            if present and names[0] not in self._named:
                self._named[names[0]] = self._named.pop(present[0])
        for names in self.groups:  # tied here, but not there
            for name in names:
                if name in like._named and name not in self._named and names[0] in self._named:
                    self._named[name] = self._named[names[0]]

    @property
    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted(self._named)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        each, part = self._named[name]
        return each.shape if part is None else self._like.files.shape(part)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in its file."""
        return self.files.dtype(self._named[name][0].sources[0])

    def file_of(self, name: str) -> Path:
        """Return the file of a tensor."""
        return self.files.file_of(self._named[name][0].sources[0])

    def finite_tensor(self, name: str) -> Tensor:
        """Return one tensor on the CPU. Raises: NotFinite naming file and tensor."""
        tensor = self._read(name)
        if not all_finite(tensor):
            raise NotFinite(self.file_of(name), name)
        return tensor

    def _read(self, name: str) -> Tensor:
        each, part = self._named[name]
        if part is None:
            return each.read(self.files.tensor)
        if part in each.sources:
            return self.files.tensor(part)
        if self._last[0] is not each:  # packed here, in parts there
            form = self._like.stored[each.name]
            made = {name: self.stored[name].read(self.files.tensor) for name in form.made}
            self._last = each, form.to_sources(made, self._like.files.shape)
        if part not in self._last[1]:
            problem = f"{each.name} cannot be cut into the parts that the base stores"
            way_out = "write all models again with save_pretrained(folder)"
            raise BadFile(self.file_of(name), problem, way_out)
        return self._last[1][part]

    def to_files(self, named: NamedTensors) -> NamedTensors:
        """Return tensors by our names under the names of the folder's files."""
        held = self.stored | {each.name: each for each, _ in self._named.values()}
        own = {n: part or each.name for n, (each, part) in self._named.items()}
        return in_files(held, self.files, ((own.get(n, n), tensor) for n, tensor in named))

    def to_module(self, named: NamedTensors) -> NamedTensors:
        """Yield tensors by our names under the names of the model's state."""
        waiting: dict[tuple[str, ...], dict[str, Tensor]] = {}
        for name, tensor in named:
            each, part = self._named.get(name, (None, None))
            if each is None or part is None or each.convert is None:
                yield each.name if each else name, tensor
                continue
            parts = waiting.setdefault(each.sources, {})
            parts[part] = tensor
            if len(parts) == len(each.sources):
                yield from each.convert(waiting.pop(each.sources).__getitem__).items()

    def from_module(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state of a module of this class, packed experts in parts as here."""
        named = dict(state)
        for each, part in self._named.values():
            if part is not None and each.name in named:
                made = {name: named.pop(name) for name in each.made}
                named |= each.to_sources(made, self.files.shape)
        return named


def in_files(
    stored: Mapping[str, StoredTensor], checkpoint: LazyCheckpoint, named: NamedTensors
) -> NamedTensors:
    """Yield tensors of the model as its files hold them; other names are passed on.

    The parts of a stored tensor are joined; those that `named` lacks are read from the files.
    """
    waiting: dict[tuple[str, ...], dict[str, Tensor]] = {}
    for name, tensor in named:
        each = stored.get(name)
        if each is None or each.convert is None:
            yield each.sources[0] if each else name, tensor
            continue
        made = waiting.setdefault(each.sources, {})
        made[name] = tensor
        if len(made) == len(each.made):
            yield from each.to_sources(waiting.pop(each.sources), checkpoint.shape).items()
    for made in waiting.values():
        each, first = stored[next(iter(made))], next(iter(made.values()))
        rest = (name for name in each.made if name not in made)
        kept = {name: stored[name].read(checkpoint.tensor).to(first.dtype) for name in rest}
        yield from each.to_sources(kept | made, checkpoint.shape).items()
