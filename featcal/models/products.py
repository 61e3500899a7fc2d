"""Float32 matrix products of a process by oneDNN instead of MKL; both are inside torch, which asks
MKL.

MKL keeps its widest instructions for Intel's processors, where it takes half of oneDNN's time;
elsewhere oneDNN uses those it finds (benchmarks/products.py). The change is made below autograd, at
the operators mm and addmm, so that forward passes, gradients and Gram matrices are all concerned.

oneDNN adds all terms of a sum one after the other. MKL cuts long sums into pieces, which rounds
less: over 2,000 tokens by a factor of three, enough to cost a Gram matrix its Cholesky factor. Here
they are cut as MKL does where this was measured (an AMD EPYC), and products were then the same
bits.
"""

import platform
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

# From which on oneDNN was the faster one: sides of a product, and multiplications for each piece of
# its sums and each thread.
NARROWEST, SMALLEST = 32, 2**22
PIECE = 192  # terms added at a time


def faster_products() -> AbstractContextManager[None]:
    """Inside the `with`, float32 products on a CPU are of the library that is made for its
    processor.
    """
    return nullcontext() if made_by_intel() else onednn_products()


def made_by_intel() -> bool:
    """Whether the processor is Intel's, as the system tells."""
    told = Path("/proc/cpuinfo")
    return "GenuineIntel" in (told.read_text() if told.is_file() else platform.processor())


@contextmanager
def onednn_products() -> Iterator[None]:
    """Inside the `with`, float32 products on a CPU are oneDNN's, in all threads; a torch built
    without it is left as it is.
    """
    if not torch.backends.mkldnn.is_available():
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of any override, and this one is meant
        library.impl("mm", _mm, "CPU", allow_override=True)
        library.impl("addmm", _addmm, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()  # the public way is to wait until the object is collected


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """a b of a (n, d) and b (d, o)."""
    if _fits(a, b):
        return _linear(a, b, None)
    return torch.ops.aten.mm.out(
        a, b, out=a.new_empty(a.shape[0], b.shape[1])
    )  # torch's own: `out` is another operator


def _addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta c + alpha a b, of which a linear with its bias c (o,) is oneDNN's own case."""
    if beta == alpha == 1 and c.dtype == torch.float32 and c.shape == b.shape[1:] and _fits(a, b):
        return _linear(a, b, c)
    return torch.ops.aten.addmm.out(
        c, a, b, beta=beta, alpha=alpha, out=a.new_empty(a.shape[0], b.shape[1])
    )


def _fits(a: Tensor, b: Tensor) -> bool:
    """Whether a b is for oneDNN: float32, and neither small nor narrow."""
    (n, d), o = a.shape, b.shape[1]
    if not a.dtype == b.dtype == torch.float32 or min(n, d, o) < NARROWEST:
        return False
    return n * d * o >= SMALLEST * len(pieces(d)) * torch.get_num_threads()


def _linear(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """a b + bias, its sums in pieces."""
    whole: Tensor | None = None
    for start, end in pieces(a.shape[1]):
        left, right = _dense(a[:, start:end]), _dense(b[start:end]).t()
        part = torch.ops.mkldnn._linear_pointwise(
            left, right, bias if whole is None else None, "none", [], ""
        )
        whole = part if whole is None else whole.add_(part)
    assert whole is not None  # a product here has terms
    return whole


def pieces(d: int) -> list[tuple[int, int]]:
    """First and last term (excluded) of the pieces of a sum of d: halves of up to twice PIECE, and
    from there on PIECE each.
    """
    size = PIECE if d >= 2 * PIECE else d if d <= PIECE else (d + 1) // 2
    return [(start, min(start + size, d)) for start in range(0, d, size)]


def _dense(x: Tensor) -> Tensor:
    """x, or a copy where x has gaps between its rows and between its columns: over those oneDNN
    took a thousand times as long.
    """
    return x if x.is_contiguous() or x.t().is_contiguous() else x.contiguous()
