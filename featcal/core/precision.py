"""Precision, decided in one place: products in the data's own, sums and solves in float64, no TF32.

At λ = 1e-5 the Gram matrix's condition number is near 1e6: float32 sums would be off by 0.3 %.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

SUM_DTYPE = torch.float64
FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
HALF = (torch.bfloat16, torch.float16)


def wide(x: Tensor) -> Tensor:
    """Return half precision as float32, which holds its values and their products; others as is."""
    return x.float() if x.dtype in HALF else x


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a b in float32, or in float64 if the factors are float64."""
    if a.is_cuda and a.dtype == b.dtype and a.dtype in HALF:  # on tensor cores as exact, and faster
        return torch.mm(a, b, out_dtype=torch.float32)
    return wide(a) @ wide(b)


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute matrix products and convolutions in full float32 inside the `with`.

    TF32 keeps 10 bits of the mantissa; the patch embedding, a convolution, has cuDNN's own switch.
    A caller's autocast would round sums, and no tensor made in its inference mode can be changed.
    """
    backends: Any = torch.backends
    cuda, mkldnn, cudnn = backends.cuda, backends.mkldnn, backends.cudnn
    exact: list[tuple[Any, str, Any]] = [(cudnn, "allow_tf32", False)]
    if hasattr(cuda.matmul, "fp32_precision"):  # since torch 2.9, in place of the older ones
        parts = cuda.matmul, mkldnn.matmul, mkldnn.conv, cudnn.conv, cudnn.rnn
        exact += [(part, "fp32_precision", "ieee") for part in parts]
    older = "highest"
    with suppress(RuntimeError):  # torch refuses to read older ones where newer ones differ
        older = torch.get_float32_matmul_precision()
    cpu, gpu = (torch.autocast(kind, enabled=False) for kind in ("cpu", "cuda"))
    on_cpu = torch.get_default_device().type == "cpu"  # a caller's other one is not for our sums
    device = nullcontext() if on_cpu else torch.device("cpu")
    grads = torch.is_grad_enabled()  # inference_mode(False) alone turns them on
    eager = torch.compiler.set_stance("force_eager")  # compiled modules lose what hooks note
    with ExitStack() as restored:  # from the last callback to the first
        for part, name, _ in reversed(exact):
            with suppress(RuntimeError):
                restored.callback(setattr, part, name, getattr(part, name))
        restored.callback(torch.set_float32_matmul_precision, older)
        torch.set_float32_matmul_precision("highest")
        for part, name, value in exact:
            setattr(part, name, value)
        with cpu, gpu, device, eager, torch.inference_mode(False), torch.set_grad_enabled(grads):
            yield
