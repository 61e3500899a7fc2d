"""A forward without numbers: models on torch's meta device know shapes only, which is enough to
count work and memory.

Where a model's own code asks for a number, it may only ask yes-no questions about padding; those
are answered for it. Knows tensors and torch's operations; no models, no settings.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from featcal.blocks.capture import hooked
from featcal.errors import BadPlan
from featcal.planning.operations import performed, tensors_in


class MetaProfiler(TorchDispatchMode):
    """Counts, of what happens inside the `with`, floating point operations of products and bytes of
    tensors made.
    """

    def __init__(self, padded: bool = False):
        super().__init__()
        self.padded = padded
        # 2 for one multiplication and addition; matrix products, convolutions and attention only
        self.flops = 0
        self.live = 0  # bytes of tensors made inside that still exist
        self.peak = 0
        self.known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.answer(args[0])
        for tensor in tensors_in(
            (args, kwargs)
        ):  # what was there before, of which views may come out
            self.note(tensor, made=False)
        out, flops = performed(func, args, kwargs or {})
        self.flops += flops
        for tensor in tensors_in(out):
            self.note(tensor, made=True)
        return out

    def answer(self, question: Tensor) -> bool:
        """Models ask whether all tokens count, to do without a mask. Raises: RuntimeError for a
        question about anything else.
        """
        if question.dtype != torch.bool:
            raise RuntimeError("it asks for a number")
        return not self.padded

    def note(self, tensor: Tensor, made: bool) -> None:
        """Count the memory of a tensor that was made inside, once, until it is freed."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if made else 0
        if key in self.known:
            return

        def freed(_: Any) -> None:
            del self.known[key]
            self.live -= size

        self.known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


class FusedAttention(TorchFunctionMode):
    """Attention as the fused kernels do it, which never hold all scores; on the meta device torch
    would make them.
    """

    def __init__(self, rehearsal: MetaProfiler):
        super().__init__()
        self.rehearsal = rehearsal

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        named = dict(zip(("query", "key", "value"), args, strict=False)) | dict(kwargs or {})
        query, key, value = (
            named["query"],
            named["key"],
            named["value"],
        )  # (…, heads, tokens, features of a head)
        pairs = 2 * query.shape[:-1].numel() * key.shape[-2]
        self.rehearsal.flops += pairs * (query.shape[-1] + value.shape[-1])
        return query.new_empty(*query.shape[:-1], value.shape[-1])


@contextmanager
def shapes_suffice(model: nn.Module) -> Iterator[None]:
    """Raises BadPlan for a model that cannot run without numbers, or not on what it is fed here."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        problem = f"its forward depends on numbers, or on other inputs ({' '.join(str(error).split())[:200]})"
        way_out = "what it needs cannot be told from shapes; calibrate it on few samples and read what that run took"
        raise BadPlan(type(model).__name__, problem, way_out) from error


@contextmanager
def rehearsing(padded: bool = False) -> Iterator[MetaProfiler]:
    """Inside, operations on the meta device are counted; `padded` says whether sequences of a batch
    differ in length.
    """
    with torch.no_grad(), MetaProfiler(padded) as rehearsal, FusedAttention(rehearsal):
        yield rehearsal


def to_meta(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are all on the meta device, without hooks; no number is
    copied or read.
    """
    bare: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        bare[id(tensor)] = (
            nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
        )
    copied = copy.deepcopy(model, bare)
    for module in copied.modules():  # hooks of the model's owner expect numbers
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return copied


@contextmanager
def reaching(
    block: nn.Module, names: Sequence[str], counted: MetaProfiler
) -> Iterator[dict[str, int]]:
    """How many flops were counted when each of the modules was reached, by name, in the order of
    the forward.
    """
    reached: dict[str, int] = {}
    handles = [
        block.get_submodule(n).register_forward_pre_hook(
            lambda *_, n=n: reached.update({n: counted.flops})
        )
        for n in names
    ]
    with hooked(handles):
        yield reached


@contextmanager
def used_parameters(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Parameters of the modules that run inside, each once."""
    used: dict[int, nn.Parameter] = {}

    def note(module: nn.Module, _: object) -> None:
        used.update((id(p), p) for p in module.parameters(recurse=False))

    found: list[nn.Parameter] = []
    handles = [module.register_forward_pre_hook(note) for module in model.modules()]
    with hooked(handles):
        yield found
    found.extend(used.values())


def size(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def held_bytes(held: object) -> int:
    """Bytes of all tensors in a nest of tuples and mappings, memory that several share counted
    once.
    """
    storages = [tensor.untyped_storage() for tensor in tensors_in(held)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
