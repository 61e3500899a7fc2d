"""A checkpoint folder as the tensors of its model in transformers, whatever names its files use.

Names and conversions are transformers' own: older names, prefixes, tied tensors, fused matrices and
packed experts. Headers alone show which tensors are missing, surplus or misshapen.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPModel, CLIPVisionModel, PreTrainedModel
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping

from featcal.errors import BadFile, MissingTensor, WrongKeys, as_bad_file
from featcal.models import load
from featcal.models.checkpoint import LazyCheckpoint, LazyTensor
from featcal.models.modules import tied_names


def skeleton(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    like: type[PreTrainedModel] | None = None,  # the class to build if it has the same tower
    whole: bool = False,  # with both towers of a CLIPModel
) -> PreTrainedModel:
    """Build a folder's model in evaluation mode: parameters on meta, real buffers. Raises: BadFile."""
    kind: Any = load.model_class(folder)
    if like is not None:  # only the head on the tower differs, or `like` is the tower
        same = kind.base_model_prefix == like.base_model_prefix != ""
        same = same and kind.config_class is like.config_class
        is_part = kind.__module__ == like.__module__ and like.__name__.endswith("VisionModel")
        kind = like if same or is_part else kind
    if kind is CLIPModel and not whole:
        kind = CLIPVisionModel
    problem = f"transformers makes no {kind.__name__} of it"
    way_out = "give the config.json that was saved with these weights"
    refused = as_bad_file(Path(folder) / load.CONFIG, problem, way_out)
    with refused, load.quiet_transformers(), torch.random.fork_rng(devices=[]):  # some classes draw
        with torch.device("meta"):
            config = load.read_config(kind, folder)
            module: PreTrainedModel = kind._from_config(config, dtype=dtype).eval()
        for parameter in module.parameters():
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        _map_buffers(module, lambda buffer: torch.empty_like(buffer, device="cpu"))
        module.init_weights()  # fills the buffers and ties parameters
    if wide := module._get_dtype_plan(dtype):  # what transformers keeps in float32, as T5's wo
        pattern, _, _ = loading.build_glob_alternation(list(wide))
        for name, parameter in module.named_parameters():
            if pattern.search(name):
                parameter.data = parameter.data.float()
    _map_buffers(module, lambda buffer: buffer.to(device))
    return module


def _map_buffers(module: PreTrainedModel, make: Callable[[Tensor], Tensor]) -> None:
    for part in module.modules():
        part._buffers |= {n: make(b) for n, b in part._buffers.items() if b is not None}


@dataclass(eq=False)
class Conversion:
    """Stored tensors that transformers converts together, such as the parts of packed experts."""

    module: PreTrainedModel
    files: LazyCheckpoint
    converter: Any
    first: str  # of the targets' names
    sources: Mapping[str, str]  # the converter's patterns by the names in the files

    def __post_init__(self) -> None:
        """Find the targets' shapes. Raises: BadFile for tensors that cannot be converted."""
        source = next(iter(self.sources))
        way_out = "write the model again with save_pretrained(folder)"
        problem = f"{source} and its other parts make no {self.first}"
        with as_bad_file(self.files[source].file, problem, way_out):
            targets = self.convert(lambda name: torch.empty(self.files[name].shape, device="meta"))
        self.targets = {name: tuple(tensor.shape) for name, tensor in targets.items()}

    def convert(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return the targets, made of the sources; they may share memory."""
        converter = deepcopy(self.converter)  # it collects its inputs
        for source, pattern in self.sources.items():
            converter.add_tensor(self.first, source, pattern, read(source))
        return self._run(converter, self.first)

    def _run(self, converter: Any, first: str) -> dict[str, Tensor]:
        outputs = converter.convert(first, model=self.module, config=self.module.config)
        return {name: out[0] if isinstance(out, list) else out for name, out in outputs.items()}

    def to_sources(self, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sources of all targets, or the targets if they cannot be converted back."""
        renamed = ""
        with suppress(LookupError, RuntimeError, TypeError, ValueError, AttributeError):
            converter = self.converter.reverse_transform()
            for name in sorted(targets, key=loading.dot_natural_key):
                renamed, pattern = converter.rename_source_key(name)
                converter.add_tensor(renamed, name, pattern, targets[name])
            parts = self._run(converter, renamed)
            ordered = (parts[name] for name in sorted(parts, key=loading.dot_natural_key))
            sources = dict(zip(self.sources, ordered, strict=True))
            again = self.convert(sources.__getitem__)
            if all(torch.equal(again[name], tensor) for name, tensor in targets.items()):
                return sources
        return dict(targets)

    def read(self, name: str) -> Tensor:
        """Return one target."""
        return self.convert(lambda source: self.files[source].read())[name].clone()


def _matches(
    module: PreTrainedModel, files: LazyCheckpoint, state: dict[str, Tensor]
) -> Iterator[tuple[str, LazyTensor, str | Conversion]]:
    """Yield every stored tensor with the model's name for it, and its stored name or conversion."""
    transforms = get_model_conversion_mapping(module)
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    patterns: dict[str, dict[str, str]] = {}  # by source, by first target
    prefix = module.base_model_prefix
    for source in sorted(files, key=loading.dot_natural_key):  # the order in which parts are joined
        name, pattern = loading.rename_source_key(source, renamings, converters, prefix, state)
        if name not in state and source in state:  # a present name that looks like an old one
            name, pattern = loading.rename_source_key(source, [], [], prefix, state)
        if pattern is None:
            yield name, files[source], source
        else:
            patterns.setdefault(name, {})[source] = pattern
    for first, sources in patterns.items():
        source, pattern = next(iter(sources.items()))
        form = Conversion(module, files, by_pattern[pattern], first, sources)
        for name, shape in form.targets.items():
            yield name, replace(files[source], shape=shape, read=partial(form.read, name)), form


class ModelFolder:
    """The model of a folder, with parameters on meta, and the tensors of its files."""

    def __init__(self, folder: str | Path, module: PreTrainedModel | None = None):
        self.module = module or skeleton(folder)
        self.own_class = load.model_class(folder) is type(self.module)
        part = load.VISION if type(self.module) is CLIPVisionModel else None
        self.files = LazyCheckpoint(folder, part)
        self.files.require_floating()
        # the name of a tensor in the files, or how it is made of them
        self.forms: dict[str, str | Conversion] = {}
        state, present = self.module.state_dict(), dict[str, LazyTensor]()
        surplus: list[tuple[str, LazyTensor]] = []
        for name, tensor, form in _matches(self.module, self.files, state):
            self.forms.setdefault(name, form)
            if name in state and name not in present:
                present[name] = tensor
            else:
                surplus.append((name, tensor))
        pooler = {name for name in state if name.startswith("pooler.")}  # Swin's has no parameters
        if pooler and not pooler & present.keys() and self.own_class:
            self.module.pooler = None  # encoders run without one
        _, unexpected = self._reported(unexpected={name for name, _ in surplus})
        is_buffer = load.buffer_test(self.module)
        # stored tensors that the model lacks, such as a head
        self.surplus = [(n, t) for n, t in surplus if n in unexpected and not is_buffer(n)]
        # names of each parameter; separate where stored values differ
        self.ties = list[list[str]]()
        self.stored = dict[str, LazyTensor]()  # a tied one by its first name
        for names in tied_names(self.module):
            given = {name: present.pop(name) for name in names if name in present}
            separate = dict[str, LazyTensor]()  # whose values are not the first one's
            if given:
                (first_name, first), *others = given.items()
                separate = {n: t for n, t in others if not torch.equal(t.read(), first.read())}
                self.stored |= {names[0]: first} | separate
                self.forms[names[0]] = self.forms[first_name]
            for name in separate:
                path, _, attribute = name.rpartition(".")
                parameter = nn.Parameter(self.module.get_parameter(name).detach().clone())
                setattr(self.module.get_submodule(path), attribute, parameter)
            self.ties.append([name for name in names if name not in separate])
            self.ties += [[name] for name in separate]
        self.stored |= present  # buffers

    def _reported(
        self, missing: set[str] = frozenset(), unexpected: set[str] = frozenset()
    ) -> tuple[set[str], set[str]]:
        """Return the missing and unexpected tensors that transformers would report."""
        keys: Any = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
        self.module._adjust_missing_and_unexpected_keys(keys)
        return keys.missing_keys, keys.unexpected_keys

    @property
    def ignored(self) -> list[str]:
        """Return the stored tensors of a head that the model lacks."""
        state = self.module.state_dict()
        return [t.name for n, t in self.surplus if n not in state and load.in_head(n, self.module)]

    def require_complete(self, heads: bool = False, surplus: bool = False) -> None:
        """Raise WrongKeys or MissingTensor unless the files hold the model's tensors and no others.

        With `heads` the model's head may be missing; with `surplus` the files may hold others.
        """
        module, state, stored = self.module, self.module.state_dict(), self.stored
        misshapen = sorted(n for n, t in stored.items() if t.shape != tuple(state[n].shape))
        unexpected = sorted({t.name for _, t in self.surplus if not surplus} - {*self.ignored})
        tied = {name for names in self.ties for name in names[1:]}
        missing = sorted(self._reported(missing=state.keys() - stored.keys() - tied)[0])
        if heads:
            missing = [name for name in missing if not load.in_head(name, module)]
        if unexpected or misshapen:
            kind = type(module).__name__
            raise WrongKeys(self.files.folder, kind, missing, unexpected, misshapen)
        if missing:
            raise MissingTensor(self.files.folder, missing[0], self.files)

    def sources(self, name: str) -> tuple[str, ...]:
        """Return the stored names from which a tensor of the model is read."""
        form = self.forms[name]
        return (form,) if isinstance(form, str) else tuple(form.sources)

    def to_files(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors as the files hold them, absent parts filled in from the files."""
        waiting: dict[Conversion, dict[str, Tensor]] = {}
        for name, tensor in tensors:
            form = self.forms.get(name, name)
            if isinstance(form, str):
                yield form, tensor
                continue
            targets = waiting.setdefault(form, {})
            targets[name] = tensor
            if len(targets) == len(form.targets):
                yield from form.to_sources(waiting.pop(form)).items()
        for form, targets in waiting.items():
            dtype = next(iter(targets.values())).dtype
            absent = (name for name in form.targets if name not in targets)
            stored = {name: self.stored[name].read().to(dtype) for name in absent}
            yield from form.to_sources(stored | targets).items()


class ModelCheckpoint(ModelFolder):
    """The tensors of a folder as merging reads them, with names for ties and experts of `like`.

    A tied tensor has one name. Packed experts are the matrices that their file holds, so that
    methods see matrices. Heads that the model lacks keep their own names.
    """

    def __init__(
        self,
        folder: str | Path,
        part: str | None = None,
        like: "ModelCheckpoint | nn.Module | None" = None,
    ):
        super().__init__(folder, skeleton(folder, whole=part is None))
        if not self.stored:  # transformers would draw all weights anew
            self.require_complete()
        base = like if isinstance(like, ModelCheckpoint) else self
        self._last_cut: tuple[Conversion | None, dict[str, Tensor]] = None, {}
        self._part_forms: dict[str, Conversion] = {}  # by name of a part, as the base stores it
        tensors = dict[str, LazyTensor]()
        for name, tensor in self.stored.items():
            form = base.forms.get(name, self.forms[name])
            fits = base.stored.get(name, tensor).shape == tensor.shape
            unpacked = isinstance(form, str) or len(form.sources) < 2
            if unpacked or not fits or isinstance(like, nn.Module):
                tensors[name] = tensor
                continue
            for source in form.sources:
                self._part_forms[source] = form
                cut = partial(self._cut, form, source, tensor.file)
                packed = replace(tensor, shape=base.files[source].shape, read=cut)
                tensors[source] = self.files[source] if source in self.sources(name) else packed
        for name, tensor in self.surplus:
            tensors.setdefault(name, tensor)
        if base is not self:
            for names in base.ties:
                present = [name for name in names if name in tensors]
                for name in present[1:]:
                    if torch.equal(tensors[present[0]].read(), tensors[name].read()):
                        del tensors[name]
                if present and names[0] not in tensors:
                    tensors[names[0]] = tensors.pop(present[0])
            for names in self.ties:  # tied here, but not in the base
                for name in names:
                    if name in base.tensors and names[0] in tensors:
                        tensors.setdefault(name, tensors[names[0]])
        self.tensors = dict(sorted(tensors.items()))

    def _cut(self, form: Conversion, source: str, file: object) -> Tensor:
        """Return a part, as the base stores it, of a tensor that is packed here."""
        if self._last_cut[0] is not form:
            targets = {name: self.stored[name].read() for name in form.targets}
            self._last_cut = form, form.to_sources(targets)
        _, parts = self._last_cut
        if parts.keys() != form.sources.keys():
            problem = f"{[*form.targets][0]} cannot be cut into the parts that the base stores"
            raise BadFile(file, problem, "write all models again with save_pretrained(folder)")
        return parts[source].clone()

    def to_module(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors, named as in `self.tensors`, under the names of the model's state."""
        waiting: dict[Conversion, dict[str, Tensor]] = {}
        for name, tensor in tensors:
            form = self._part_forms.get(name)
            if form is None:
                yield name, tensor
                continue
            parts = waiting.setdefault(form, {})
            parts[name] = tensor
            if len(parts) == len(form.sources):
                yield from form.convert(waiting.pop(form).__getitem__).items()

    def from_module(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state of a module of this class, packed experts in parts as here."""
        tensors = dict(state)
        for form in self._part_forms.values():
            if next(iter(form.targets)) in tensors:
                tensors |= form.to_sources({name: tensors.pop(name) for name in form.targets})
        return tensors
