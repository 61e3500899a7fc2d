"""A model of config.json without its numbers: parameters on meta, buffers real, everything else as
from_pretrained makes it.

Building under `torch.device("meta")` would take the buffers too (positions, rotary frequencies),
which no file holds.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import CLIPModel, CLIPVisionModel, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from featcal.errors import BadFile, TensorsDiffer
from featcal.models.load import VISION, model_class, quiet

# what transformers and its validation of configurations raise for a value they cannot use; the last
# is the parent of their own
_UNUSABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    StrictDataclassError,
)


def skeleton(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    like: type[PreTrainedModel] | None = None,
) -> tuple[PreTrainedModel, str | None]:
    """The model of a folder in evaluation mode, parameters of `dtype` on meta; and which part of
    the checkpoint it is.

    The class is read from config.json and is one of transformers' own; of a whole CLIP it is the
    vision tower. Parameters that the model ties are one object under several names. Buffers are on
    `device`.
    like: a class to build instead, with the same tower: the model without its head, or with another
    one.
    Raises: MissingPath; BadFile for a config.json that makes no model.
    """
    kind: Any = (
        like if like is not None and same_tower(model_class(folder), like) else model_class(folder)
    )
    part = VISION if kind is CLIPModel else None
    kind = CLIPVisionModel if part else kind
    try:
        # some classes draw parameters while being built
        with (
            quiet(),
            torch.random.fork_rng(devices=[]),
            parameters_on_meta(),
            only_buffers_initialised(),
        ):
            config = kind.config_class.from_pretrained(folder, local_files_only=True)
            module: PreTrainedModel = kind._from_config(config, dtype=dtype).eval()
    except _UNUSABLE as error:
        problem = f"transformers makes no {kind.__name__} of it ({' '.join(str(error).split())})"
        raise BadFile(
            Path(folder) / "config.json",
            problem,
            "give the config.json that was saved with these weights",
        ) from None
    keep_wide(module, dtype)
    for each in module.modules():
        each._buffers.update(
            {name: b.to(device) for name, b in each._buffers.items() if b is not None}
        )
    return module, part


def same_tower(one: type[PreTrainedModel], other: type[PreTrainedModel]) -> bool:
    """Whether two classes are one family's, so that they differ in what stands on the tower."""
    return (
        one.config_class is other.config_class
        and bool(one.base_model_prefix)
        and one.base_model_prefix == other.base_model_prefix
    )


def require_one_family(kinds: Mapping[str, type]) -> None:
    """Raise TensorsDiffer where models, by the name errors use, are of classes that transformers
    describes in different places.

    Tensors of the same names and shapes do not make them one family: RoBERTa's are BERT's, and mean
    something else.
    """
    (here, this), *others = kinds.items()
    for there, that in others:
        if family(that) != family(this):
            way_out = "all models must be of one family; where one computes as the other does, write its class into config.json"
            raise TensorsDiffer(
                "the architecture", here, this.__name__, there, that.__name__, way_out
            )


def family(kind: type) -> str | None:
    """Where transformers describes the configurations of a class and of those it is part of; None
    of other classes.
    """
    return getattr(getattr(kind, "config_class", None), "__module__", None)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, every parameter that a module is given loses its numbers; one on meta already stays
    the object it is.
    """
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(
                torch.empty_like(param, device="meta"), requires_grad=param.requires_grad
            )
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def only_buffers_initialised() -> Iterator[None]:
    """Inside, transformers fills only modules with a buffer somewhere below: all others would be
    filled on meta, in vain.

    That is most of a small model's building time.
    """
    initialise = PreTrainedModel._initialize_weights

    def where_needed(self: PreTrainedModel, module: nn.Module, *more: Any, **named: Any) -> None:
        if next(module.buffers(), None) is not None:
            initialise(self, module, *more, **named)

    PreTrainedModel._initialize_weights = where_needed  # type: ignore[method-assign]
    try:
        yield
    finally:
        PreTrainedModel._initialize_weights = initialise  # type: ignore[method-assign]


def keep_wide(module: PreTrainedModel, dtype: torch.dtype) -> None:
    """Gives parameters that transformers keeps in float32 beside a half precision (T5's wo beside
    float16) that dtype.
    """
    wide = module._get_dtype_plan(dtype)
    if wide:
        pattern, _, _ = build_glob_alternation(list(wide))
        for name, parameter in module.named_parameters():
            if pattern.search(name):
                parameter.data = parameter.data.float()
