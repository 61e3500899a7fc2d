"""Operations on torch's meta device, each worked out once for all tensors of the same shapes.

There torch works most results out in Python, slowly, and the blocks of a model ask for the same
ones again and again. Knows tensors and torch's operations; no models, no settings.
"""

from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

META = torch.device("meta")
REMEMBERED = 1 << 14  # operations


class Bare(NamedTuple):
    """What a tensor without numbers is."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made(self) -> Tensor:
        """A new one."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=META)


class NotAlike(Exception):
    """Raised where shapes do not tell all of what an operation is given."""


def performed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, int]:
    """What an operation puts out, and its floating point operations: matrix products, convolutions
    and attention only.
    """
    if makes_one_tensor(func):
        try:
            known = remembered(
                func,
                described(args),
                tuple((name, described(value)) for name, value in kwargs.items()),
            )
        except NotAlike:
            known = None
        if known is not None:
            out, flops = known
            return out.made(), flops
    return worked_out(func, args, kwargs)


def worked_out(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, int]:
    """The same, by torch itself."""
    out = func(*args, **kwargs)
    count = flop_registry.get(func._overloadpacket)
    return out, 0 if count is None else int(count(*args, **kwargs, out_val=out))


@cache
def makes_one_tensor(func: Any) -> bool:
    """Whether an operation says that all it does is to make one tensor."""
    returns = func._schema.returns
    alone = len(returns) == 1 and str(returns[0].type) == "Tensor" and returns[0].alias_info is None
    return alone and not func._schema.is_mutable


@lru_cache(REMEMBERED)
def remembered(
    func: Any, args: Any, kwargs: tuple[tuple[str, Any], ...]
) -> tuple[Bare, int] | None:
    """What comes out where `told` tells what goes in; None if that is not a tensor of its own, or
    has numbers.
    """
    inputs = given(args), {name: given(value) for name, value in kwargs}
    out, flops = worked_out(func, *inputs)
    bare, memory = Bare(tuple(out.shape), out.stride(), out.dtype), out.untyped_storage()
    shared = any(
        tensor.untyped_storage()._cdata == memory._cdata for tensor in tensors_in(inputs)
    )  # _unsafe_view says it is none
    own = (
        out.device == META
        and bare.made().untyped_storage().nbytes() == memory.nbytes()
        and not shared
    )
    return (bare, flops) if own else None


def described(value: Any) -> Any:
    """Everything of an argument that decides what comes out; equal exactly where that is the same.
    Raises: NotAlike.
    """
    if isinstance(value, Tensor):
        if value.device != META:
            raise NotAlike
        return Bare(tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(described(each) for each in value)
    return type(value), value  # 2, 2.0 and True are equal, but make other kinds of numbers


def given(value: Any) -> Any:
    """An argument again, of what `told` tells."""
    if isinstance(value, Bare):
        return value.made()
    kind, content = value
    return kind(given(each) for each in content) if kind in (tuple, list) else content


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a nest of tuples, lists and mappings, such as what an operation is given or
    puts out.
    """
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
