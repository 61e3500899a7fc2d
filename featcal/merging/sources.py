"""Modules and checkpoint folders as sources of tensors by name, and the check that they fit."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from featcal.errors import BadFile, BadSetting, MissingTensor, TensorsDiffer
from featcal.models.checkpoint import SINGLE, LazyCheckpoint, check_tensor
from featcal.models.load import is_adapter, load_model, load_vision
from featcal.models.lora import WEIGHTS, merged_adapter, with_adapter
from featcal.models.save import untied
from featcal.models.stored import stored_tensors
from featcal.settings import require

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


def is_vocabulary(name: str, patterns: tuple[str, ...] = VOCABULARY) -> bool:
    """Return whether a tensor's name is that of a table with one row per token."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class Source(Protocol):
    """A model as merging reads it: names, shapes, dtypes, and one tensor at a time."""

    @property
    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def file_of(self, name: str) -> object: ...
    def finite_tensor(self, name: str) -> Tensor: ...


class ModuleSource:
    """A module in memory as a source; `label` replaces the file name in messages."""

    def __init__(self, module: nn.Module, label: str):
        self._label = label
        self._state = untied(module)

    @property
    def names(self) -> list[str]:
        return sorted(self._state)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._state[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._state[name].dtype

    def file_of(self, name: str) -> str:
        return self._label

    def finite_tensor(self, name: str) -> Tensor:
        check_tensor(self._label, name, self._state[name], weight=name.endswith("weight"))
        return self._state[name].detach().cpu()


@dataclass
class Derived:
    """A source that forwards to another one; subclasses change parts of it."""

    inner: Source

    @property
    def names(self) -> list[str]:
        return self.inner.names

    def shape(self, name: str) -> tuple[int, ...]:
        return self.inner.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self.inner.dtype(name)

    def file_of(self, name: str) -> object:
        return self.inner.file_of(name)

    def finite_tensor(self, name: str) -> Tensor:
        return self.inner.finite_tensor(name)


@dataclass
class Without(Derived):
    """A source with some of its tensors hidden."""

    hidden: frozenset[str]

    @property
    def names(self) -> list[str]:
        return [name for name in self.inner.names if name not in self.hidden]


def kept_embeddings(
    base: Source, experts: dict[str, Source], keep: bool, apart: frozenset[str] = frozenset()
) -> tuple[list[str], Source, dict[str, Source]]:
    """Return the names of tensors that stay the base's, and all models without them.

    keep: keep the base's token tables, for experts with other vocabularies.   apart: further
    tensors that stay the base's.
    """
    hidden = apart | frozenset(
        n for s in (base, *experts.values()) for n in s.names if keep and is_vocabulary(n)
    )
    if not hidden:
        return [], base, experts
    kept = [name for name in base.names if name in hidden]
    return (
        kept,
        Without(base, hidden),
        {t: Without(expert, hidden) for t, expert in experts.items()},
    )


class AdapterSource(Derived):
    """A LoRA folder as a source of the base's tensors, under the base's names.

    peft adds the adapter in float64 to the base, read in float32 or wider. The changed tensors wait
    in a temporary file, so that one dense model at a time is in memory; they are float64, while
    `dtype` is the base's, so that task vectors are not rounded to the dtype of the base.

    Raises: what with_adapter and merged_adapter raise.
    """

    def __init__(
        self, folder: str | Path, base: nn.Module | str | Path, inner: Source, part: str | None
    ):
        super().__init__(inner)
        self._file = Path(folder) / WEIGHTS
        if isinstance(base, nn.Module):
            model = copy.deepcopy(base)
        else:
            load = load_vision if part else load_model
            kinds = (inner.dtype(name) for name in inner.names)
            wide = any(kind == torch.float64 for kind in kinds)
            model = load(base, torch.float64 if wide else torch.float32)
        dense = merged_adapter(with_adapter(model, folder), folder, torch.float64)
        changed = {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in self._in_base_names(dense).items()
            if not torch.equal(tensor.cpu(), inner.finite_tensor(name).to(tensor.dtype))
        }
        self._changed = set(changed)
        self._folder = TemporaryDirectory(prefix="featcal-lora-")  # removed with this object
        save_file(changed, Path(self._folder.name) / SINGLE)
        self._tensors = LazyCheckpoint(self._folder.name)

    def file_of(self, name: str) -> object:
        return self._file if name in self._changed else self.inner.file_of(name)

    def finite_tensor(self, name: str) -> Tensor:
        return (self._tensors if name in self._changed else self.inner).finite_tensor(name)

    def _in_base_names(self, dense: nn.Module) -> dict[str, Tensor]:
        """Return the state under the names of the base, as transformers renames and splits it."""
        state = untied(dense)
        if not isinstance(self.inner, LazyCheckpoint):
            return state
        stored, named = stored_tensors(dense, self.inner), dict[str, Tensor]()  # type: ignore[arg-type]
        for name, tensor in dense.state_dict().items():
            if name not in stored:  # the second name of a tied tensor
                continue
            parts = stored[name].to_sources(tensor.cpu(), self.inner.shape)
            before = None if parts else stored[name].read(self.inner.finite_tensor)
            if before is not None and not torch.equal(before.to(tensor.dtype), tensor):
                problem = f"changes {name}, which the base stores in another form"
                raise BadFile(self._file, problem, "save the base with transformers 5 or newer")
            named |= parts
        return named


def named_experts(experts: Mapping[str, Any] | Sequence[Any], place: str) -> dict[str, Any]:
    """Return experts by task name, or by number where they come in a list.

    Raises: BadSetting naming the argument where there is none.
    """
    require(
        isinstance(experts, Mapping | Sequence),
        f"{place}.experts",
        type(experts).__name__,
        "must be a dictionary or a list",
    )
    named = (
        dict(experts)
        if isinstance(experts, Mapping)
        else {f"{i:03d}": expert for i, expert in enumerate(experts)}
    )
    if not named:
        raise BadSetting(f"{place}.experts", named, "must hold at least one expert")
    return named


def expert_sources(
    experts: Mapping[str, Any], base: nn.Module | str | Path, origin: Source, part: str | None
) -> dict[str, Source]:
    """Return every expert as a source, in the order of task names; a LoRA folder needs the base."""
    return {
        task: AdapterSource(expert, base, origin, part)
        if is_adapter(expert := experts[task])
        else source(expert, f"expert {task!r}")
        for task in sorted(experts)
    }


def source(model: nn.Module | str | Path, label: str, part: str | None = None) -> Source:
    """Open a module or a folder as a source. Raises: BadFile for a folder of integers."""
    if isinstance(model, nn.Module):
        return ModuleSource(model, label)
    checkpoint = LazyCheckpoint(model, part)
    checkpoint.require_floating()
    return checkpoint


def require_alike(base: Source, experts: Mapping[str, Source]) -> None:
    """Require the same tensor names, shapes and dtypes. Raises: MissingTensor, TensorsDiffer."""
    for expert in experts.values():
        for has, lacks in ((base, expert), (expert, base)):
            missing = sorted(set(has.names) - set(lacks.names))
            if missing:
                place = f"{lacks.file_of(lacks.names[0])} (beside {has.file_of(missing[0])})"
                raise MissingTensor(place, missing[0], lacks.names)
        for name in base.names:
            files = base.file_of(name), expert.file_of(name)
            if base.shape(name) != expert.shape(name):
                raise TensorsDiffer(name, files[0], base.shape(name), files[1], expert.shape(name))
            if base.dtype(name) != expert.dtype(name):
                raise types_differ(name, files, base.dtype(name), expert.dtype(name))


def types_differ(
    name: str, files: tuple[object, object], this: torch.dtype, that: torch.dtype
) -> TensorsDiffer:
    """Return the error for one tensor stored in two types, with the lines that convert a model."""
    short = str(this).removeprefix("torch.")
    way_out = (
        "save the second model in the type of the first, with its own class of transformers:\n"
        f"    model = CLIPVisionModel.from_pretrained(folder, dtype={short!r}); model.save_pretrained(new_folder)"
    )
    return TensorsDiffer(name, files[0], this, files[1], that, way_out)
