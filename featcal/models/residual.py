"""The residual streams of a block: what the outputs of its linears are added to, found by watching
the additions of a forward."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from featcal.errors import BadCapture
from featcal.models.capture import Enough, StopForward, hooked, to_its_end

ADDITIONS = (torch.Tensor.add, torch.Tensor.add_, torch.add)


class Additions(TorchFunctionMode):
    """While active: which of some tensors are added to what, by name.

    Counts are additions of two tensors with the rows of `like`, of which one has a name and the
    other has none.
    """

    def __init__(self, named: Mapping[str, Tensor], like: Tensor, enough: Enough):
        super().__init__()
        self.named, self.like, self.enough = named, like, enough
        self.seen: dict[str, Tensor] = {}
        self.versions: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func in ADDITIONS
            and len(args) == 2
            and not kwargs
            and all(isinstance(a, Tensor) for a in args)
        ):
            names = [self.name(a) for a in args]
            for name, other, others in zip(names, reversed(args), reversed(names), strict=True):
                if (
                    name
                    and not others
                    and self.is_stream(other)
                    and other.shape == args[0].shape == args[1].shape
                ):
                    self.seen[name] = (
                        other.clone() if func is torch.Tensor.add_ and other is args[0] else other
                    )
                    self.versions[name] = self.seen[name]._version
                    if self.enough():
                        raise StopForward
        return func(*args, **(kwargs or {}))

    def is_stream(self, x: Tensor) -> bool:
        """Whether x has the rows of `like`, be they (batch, tokens, d) or (rows, d)."""
        return x.shape[-1:] == self.like.shape[-1:] and x.numel() == self.like.numel()

    def name(self, tensor: Tensor) -> str | None:
        """The name of a tensor, also where it went through a dropout that does nothing."""
        return next((name for name, own in self.named.items() if own is tensor), None)


@contextmanager
def residual_streams(
    block: nn.Module, names: Sequence[str], hidden: Tensor, enough: Enough = to_its_end
) -> Iterator[dict[str, Tensor]]:
    """What the outputs of named linears are added to during the next forward: the residual stream
    that enters the addition.

    Found by what is added to what, not by names of modules, so before and after a norm alike. A
    linear is left out whose output is scaled or normed first, or is added to that of another
    linear, or never to something with the rows of `hidden`. The forward ends as soon as an addition
    is seen and `enough` says so.
    Raises: BadCapture for a stream that was overwritten in place afterwards.
    """
    outputs: dict[str, Tensor] = {}
    watch = Additions(outputs, hidden, enough)
    handles = [
        block.get_submodule(n).register_forward_hook(
            lambda _m, _a, out, n=n: outputs.update({n: out})
        )
        for n in names
    ]
    with suppress(StopForward), hooked(handles), watch:
        yield watch.seen
    outputs.clear()
    if changed := [
        name for name, stream in watch.seen.items() if stream._version != watch.versions[name]
    ]:
        raise BadCapture(
            changed, "the residual stream was overwritten in place after the output was added to it"
        )
