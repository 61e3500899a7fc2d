"""Merging tensor by tensor: of every model at most one tensor is in memory, whatever the models' size."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from featcal.errors import TensorsDiffer
from featcal.merging.methods import Method
from featcal.merging.sources import Source, require_alike
from featcal.models.save import copy_beside, write_config
from featcal.storage.writer import ShardWriter


def merged_tensors(
    method: Method, settings: Mapping[str, float], base: Source, experts: Mapping[str, Source]
) -> Iterator[tuple[str, Tensor]]:
    """Name and merged tensor, one after the other, experts in sorted order of their tasks.

    Tensors that are not floating point (counters) must be equal in all models and are the base's.
    Raises: MissingTensor, TensorsDiffer before the first tensor; NotFinite naming file and tensor.
    """
    require_alike(base, experts)
    for name in base.names:
        yield name, _merged_tensor(name, method, settings, base, experts)


def _merged_tensor(
    name: str, method: Method, settings: Mapping[str, float], base: Source, experts: Mapping[str, Source]
) -> Tensor:
    # a function of its own, so that the models' tensors are freed before the next ones are read
    tasks = sorted(experts)
    ours = base.finite_tensor(name)
    theirs = [experts[task].finite_tensor(name) for task in tasks]
    if ours.is_floating_point():
        return method.merged(ours, theirs, **settings)
    for task, tensor in zip(tasks, theirs, strict=True):
        if not torch.equal(ours, tensor):
            raise TensorsDiffer(name, base.file_of(name), "one value", experts[task].file_of(name), "another")
    return ours


@dataclass(frozen=True)
class Target:
    """What a merged folder holds beside its tensors: configuration, class name, processor files of `like`; and its size."""

    config: PretrainedConfig
    architecture: str
    like: str | Path | None
    bytes: int


def size_of(base: Source) -> int:
    """Bytes of all tensors."""
    return sum(math.prod(base.shape(name)) * base.dtype(name).itemsize for name in base.names)


def write_merged(tensors: Iterator[tuple[str, Tensor]], out: str | Path, target: Target) -> Path:
    """A Hugging Face folder of merged tensors, complete or not there. Raises: DiskFull."""
    first = next(tensors)  # checks run here, before a folder is made
    with ShardWriter(out, needed=target.bytes) as writer:
        write_config(target.config, target.architecture, writer.folder)
        copy_beside(target.like, writer.folder)
        writer.write(*first)
        for name, tensor in tensors:
            writer.write(name, tensor)
    return Path(out)
