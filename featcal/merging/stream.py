"""A merge as a stream of tensors, and the folder or the module that takes it."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from featcal.errors import TensorsDiffer
from featcal.merging.job import Job, Named
from featcal.merging.sources import Source, require_alike
from featcal.models.save import copy_beside, write_config
from featcal.storage.model_card import write_card
from featcal.storage.results import write_json
from featcal.storage.writer import ShardWriter

RECORD = "merge.json"


def merged_tensors(job: Job, found: Iterator[Named]) -> Iterator[Named]:
    """Name and merged tensor, one after the other, in the base's dtypes: those that are not merged,
    then what the method found.

    Tensors that are not floating point (counters) must be equal in all models and are the base's.
    Raises: MissingTensor, TensorsDiffer before the first tensor; NotFinite naming file and tensor;
    what the method raises.
    """
    require_alike(job.base, job.experts)
    for name in sorted(set(job.base.names) - set(job.names)):
        yield name, _counter(name, job)
    yield from found


def _counter(name: str, job: Job) -> Tensor:
    ours = job.base.finite_tensor(name)
    for expert in job.experts.values():
        if not torch.equal(ours, expert.finite_tensor(name)):
            raise TensorsDiffer(
                name, job.base.file_of(name), "one value", expert.file_of(name), "another"
            )
    return ours


@dataclass(frozen=True)
class Target:
    """What a merged folder holds beside its tensors: configuration, class name, what `copy_beside`
    takes of `like`; its size.
    """

    config: PretrainedConfig
    architecture: str
    like: str | Path | None
    bytes: int


def size_of(base: Source) -> int:
    """Bytes of all tensors."""
    return sum(math.prod(base.shape(name)) * base.dtype(name).itemsize for name in base.names)


def write_merged(
    tensors: Iterator[Named],
    out: str | Path,
    target: Target,
    record: Mapping[str, Any],
    card: str = "",
) -> Path:
    """A Hugging Face folder of merged tensors with its card, complete or not there; merge.json
    where there is a record.

    Raises: DiskFull.
    """
    first = next(tensors)  # checks run here, before a folder is made
    with ShardWriter(out, needed=target.bytes) as writer:
        write_config(target.config, target.architecture, writer.folder)
        copy_beside(target.like, writer.folder)
        writer.write(*first)
        for name, tensor in tensors:
            writer.write(name, tensor)
        if record:  # filled while the tensors came
            write_json(writer.folder / RECORD, record)
        if card:
            write_card(writer.folder, card)
    return Path(out)


@torch.no_grad()
def fill(module: nn.Module, tensors: Iterator[Named]) -> nn.Module:
    """The module with the merged tensors in place of its own."""
    state = module.state_dict()
    for name, tensor in tensors:
        state[name].copy_(tensor)  # tied tensors share memory, so one copy reaches all their names
    return module
