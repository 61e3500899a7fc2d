"""Which precision is used where: products in the data's own, sums and solves in float64, TF32
nowhere.

At λ = 1e-5 the Gram matrix has a condition number near 1e6, where float32 sums cost 3e-3 of the
weight.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

SUM_DTYPE = torch.float64
HALF = (torch.bfloat16, torch.float16)


def wide(x: Tensor) -> Tensor:
    """Half precision as float32, which holds its numbers and the products of two of them; anything
    else as it is.
    """
    return x.float() if x.dtype in HALF else x


def product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product a b in float32, or in float64 where the factors are.

    A GPU multiplies half precision as it is, on its tensor cores, and adds in float32: as exact as
    widening both, but faster.
    """
    if a.is_cuda and a.dtype == b.dtype and a.dtype in HALF:
        return torch.mm(a, b, out_dtype=torch.float32)
    return wide(a) @ wide(b)


@contextmanager
def exact_products() -> Iterator[None]:
    """Full float32 products inside the `with`, for matrix products and convolutions; the settings
    found are restored.

    TF32 keeps 10 bits of the mantissa. The patch embedding is a convolution, so cuDNN's own switch
    counts too.
    """
    matmul, conv = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = conv
