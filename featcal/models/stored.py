"""A checkpoint folder as the tensors of its model in transformers, whatever names its files use.

Names and conversions are transformers' own: older names, prefixes, tied tensors, fused matrices and
packed experts. Headers alone show which tensors are missing, surplus or misshapen.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
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

from featcal.errors import BadFile, MissingTensor, WrongKeys
from featcal.models.checkpoint import LazyCheckpoint, check_tensor
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
) -> PreTrainedModel:
    """Build the model of a folder in evaluation mode with parameters on meta and real buffers.

    like: class to build instead if it has the same tower. whole: build both towers of a CLIPModel,
    not the vision tower only. Raises: MissingPath; BadFile for a config.json that makes no model.
    """
    kind: Any = model_class(folder)
    if like is not None and same_tower(kind, like):
        kind = like
    if kind is CLIPModel and not whole:
        kind = CLIPVisionModel
    try:
        # some classes draw while being built
        with quiet_transformers(), torch.random.fork_rng(devices=[]):
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
    return module


def _map_buffers(module: PreTrainedModel, make: Callable[[Tensor], Tensor]) -> None:
    for part in module.modules():
        part._buffers |= {n: make(b) for n, b in part._buffers.items() if b is not None}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the model: stored in the checkpoint, or made of tensors that are.

    convert: makes the tensors `made` of the sources; None if the tensor is stored as it is.
    revert:  makes the sources, in their order, of the tensors `made`.
    """

    name: str
    sources: tuple[str, ...]  # stored names
    shape: tuple[int, ...]
    convert: Callable[[Read], dict[str, Tensor]] | None = None
    revert: Callable[[Mapping[str, Tensor]], list[Tensor]] | None = None
    made: tuple[str, ...] = ()

    def read(self, read: Read) -> Tensor:
        """Return the tensor in memory of its own; `read` reads each source."""
        if self.convert is None:
            return read(self.sources[0])
        return self.convert(read)[self.name].clone()

    def to_sources(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sources that make the tensors `made`, or `made` itself if transformers cannot
        revert the conversion.
        """
        if self.convert is None or self.revert is None:
            return {self.sources[0]: made[self.name]}
        try:
            sources = dict(zip(self.sources, self.revert(made), strict=True))
            again = self.convert(sources.__getitem__)
            if all(torch.equal(again[name], tensor) for name, tensor in made.items()):
                return sources
        except (LookupError, RuntimeError, TypeError, ValueError, AttributeError):
            pass
        return dict(made)


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

    def run(converter: WeightConverter, first: str) -> dict[str, Tensor]:
        """Return the tensors that a converter makes of those added to it; they may share memory."""
        made = converter.convert(first, model=module, config=module.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}

    def convert(read: Read, first: str) -> dict[str, Tensor]:
        converter = deepcopy(by_pattern[parts[first][0][1]])  # it collects its inputs
        for source, pattern in parts[first]:
            converter.add_tensor(first, source, pattern, read(source))  # type: ignore[arg-type]
        return run(converter, first)

    def revert(made: Mapping[str, Tensor], first: str) -> list[Tensor]:
        converter: Any = by_pattern[parts[first][0][1]].reverse_transform()
        target = ""
        for name in sorted(made, key=dot_natural_key):
            target, pattern = converter.rename_source_key(name)
            converter.add_tensor(target, name, pattern, made[name])
        sources = run(converter, target)
        return [sources[name] for name in sorted(sources, key=dot_natural_key)]

    for first, pairs in parts.items():
        sources, convert_all = tuple(source for source, _ in pairs), partial(convert, first=first)
        try:
            made = convert_all(lambda name: torch.empty(checkpoint.shape(name), device="meta"))
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            problem = f"{sources[0]} and its other parts make no {first} ({reason})"
            way_out = "write the model again with save_pretrained(folder)"
            raise BadFile(checkpoint.file_of(sources[0]), problem, way_out) from None
        how = convert_all, partial(revert, first=first), tuple(made)
        for name, tensor in made.items():
            yield StoredTensor(name, sources, tuple(tensor.shape), *how)


class ModelFolder:
    """The model of a folder, with parameters on meta, and the tensors of its files.

    stored: every parameter and buffer that the files hold, a tied one by its first name.
    ties: the names of each parameter. Tied ones with different stored values are apart, as
    from_pretrained has them.
    surplus: stored tensors that the model has no place for, such as a head. It leaves out
    buffers of older files, which every model builds itself.

    Raises: as skeleton and LazyCheckpoint; BadFile for weights stored as integers.
    """

    def __init__(
        self,
        folder: str | Path,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        like: type[PreTrainedModel] | None = None,
        whole: bool = False,
    ):
        self.module = skeleton(folder, dtype, device, like, whole)
        self.files = LazyCheckpoint(
            folder, VISION if type(self.module) is CLIPVisionModel else None
        )
        self.files.require_floating()
        state, found, surplus = self.module.state_dict(), dict[str, StoredTensor](), []
        for each in _matches(self.module, self.files, state):
            if each.name in state and each.name not in found:
                found[each.name] = each
            else:
                surplus.append(each)
        _, unexpected = self._reported(unexpected={each.name for each in surplus})
        self.surplus = [each for each in surplus if each.name in unexpected]
        self.ties, self.stored = list[list[str]](), dict[str, StoredTensor]()
        for names in tied_names(self.module):
            own = {name: found.pop(name) for name in names if name in found}
            if own:
                first = next(iter(own.values()))
                own = {n: e for n, e in own.items() if e is not first and not self._equal(e, first)}
                self.stored |= {names[0]: first} | own
            for name in own:
                path, _, attribute = name.rpartition(".")
                parameter = nn.Parameter(self.module.get_parameter(name).detach().clone())
                setattr(self.module.get_submodule(path), attribute, parameter)
            self.ties += [[name for name in names if name not in own], *([name] for name in own)]
        self.stored |= found  # buffers
        self.named: Mapping[str, StoredTensor] = self.stored  # by the names that callers use

    def _equal(self, *pair: StoredTensor) -> bool:
        return torch.equal(*(each.read(self.files.tensor) for each in pair))

    def _reported(
        self, missing: set[str] = frozenset(), unexpected: set[str] = frozenset()
    ) -> tuple[set[str], set[str]]:
        """Return the missing and unexpected tensors that transformers would report."""
        keys: Any = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
        self.module._adjust_missing_and_unexpected_keys(keys)
        return keys.missing_keys, keys.unexpected_keys

    def require_complete(self, heads: bool = False) -> None:
        """Raise WrongKeys or MissingTensor unless the files hold the model's tensors and no others.

        A head that the model lacks is ignored, as transformers does. heads: the model's own head
        may be missing.
        """
        module, state, stored = self.module, self.module.state_dict(), self.stored
        misshapen = sorted(n for n, each in stored.items() if each.shape != tuple(state[n].shape))
        unexpected = sorted(
            each.sources[0]
            for each in self.surplus
            if each.name in state or not in_head(each.name, module)
        )
        missing = [names[0] for names in self.ties if names[0] not in stored]
        buffers = state.keys() - stored.keys() - {name for names in self.ties for name in names}
        missing += sorted(self._reported(missing=buffers)[0])
        if heads:
            missing = [name for name in missing if not in_head(name, module)]
        if unexpected or misshapen:
            kind = type(module).__name__
            raise WrongKeys(self.files.folder, kind, missing, unexpected, misshapen)
        if missing:
            raise MissingTensor(self.files.folder, missing[0], self.files.names)

    def read(self, name: str) -> Tensor:
        """Return a tensor in the dtype of its file, on the CPU."""
        return self.named[name].read(self.files.tensor)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in its file."""
        return self.files.dtype(self.named[name].sources[0])

    def to_files(self, named: NamedTensors) -> NamedTensors:
        """Yield tensors as the files hold them; other names are passed on.

        The parts of a stored tensor are joined; those that `named` lacks are read from the files.
        """
        waiting: dict[tuple[str, ...], dict[str, Tensor]] = {}
        for name, tensor in named:
            each = self.named.get(name)
            if each is None or each.convert is None:
                yield each.sources[0] if each else name, tensor
                continue
            made = waiting.setdefault(each.sources, {})
            made[each.name] = tensor
            if len(made) == len(each.made):
                yield from each.to_sources(waiting.pop(each.sources)).items()
        for made in waiting.values():
            each, first = self.stored[next(iter(made))], next(iter(made.values()))
            rest = (name for name in each.made if name not in made)
            kept = {n: self.stored[n].read(self.files.tensor).to(first.dtype) for n in rest}
            yield from each.to_sources(kept | made).items()


class ModelCheckpoint(ModelFolder):
    """The tensors of a folder, one at a time, as merging reads them.

    A tied tensor has one name. Packed experts are read as the matrices that their file holds, under
    its names, so that methods see matrices. Heads that the model lacks keep their own names.

    Args:
        part: "vision_model" for the vision tower of a CLIPModel.
        like: another checkpoint, to use its names for ties and packed experts; or a module.

    Raises: as ModelFolder.
    """

    def __init__(
        self,
        folder: str | Path,
        part: str | None = None,
        like: "ModelCheckpoint | nn.Module | None" = None,
    ):
        super().__init__(folder, whole=part is None)
        base = like if isinstance(like, ModelCheckpoint) else self
        self._last: tuple[StoredTensor | None, dict[str, Tensor]] = None, {}
        # by name of a part the model's tensor in the base, which is stored in parts
        self._in_parts: dict[str, StoredTensor] = {}
        self.named = named = dict[str, StoredTensor]()
        for name, each in self.stored.items():
            form = base.stored.get(name, each)
            in_parts = form.shape == each.shape and len(form.sources) > 1
            if not in_parts or isinstance(like, nn.Module):
                named[name] = each
                continue
            for part_name in form.sources:
                self._in_parts[part_name], shape = form, base.files.shape(part_name)
                plain = StoredTensor(part_name, (part_name,), shape)
                cut = StoredTensor(part_name, each.sources, shape, partial(self._cut, form))
                named[part_name] = plain if part_name in each.sources else cut
        for each in self.surplus:
            named.setdefault(each.name, each)
        for names in base.ties if base is not self else ():  # tied there
            present = [name for name in names if name in named]
            equal = [n for n in present[1:] if self._equal(named[present[0]], named[n])]
            for name in equal:
                del named[name]
            if present and names[0] not in named:
                named[names[0]] = named.pop(present[0])
        for names in self.ties if base is not self else ():  # tied here, but not there
            for name in names:
                if name in base.named and names[0] in named:
                    named.setdefault(name, named[names[0]])

    def _cut(self, form: StoredTensor, read: Read) -> dict[str, Tensor]:
        """Return the parts, as the base stores them, of a tensor that is packed here."""
        if self._last[0] is not form:
            made = {name: self.stored[name].read(read) for name in form.made}
            self._last = form, form.to_sources(made)
        if self._last[1].keys() != set(form.sources):
            problem = f"{form.name} cannot be cut into the parts that the base stores"
            way_out = "write all models again with save_pretrained(folder)"
            file = self.files.file_of(self.stored[form.name].sources[0])
            raise BadFile(file, problem, way_out)
        return self._last[1]

    @property
    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted(self.named)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.named[name].shape

    def file_of(self, name: str) -> Path:
        """Return the file of a tensor."""
        return self.files.file_of(self.named[name].sources[0])

    def finite_tensor(self, name: str) -> Tensor:
        """Return one tensor on the CPU. Raises: NotFinite naming file and tensor."""
        check_tensor(self.file_of(name), name, tensor := self.read(name), weight=False)
        return tensor

    def to_module(self, named: NamedTensors) -> NamedTensors:
        """Yield tensors by our names under the names of the model's state."""
        waiting: dict[tuple[str, ...], dict[str, Tensor]] = {}
        for name, tensor in named:
            form = self._in_parts.get(name)
            if form is None or form.convert is None:
                yield self.named[name].name if name in self.named else name, tensor
                continue
            parts = waiting.setdefault(form.sources, {})
            parts[name] = tensor
            if len(parts) == len(form.sources):
                yield from form.convert(waiting.pop(form.sources).__getitem__).items()

    def from_module(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state of a module of this class, packed experts in parts as here."""
        named = dict(state)
        for form in self._in_parts.values():
            if form.name in named:
                named |= form.to_sources({name: named.pop(name) for name in form.made})
        return named
