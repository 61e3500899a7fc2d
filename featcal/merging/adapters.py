"""LoRA folders as experts: the base's tensors plus scaled products of two thin matrices, made dense
one tensor at a time.

What is not plain LoRA is refused by name, because left out silently it would be another expert.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from featcal.errors import (
    BadFile,
    BadSetting,
    MissingPath,
    MissingTensor,
    NotFinite,
    TensorsDiffer,
    TruncatedFile,
)
from featcal.merging.sources import Derived, Source, source
from featcal.models.code import is_adapter
from featcal.models.lora import without_adapters
from featcal.settings import require
from featcal.storage.results import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
# a setting that changes what the two matrices mean, or adds tensors of its own, and the value at
# which it does not
PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "alpha_pattern": ({}, None),
    "layer_replication": ([], None),
    "trainable_token_indices": ([], {}, None),
    "lora_bias": (False, None),
}


def named_experts(experts: Mapping[str, Any] | Sequence[Any], place: str) -> dict[str, Any]:
    """Experts by task name, or by number where they come in a list; a PeftModel becomes the plain
    model that it computes.

    Raises: BadSetting naming the place where there is none.
    """
    require(
        isinstance(experts, Mapping | Sequence),
        f"{place}.experts",
        type(experts).__name__,
        "must be a dictionary or a list",
    )
    given = (
        experts
        if isinstance(experts, Mapping)
        else {f"{i:03d}": expert for i, expert in enumerate(experts)}
    )
    if not given:
        raise BadSetting(f"{place}.experts", given, "must hold at least one expert")
    return {task: without_adapters(expert) for task, expert in given.items()}


def expert_sources(
    experts: Mapping[str, nn.Module | str | Path], base: Source
) -> dict[str, Source]:
    """Every expert as a source, in the order of task names; a LoRA folder stands on the base."""

    def one(task: str, expert: nn.Module | str | Path) -> Source:
        return (
            AdapterSource(str(expert), base)
            if is_adapter(expert)
            else source(expert, f"expert {task!r}")
        )

    return {task: one(task, experts[task]) for task in sorted(experts)}


class AdapterSource(Derived):
    """An expert W = W₀ + s B A, with s = α/r (or α/√r where the adapter says so), as a source of
    the base's tensors.

    Whole tensors beside the matrices (trained biases, modules_to_save) stand in the place of the
    base's; `heads` are those that the base has none of, such as a classifier.

    Raises: MissingPath, TruncatedFile, BadFile for a kind of adapter that is not plain LoRA or a
    matrix without its partner, MissingTensor for one without a weight in the base, TensorsDiffer
    for shapes that do not fit.
    """

    def __init__(self, folder: str | Path, base: Source):
        super().__init__(base)
        self._file = Path(folder) / WEIGHTS
        self._config = _plain_config(Path(folder) / CONFIG)
        if not self._file.is_file():
            raise MissingPath(
                self._file,
                "the adapter's weights",
                "save it with save_pretrained(folder), which writes safetensors",
            )
        try:
            self._tensors: Any = safe_open(self._file, framework="pt", device="cpu")
            self._whole, self.heads = self._saved(list(self._tensors.keys()))
            kept = {*self._whole.values(), *self.heads}
            self._pairs = self._paired([key for key in self._tensors.keys() if key not in kept])
        except SafetensorError as error:
            raise TruncatedFile(self._file, error) from None

    def file_of(self, name: str) -> Path:
        return self._file

    def finite_tensor(self, name: str) -> Tensor:
        base = self.inner.finite_tensor(name)
        if name in self._whole:
            saved: Tensor = self._tensors.get_tensor(self._whole[name])
            if not torch.isfinite(saved).all():
                raise NotFinite(self._file, self._whole[name])
            return saved.to(base.dtype)
        if name not in self._pairs:
            return base
        path = self._pairs[name]
        down, up = (
            self._tensors.get_tensor(path + A).double(),
            self._tensors.get_tensor(path + B).double(),
        )  # (r, d), (o, r)
        rank = math.sqrt(down.shape[0]) if self._config.get("use_rslora") else down.shape[0]
        change = (self._config["lora_alpha"] / rank) * (up @ down)  # (o, d)
        turned: Tensor = change.T if self._config.get("fan_in_fan_out") else change
        return (base.double() + turned).to(base.dtype)

    def _saved(self, keys: list[str]) -> tuple[dict[str, str], list[str]]:
        """Name of the base's tensor -> key of the whole tensor in its place; and the keys of
        modules that the base lacks.

        Only biases, where the configuration says that they were trained, and modules_to_save are
        such.
        """
        biases = self._config.get("bias") in ("all", "lora_only")
        modules = tuple(self._config.get("modules_to_save") or ())
        whole, heads = {}, []
        for key in (key for key in keys if not key.endswith((A, B))):
            name = key.removeprefix(PREFIX)
            owner = name.rpartition(".")[0]
            inside = any(f".{module}." in f".{owner}." for module in modules)
            if not inside and not (biases and name.endswith(".bias")):
                continue
            mine = self._known(name)
            if mine is None:
                heads.append(key)
                continue
            shape = tuple(self._tensors.get_slice(key).get_shape())
            if shape != tuple(self.inner.shape(mine)):
                raise TensorsDiffer(
                    mine, self.inner.file_of(mine), self.inner.shape(mine), self._file, shape
                )
            whole[mine] = key
        return whole, heads

    def _paired(self, keys: list[str]) -> dict[str, str]:
        """Name of the base's weight -> path of its two matrices; every key of the file is one of a
        pair.
        """
        pairs: dict[str, str] = {}
        for key in sorted(keys):
            path = key.removesuffix(A).removesuffix(B)
            if path == key or {path + A, path + B} - set(keys):
                way_out = "only pairs of lora_A.weight and lora_B.weight are understood; merge the adapter with peft and save the model"
                raise BadFile(self._file, f"{key} is not one of such a pair", way_out)
            pairs[self._weight(path)] = path
        for name, path in pairs.items():
            (r, d), (o, also) = (self._tensors.get_slice(path + end).get_shape() for end in (A, B))
            wanted = (d, o) if self._config.get("fan_in_fan_out") else (o, d)
            if r != also or wanted != self.inner.shape(name):
                raise TensorsDiffer(
                    name, self.inner.file_of(name), self.inner.shape(name), self._file, wanted
                )
        return pairs

    def _weight(self, path: str) -> str:
        """The base's name of the weight an adapter's path stands for."""
        name = path.removeprefix(PREFIX).removesuffix(".base_layer") + ".weight"
        if found := self._known(name):
            return found
        raise MissingTensor(self.inner.file_of(self.names[0]), name, self.names)

    def _known(self, name: str) -> str | None:
        """What the base calls a tensor, if it has it; a tower inside a larger model has a prefix of
        its own.
        """
        return next(
            (own for own in (name, name.removeprefix("vision_model.")) if own in self.names), None
        )


def _plain_config(file: Path) -> dict[str, Any]:
    """adapter_config.json of a plain LoRA. Raises: BadFile naming what is not understood."""
    config = read_json(file)
    if not isinstance(config, dict):
        raise BadFile(file, "not a mapping", "save the adapter again with peft")
    way_out = "only plain LoRA is understood; merge the adapter with peft (merge_and_unload) and save the model"
    for key, plain in PLAIN.items():
        if config.get(key) not in plain:
            raise BadFile(file, f"{key} is {config.get(key)!r}", way_out)
    alpha = config.get("lora_alpha")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise BadFile(
            file, f"lora_alpha is {alpha!r}, not a number", "save the adapter again with peft"
        )
    return config
