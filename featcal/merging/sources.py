"""Models as sources of tensors by name: modules, checkpoint folders, LoRA adapters, and experts
with another vocabulary or head.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from featcal.errors import FeatCalError, MissingTensor, TensorsDiffer
from featcal.models.batch import Model
from featcal.models.checkpoint import SINGLE, LazyCheckpoint, check_tensor
from featcal.models.load import (
    is_adapter,
    load_model,
    load_tokenizer,
    load_vision,
    model_class,
    require_one_family,
)
from featcal.models.lora import WEIGHTS, is_peft, merged_adapter, with_adapter, without_adapters
from featcal.models.modules import tied_names
from featcal.models.save import untied
from featcal.models.stored import ModelCheckpoint

# Tables with one row per token: models with other vocabularies differ here in shape, and a row's
# direction says nothing about features.
VOCABULARY = (
    "*shared.weight",
    "*embed_tokens.weight",
    "*token_embedding.weight",
    "*wte.weight",
    "*word_embeddings.weight",
    "*lm_head.weight",
    "*lm_head.bias",
)
POOLER = "pooler"  # after the tower, but under its name: some heads use it, some do not


def is_vocabulary(name: str, patterns: tuple[str, ...] = VOCABULARY) -> bool:
    """Return whether a tensor's name is that of a table with one row per token."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class ModuleSource:
    """A module in memory as a source; `label` replaces the file name in messages.

    The adapters of a PeftModel are added in float64, so that task vectors are not rounded.
    """

    def __init__(self, module: nn.Module, label: str, like: "Source | None" = None):
        self._label, self.module = label, module
        plain = without_adapters(module, torch.float64)
        self._state = in_names_of(like, untied(plain))
        self._narrow = next(module.parameters()).dtype if plain is not module else None

    @property
    def names(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted(self._state)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._state[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in the model; `finite_tensor` may be wider."""
        dtype = self._state[name].dtype
        return self._narrow if self._narrow and dtype == torch.float64 else dtype

    def file_of(self, name: str) -> str:
        """Return the label."""
        return self._label

    def finite_tensor(self, name: str) -> Tensor:
        """Return a tensor on the CPU. Raises: NotFinite."""
        check_tensor(self._label, name, self._state[name], weight=name.endswith("weight"))
        return self._state[name].detach().cpu()


@dataclass
class Derived:
    """A source that forwards to another one; subclasses change parts of it."""

    inner: "Source"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


# A model as merging reads it: names, shapes, dtypes, and one tensor at a time
Source = ModelCheckpoint | ModuleSource | Derived


class AdapterSource(Derived):
    """A folder of an adapter as a source of the base's tensors, under the base's names.

    peft adds the adapter in float64. The changed tensors wait in a temporary file, so that one
    dense model at a time is in memory; they stay float64, so that task vectors are not rounded.
    """

    def __init__(self, folder: str | Path, base: Model, inner: Source, part: str | None):
        super().__init__(inner)
        self._file = Path(folder) / WEIGHTS
        if isinstance(base, nn.Module):
            model = copy.deepcopy(base)
        else:
            wide = any(inner.dtype(name) == torch.float64 for name in inner.names)
            load = load_vision if part else load_model
            model = load(base, torch.float64 if wide else torch.float32)
        dense = merged_adapter(with_adapter(model, folder), folder, torch.float64)
        changed = {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in in_names_of(inner, untied(dense)).items()
            if name not in inner.names  # the base ties it to another tensor
            or not torch.equal(tensor.cpu(), inner.finite_tensor(name).to(tensor.dtype))
        }
        self._changed = set(changed)
        self._folder = TemporaryDirectory(prefix="featcal-lora-")  # removed with this object
        save_file(changed, Path(self._folder.name) / SINGLE)
        self._tensors = LazyCheckpoint(self._folder.name)

    @property
    def names(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted({*self.inner.names, *self._changed})

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return (self._tensors if name in self._changed else self.inner).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the base's tensor; `finite_tensor` may be wider."""
        names = self.inner.names
        return self.inner.dtype(name if name in names else next(filter(is_vocabulary, names)))

    def file_of(self, name: str) -> object:
        """Return the adapter's file for a tensor that it changes, else the base's."""
        return self._file if name in self._changed else self.inner.file_of(name)

    def finite_tensor(self, name: str) -> Tensor:
        """Return a tensor on the CPU. Raises: NotFinite."""
        return (self._tensors if name in self._changed else self.inner).finite_tensor(name)


@dataclass
class Aligned(Derived):
    """An expert under the base's names and with the base's vocabulary.

    known: base name -> expert name, for the tensors that are merged.
    rows:  for each token table, the expert's row for each row of the base, -1 for none.
    """

    base: Source
    known: Mapping[str, str]
    rows: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The base's names of the shared tensors, sorted."""
        return sorted(self.known)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, token tables with the base's rows."""
        return self.base.shape(name) if name in self.rows else self.inner.shape(self.known[name])

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in the expert."""
        return self.inner.dtype(self.known[name])

    def file_of(self, name: str) -> object:
        """Return the expert's file of a tensor, or a label."""
        return self.inner.file_of(self.known[name])

    def finite_tensor(self, name: str) -> Tensor:
        """Return a tensor on the CPU, token tables with the base's rows. Raises: NotFinite."""
        tensor = self.inner.finite_tensor(self.known[name])
        if name not in self.rows:
            return tensor
        table, rows = self.base.finite_tensor(name).to(tensor.dtype, copy=True), self.rows[name]
        table[rows >= 0] = tensor[rows[rows >= 0]]
        return table


def in_names_of(like: "Source | None", state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a module's tensors as a source names and packs them."""
    return like.from_module(state) if isinstance(like, ModelCheckpoint) else dict(state)


def source(model: Model, label: str, part: str | None = None, like: Source | None = None) -> Source:
    """Open a module or a folder as a source, with the names and packing of `like`, the base's.
    Raises: BadFile for a folder of integers.
    """
    if isinstance(model, nn.Module):
        return ModuleSource(model, label, like)
    if isinstance(like, ModuleSource):
        return ModelCheckpoint(model, part, like.module)
    return ModelCheckpoint(model, part, like)


def without(model: Source, hidden: frozenset[str]) -> Source:
    """Return a source with some of its tensors hidden."""
    return Aligned(model, model, {name: name for name in model.names if name not in hidden})


def part_ties(base: Source, experts: Mapping[str, Source]) -> dict[str, str]:
    """Return the tensors that the base ties and an expert does not, each with its name in the base.

    Only the table and head of a language model: others cannot be apart by tie_word_embeddings.
    """
    parted = {}
    groups = base.groups if isinstance(base, ModelCheckpoint) else tied_names(base.module)
    for names in groups:
        kept = [name for name in names if name in base.names]
        if len(names) == 2 and len(kept) == 1:
            (other,) = set(names) - set(kept)
            if any(other in expert.names for expert in experts.values()):
                parted[other] = kept[0]
    return parted


def with_both(model: Source, parted: Mapping[str, str]) -> Source:
    """Return a source that also has the other name of tied tensors."""
    known = {name: name for name in model.names}
    return Aligned(model, model, {**parted, **known}) if parted.keys() - known.keys() else model


def expert_sources(
    experts: Mapping[str, Model], base: Model, origin: Source, part: str | None
) -> dict[str, Source]:
    """Return every expert as a source, sorted by task; `origin` is the base as a source."""
    return {
        task: AdapterSource(expert, base, origin, part)  # type: ignore[arg-type]
        if is_adapter(expert := experts[task])
        else source(expert, f"expert {task!r}", like=origin)
        for task in sorted(experts)
    }


def require_alike(base: Source, experts: Mapping[str, Source]) -> None:
    """Require the same tensor names, shapes and dtypes. Raises: MissingTensor, TensorsDiffer."""
    for expert in experts.values():
        for has, lacks in ((base, expert), (expert, base)):
            missing = sorted(set(has.names) - set(lacks.names))
            if missing:
                files = f"{lacks.file_of(lacks.names[0])} (compared with {has.file_of(missing[0])})"
                raise MissingTensor(files, missing[0], lacks.names)
        for name in base.names:
            ours, theirs = base.file_of(name), expert.file_of(name)
            if base.shape(name) != expert.shape(name):
                raise TensorsDiffer(name, ours, base.shape(name), theirs, expert.shape(name))
            this, that = base.dtype(name), expert.dtype(name)
            if this != that:
                dtype = str(this).removeprefix("torch.")
                way_out = (
                    "save the second model in the dtype of the first, with its own class:\n"
                    f"    model = AutoModel.from_pretrained(folder, dtype={dtype!r})\n"
                    "    model.save_pretrained(new_folder)"
                )
                raise TensorsDiffer(name, ours, this, theirs, that, way_out)


# Experts with other vocabularies or heads


def align(
    base: Source,
    experts: Mapping[str, Source],
    base_model: Model,
    models: Mapping[str, Model],
    progress: Callable[[str], None],
) -> tuple[dict[str, Source], frozenset[str]]:
    """Align experts that share the base's tower; experts like the base stay as they are.

    Embedding rows are matched by token; a token that an expert lacks keeps the base's row. Tensors
    outside the shared tower, such as classifiers with other label counts, stay the base's.

    base_model, models: base and experts as given, for their classes and tokenizers.
    progress: called with what is not merged of an expert.
    Returns: the experts, and the tensors that stay the base's.
    Raises: TensorsDiffer for an expert of another family.
    """
    ours = class_of(base_model)
    # a LoRA folder has the base's tensors
    kinds = {task: class_of(models[task]) for task in experts if not is_adapter(models[task])}
    require_one_family({"base": ours} | {f"expert {task!r}": kind for task, kind in kinds.items()})
    aligned, kept = dict(experts), set[str]()
    tower = tower_prefix(ours, base)
    token_counts = {base.shape(name)[0] for name in base.names if is_vocabulary(name)}
    for task, kind in kinds.items():
        expert = experts[task]
        known = match_names(base, expert, tower, tower_prefix(kind, expert), kind is ours)
        if known is None:
            continue
        rows, shared = {}, dict(known)
        for name, theirs in known.items():
            here, there = base.shape(name), expert.shape(theirs)
            if here == there:
                continue
            # a table has one row per token: by its name, or a head's by its number of rows
            if (len(here) == len(there) > 0 and here[1:] == there[1:]) and (
                is_vocabulary(name)
                or (here[0] in token_counts and "embed" not in name and "prediction" in name)
            ):
                rows[name] = match_rows(here[0], there[0], base_model, models[task])
            elif is_outside(name, tower):
                del shared[name]
        names = set(base.names)
        if names == set(expert.names) and shared == {name: name for name in names} and not rows:
            continue
        kept |= set(base.names) - set(shared)
        aligned[task] = Aligned(expert, base, shared, rows)
        if left := sorted(set(expert.names) - set(shared.values())):
            more = ", ..." if len(left) > 4 else ""
            progress(f"{task}: its own head is not merged ({', '.join(left[:4])}{more})")
        for name in list(rows)[:1]:
            matched, there = int((rows[name] >= 0).sum()), expert.shape(known[name])[0]
            here = base.shape(name)[0]
            progress(f"{task}: {matched} of its {there} embedding rows match the base's {here}")
    return aligned, frozenset(kept)


def match_names(
    base: Source, expert: Source, tower: str, theirs: str, same: bool
) -> dict[str, str] | None:
    """Return base name -> expert name if everything missing on either side is outside the tower.

    tower, theirs: prefix of the tower in base and expert, with a dot; empty for a bare tower.
    same: both have one class, so a missing token table is tied, and no head of a task.
    """
    known, ours = {}, set(base.names)
    for name in expert.names:
        in_base = tower + name.removeprefix(theirs) if name.startswith(theirs) else name
        if in_base in ours:
            known[in_base] = name

    def inside(names: set[str], prefix: str) -> bool:
        return any((same and is_vocabulary(n)) or not is_outside(n, prefix) for n in names)

    missing, surplus = ours.difference(known), set(expert.names).difference(known.values())
    return None if inside(missing, tower) or inside(surplus, theirs) else known or None


def is_outside(name: str, tower: str) -> bool:
    """Return whether a tensor is outside the tower; a pooler always is."""
    return bool(tower and not name.startswith(tower)) or POOLER in name.split(".")


def class_of(model: Any) -> type:
    """Return the class of a model, or of a PeftModel's base. Raises: MissingPath, BadFile."""
    if isinstance(model, nn.Module):
        return type(model.get_base_model() if is_peft(model) else model)
    return model_class(model)


def tower_prefix(kind: type, source: Source) -> str:
    """Return the prefix of the tower in a model with a head, such as "bert."; empty for a tower."""
    prefix = f"{getattr(kind, 'base_model_prefix', '')}."
    return prefix if prefix != "." and any(n.startswith(prefix) for n in source.names) else ""


def match_rows(here: int, there: int, base: Model, expert: Model) -> Tensor:
    """Return the expert's row for each row of the base, (here,); -1 for none.

    Rows match by token where both models have a tokenizer, else by index.
    """
    rows = torch.arange(here)
    rows[rows >= there] = -1
    ours, theirs = vocabulary(base), vocabulary(expert)
    if ours and theirs:
        for token, index in ours.items():
            if index < here:
                rows[index] = theirs[token] if theirs.get(token, there) < there else -1
    return rows


def vocabulary(model: Model) -> dict[str, int]:
    """Return token -> index of a folder's tokenizer; empty without one."""
    try:
        return {} if isinstance(model, nn.Module) else dict(load_tokenizer(model).get_vocab())
    except FeatCalError:
        return {}
