"""Which precision is used where: products in the data's own, sums and solves in float64, TF32 nowhere.

At λ = 1e-5 the Gram matrix has a condition number near 1e6, where float32 sums cost 3e-3 of the weight.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SUM_DTYPE = torch.float64


@contextmanager
def exact_products() -> Iterator[None]:
    """Full float32 products inside the `with`, for matrix products and convolutions; the settings found are restored.

    TF32 keeps 10 bits of the mantissa. The patch embedding is a convolution, so cuDNN's own switch counts too.
    """
    matmul, conv = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = conv
