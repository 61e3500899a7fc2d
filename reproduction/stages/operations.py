"""Floating point operations that really ran: products, attention, convolutions, factorisations,
triangular solutions.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

ATEN = torch.ops.aten
LEFT_OUT: dict[Any, Callable[..., int]] = {  # by torch's own registry
    ATEN.addmm_: lambda _, left, right: 2 * left.shape[0] * left.shape[1] * right.shape[1],
    ATEN.linalg_cholesky_ex: lambda left, *_: len(left) ** 3 // 3,
    ATEN.linalg_solve_triangular: lambda left, right, *_: len(left) ** 2 * right.shape[1],
    ATEN._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_: sdpa_flop_count(
        q.shape, k.shape, v.shape
    ),
}


class CountedOperations(TorchDispatchMode):
    """Counts inside the `with`, 2 for one multiplication and addition; what is computed stays the
    same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        out = func(*args, **given)
        kind, of = func._overloadpacket, args[0] if args else None
        if isinstance(of, torch.Tensor) and not of.is_meta:  # a tensor without numbers is no work
            if kind in LEFT_OUT:
                self.flops += LEFT_OUT[kind](*args)
            elif kind in flop_registry:
                self.flops += int(flop_registry[kind](*args, **given, out_val=out))
        return out
