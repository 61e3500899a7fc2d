"""Zero-shot heads of methods that answer: what turns a feature of an image or text into one logit
per class of a task.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from featcal.errors import BadSetting, MissingPath, MissingTensor, TruncatedFile

PROJECTION, SCALE = "visual_projection", "logit_scale"


def read_head(head: Any, tasks: Iterable[str]) -> dict[str, Tensor]:
    """logit_scale (), head/<task> (K, p) of every task and, of images, visual_projection (p, h), of
    a file or mapping of tensors.

    Raises: MissingPath, TruncatedFile, MissingTensor naming what lacks; BadSetting for shapes that
    do not fit.
    """
    tensors: Mapping[str, Tensor] = head if isinstance(head, Mapping) else _read(Path(head))
    place = "head" if isinstance(head, Mapping) else head
    heads = [f"head/{task}" for task in tasks]
    wanted = [*([PROJECTION] if PROJECTION in tensors else []), SCALE, *heads]
    for name in wanted:
        if name not in tensors:
            raise MissingTensor(place, name, tensors.keys())
    p = tensors[PROJECTION].shape[0] if PROJECTION in tensors else tensors[heads[0]].shape[-1]
    for name in heads:
        shape = tuple(tensors[name].shape)
        if len(shape) != 2 or shape[1] != p or not torch.isfinite(tensors[name]).all():
            raise BadSetting(
                f"merge.head[{name!r}]",
                shape,
                f"must be a finite matrix with one row of {p} numbers per class",
            )
    return {name: tensors[name] for name in wanted}


def _read(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise MissingPath(
            file,
            "zero-shot heads",
            "give heads.safetensors of a prepared role, or its tensors in a dictionary",
        )
    try:
        return load_file(file)
    except SafetensorError as error:
        raise TruncatedFile(file, error) from None
