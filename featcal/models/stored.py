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

from featcal.errors import BadFile, MissingTensor, WrongKeys, one_line
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
    """Build the model of a folder in evaluation mode with parameters on meta and real buffers.

    Raises: MissingPath; BadFile for a config.json that makes no model.
    """
    kind: Any = load.model_class(folder)
    if like is not None and load.same_tower(kind, like):
        kind = like
    if kind is CLIPModel and not whole:
        kind = CLIPVisionModel
    try:
        with load.quiet_transformers(), torch.random.fork_rng(devices=[]):  # some classes draw
            with torch.device("meta"):
                config = load.read_config(kind, folder)
                module: PreTrainedModel = kind._from_config(config, dtype=dtype).eval()
            for parameter in module.parameters():
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]
            _map_buffers(module, lambda buffer: torch.empty_like(buffer, device="cpu"))
            module.init_weights()  # fills the buffers and ties parameters
    except Exception as error:  # transformers raises many kinds for a config it cannot use
        problem = f"transformers makes no {kind.__name__} of it ({one_line(error)})"
        way_out = "give the config.json that was saved with these weights"
        raise BadFile(Path(folder) / load.CONFIG, problem, way_out) from None
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
    first: str  # of the names made
    sources: Mapping[str, str]  # the converter's patterns by the names in the files

    def __post_init__(self) -> None:
        """Find shapes by the names made. Raises: BadFile for tensors that cannot be converted."""
        try:
            made = self.convert(lambda name: torch.empty(self.files[name].shape, device="meta"))
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            source = next(iter(self.sources))
            problem = f"{source} and its other parts make no {self.first} ({one_line(error)})"
            way_out = "write the model again with save_pretrained(folder)"
            raise BadFile(self.files[source].file, problem, way_out) from None
        self.made = {name: tuple(tensor.shape) for name, tensor in made.items()}

    def convert(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return the tensors made of the sources; they may share memory."""
        converter = deepcopy(self.converter)  # it collects its inputs
        for source, pattern in self.sources.items():
            converter.add_tensor(self.first, source, pattern, read(source))
        return self._run(converter, self.first)

    def _run(self, converter: Any, first: str) -> dict[str, Tensor]:
        made = converter.convert(first, model=self.module, config=self.module.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}

    def to_sources(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sources of the tensors `made`, or `made` itself if it cannot be reverted."""
        target = ""
        with suppress(LookupError, RuntimeError, TypeError, ValueError, AttributeError):
            converter = self.converter.reverse_transform()
            for name in sorted(made, key=loading.dot_natural_key):
                target, pattern = converter.rename_source_key(name)
                converter.add_tensor(target, name, pattern, made[name])
            parts = self._run(converter, target)
            ordered = (parts[name] for name in sorted(parts, key=loading.dot_natural_key))
            sources = dict(zip(self.sources, ordered, strict=True))
            again = self.convert(sources.__getitem__)
            if all(torch.equal(again[name], tensor) for name, tensor in made.items()):
                return sources
        return dict(made)

    def read(self, name: str) -> Tensor:
        """Return one of the tensors made."""
        return self.convert(lambda source: self.files[source].read())[name].clone()


def _matches(
    module: PreTrainedModel, files: LazyCheckpoint, state: dict[str, Tensor]
) -> Iterator[tuple[str, LazyTensor, str | Conversion]]:
    """Yield every stored tensor with the model's name for it, and its stored name or conversion."""
    transforms = get_model_conversion_mapping(module)
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    patterns: dict[str, dict[str, str]] = {}  # by source, by the first name made
    prefix = module.base_model_prefix
    for source in sorted(files, key=loading.dot_natural_key):  # the order in which parts are joined
        name, pattern = loading.rename_source_key(source, renamings, converters, prefix, state)
        if name not in state and source in state:  # a present name that looks like an old one
            name, pattern = loading.rename_source_key(source, [], [], prefix, state)
        if pattern is None:
            yield name, files[source], source
        else:
            patterns.setdefault(name, {})[source] = pattern
    for first, own in patterns.items():
        form = Conversion(module, files, by_pattern[next(iter(own.values()))], first, own)
        origin = files[next(iter(own))]
        for name, shape in form.made.items():
            yield name, replace(origin, shape=shape, read=partial(form.read, name)), form


class ModelFolder:
    """The model of a folder, with parameters on meta, and the tensors of its files."""

    def __init__(self, folder: str | Path, module: PreTrainedModel | None = None):
        self.module = module or skeleton(folder)
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
        pooler = {name for name in state if name.startswith("pooler.")}  # none of its own in Swin
        lacks = pooler and pooler.isdisjoint(present)
        if lacks and load.model_class(folder) is type(self.module):
            self.module.pooler = None  # encoders run without one
        _, unexpected = self._reported(unexpected={name for name, _ in surplus})
        unread = load.unread(self.module)
        # stored tensors that the model has no place for, such as a head
        self.surplus = [(n, each) for n, each in surplus if n in unexpected and not unread(n)]
        # names of each parameter; separate where stored values differ
        self.ties = list[list[str]]()
        self.stored = dict[str, LazyTensor]()  # a tied one by its first name
        for names in tied_names(self.module):
            own = {name: present.pop(name) for name in names if name in present}
            if own:
                (kept, first), *others = own.items()
                own = {n: t for n, t in others if not torch.equal(t.read(), first.read())}
                self.stored |= {names[0]: first} | own
                self.forms[names[0]] = self.forms[kept]
            for name in own:
                path, _, attribute = name.rpartition(".")
                parameter = nn.Parameter(self.module.get_parameter(name).detach().clone())
                setattr(self.module.get_submodule(path), attribute, parameter)
            self.ties += [[name for name in names if name not in own], *([name] for name in own)]
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

    def require_complete(self, heads: bool = False, more: bool = False) -> None:
        """Raise WrongKeys or MissingTensor unless the files hold the model's tensors and no others.

        A head that the model lacks is ignored; with `heads` the model's own may be missing, with
        `more` the files may hold others.
        """
        module, state, stored = self.module, self.module.state_dict(), self.stored
        misshapen = sorted(n for n, each in stored.items() if each.shape != tuple(state[n].shape))
        unexpected = sorted({each.name for _, each in self.surplus if not more} - {*self.ignored})
        tied = {name for names in self.ties for name in names[1:]}
        missing = sorted(self._reported(missing=state.keys() - stored.keys() - tied)[0])
        if heads:
            missing = [name for name in missing if not load.in_head(name, module)]
        if unexpected or misshapen:
            wrong = missing, unexpected, misshapen
            raise WrongKeys(self.files.folder, type(module).__name__, *wrong)
        if missing:
            raise MissingTensor(self.files.folder, missing[0], self.files)

    def sources(self, name: str) -> tuple[str, ...]:
        """Return the stored names from which a tensor of the model is read."""
        form = self.forms[name]
        return (form,) if isinstance(form, str) else tuple(form.sources)

    def to_files(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors as the files hold them, parts joined with those that `named` lacks."""
        waiting: dict[Conversion, dict[str, Tensor]] = {}
        for name, tensor in named:
            form = self.forms.get(name, name)
            if isinstance(form, str):
                yield form, tensor
                continue
            made = waiting.setdefault(form, {})
            made[name] = tensor
            if len(made) == len(form.made):
                yield from form.to_sources(waiting.pop(form)).items()
        for form, made in waiting.items():
            dtype = next(iter(made.values())).dtype
            rest = (name for name in form.made if name not in made)
            kept = {name: self.stored[name].read().to(dtype) for name in rest}
            yield from form.to_sources(kept | made).items()


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
        self._last: tuple[Conversion | None, dict[str, Tensor]] = None, {}
        self._in_parts: dict[str, Conversion] = {}  # by name of a part, as the base stores it
        tensors = dict[str, LazyTensor]()
        for name, each in self.stored.items():
            form = base.forms.get(name, self.forms[name])
            fits = base.stored.get(name, each).shape == each.shape
            whole = isinstance(form, str) or len(form.sources) < 2 or isinstance(like, nn.Module)
            if whole or not fits:
                tensors[name] = each
                continue
            for source in form.sources:
                self._in_parts[source], shape = form, base.files[source].shape
                cut = partial(self._cut, form, source, each.file)
                plain = self.files[source] if source in self.sources(name) else None
                tensors[source] = plain or replace(each, shape=shape, read=cut)
        for name, each in self.surplus:
            tensors.setdefault(name, each)
        for names in base.ties if base is not self else ():  # tied there
            present = [name for name in names if name in tensors]
            for name in present[1:]:
                if torch.equal(tensors[present[0]].read(), tensors[name].read()):
                    del tensors[name]
            if present and names[0] not in tensors:
                tensors[names[0]] = tensors.pop(present[0])
        for names in self.ties if base is not self else ():  # tied here, but not there
            for name in names:
                if name in base.tensors and names[0] in tensors:
                    tensors.setdefault(name, tensors[names[0]])
        self.tensors = dict(sorted(tensors.items()))

    def _cut(self, form: Conversion, source: str, file: object) -> Tensor:
        """Return a part, as the base stores it, of a tensor that is packed here."""
        if self._last[0] is not form:
            made = {name: self.stored[name].read() for name in form.made}
            self._last = form, form.to_sources(made)
        if self._last[1].keys() != form.sources.keys():
            problem = f"{next(iter(form.made))} cannot be cut into the parts that the base stores"
            raise BadFile(file, problem, "write all models again with save_pretrained(folder)")
        return self._last[1][source].clone()

    def to_module(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors by our names under the names of the model's state."""
        waiting: dict[Conversion, dict[str, Tensor]] = {}
        for name, tensor in named:
            form = self._in_parts.get(name)
            if form is None:
                yield name, tensor
                continue
            parts = waiting.setdefault(form, {})
            parts[name] = tensor
            if len(parts) == len(form.sources):
                yield from form.convert(waiting.pop(form).__getitem__).items()

    def from_module(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state of a module of this class, packed experts in parts as here."""
        named = dict(state)
        for form in self._in_parts.values():
            if next(iter(form.made)) in named:
                named |= form.to_sources({name: named.pop(name) for name in form.made})
        return named
