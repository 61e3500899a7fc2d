"""Models as sources of tensors by name: modules, checkpoint folders and LoRA adapters."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from featcal.errors import BadFile, BadSetting, MissingTensor, TensorsDiffer
from featcal.models.batch import Model
from featcal.models.checkpoint import SINGLE, LazyCheckpoint, check_tensor
from featcal.models.load import is_adapter, load_model, load_vision
from featcal.models.lora import WEIGHTS, merged_adapter, with_adapter, without_adapters
from featcal.models.save import untied
from featcal.models.stored import stored_tensors

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


class ModuleSource:
    """A module in memory as a source; `label` replaces the file name in messages.

    The adapters of a PeftModel are added in float64, so that task vectors are not rounded.
    """

    def __init__(self, module: nn.Module, label: str):
        self._label = label
        plain = without_adapters(module, torch.float64)
        self._state = untied(plain)
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

    @property
    def names(self) -> list[str]:
        """The names of all tensors, sorted."""
        return self.inner.names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.inner.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in the model."""
        return self.inner.dtype(name)

    def file_of(self, name: str) -> object:
        """Return the file of a tensor, or a label."""
        return self.inner.file_of(name)

    def finite_tensor(self, name: str) -> Tensor:
        """Return a tensor on the CPU. Raises: NotFinite."""
        return self.inner.finite_tensor(name)


# A model as merging reads it: names, shapes, dtypes, and one tensor at a time
Source = LazyCheckpoint | ModuleSource | Derived


class AdapterSource(Derived):
    """A LoRA folder as a source of the base's tensors, under the base's names.

    peft adds the adapter in float64 to the base, read in float32 or wider. The changed tensors wait
    in a temporary file, so that one dense model at a time is in memory. They are float64, while
    `dtype` is the base's, so that task vectors are not rounded.
    Raises: as with_adapter and merged_adapter.
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
            for name, tensor in self._in_base_names(dense).items()
            if not torch.equal(tensor.cpu(), inner.finite_tensor(name).to(tensor.dtype))
        }
        self._changed = set(changed)
        self._folder = TemporaryDirectory(prefix="featcal-lora-")  # removed with this object
        save_file(changed, Path(self._folder.name) / SINGLE)
        self._tensors = LazyCheckpoint(self._folder.name)

    def file_of(self, name: str) -> object:
        """Return the adapter's file for a tensor that it changes, else the base's."""
        return self._file if name in self._changed else self.inner.file_of(name)

    def finite_tensor(self, name: str) -> Tensor:
        """Return a tensor on the CPU. Raises: NotFinite."""
        return (self._tensors if name in self._changed else self.inner).finite_tensor(name)

    def _in_base_names(self, dense: nn.Module) -> dict[str, Tensor]:
        """Return the state under the names of the base, as transformers renames and splits it."""
        if not isinstance(self.inner, LazyCheckpoint):
            return untied(dense)
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


def named_experts(experts: Mapping[str, Model] | Sequence[Model], section: str) -> dict[str, Model]:
    """Return experts by task name, or by number for a list. Raises: BadSetting without any."""
    if isinstance(experts, Mapping):
        named = dict(experts)
    elif isinstance(experts, Sequence):
        named = {f"{i:03d}": expert for i, expert in enumerate(experts)}
    else:
        kind = type(experts).__name__
        raise BadSetting(f"{section}.experts", kind, "must be a dictionary or a list")
    if not named:
        raise BadSetting(f"{section}.experts", named, "must hold at least one expert")
    return named


def expert_sources(
    experts: Mapping[str, Model], base: Model, origin: Source, part: str | None
) -> dict[str, Source]:
    """Return every expert as a source, sorted by task; `origin` is the base as a source."""
    return {
        task: AdapterSource(expert, base, origin, part)  # type: ignore[arg-type]
        if is_adapter(expert := experts[task])
        else source(expert, f"expert {task!r}")
        for task in sorted(experts)
    }


def source(model: Model, label: str, part: str | None = None) -> Source:
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
