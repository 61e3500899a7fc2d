"""The shares of a calibration's time by torch operation: python -m benchmarks.shares "2 x 32"

Each operation that torch dispatches is timed. Prints Markdown: shares of the whole time in percent.
"""

import sys
import time
from argparse import Namespace
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.measure import machine
from benchmarks.speed import ROWS, contestants

PRODUCTS = {"mm", "addmm", "addmm_", "mv", "bmm"}
FACTORS = {"linalg_cholesky_ex", "linalg_solve_triangular"}
KINDS = (
    "linears of the forwards",
    "Gram and cross moments",
    "patch embedding",
    "attention, norms, activations and other float32",
    "float64: products with the sums",
    "float64: factors and triangular solves",
    "float64: adding, clearing and copying the sums",
)


class Shares(TorchDispatchMode):
    """Add up the seconds of every kind of operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = Counter[str]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        start = time.perf_counter()
        result = function(*args, **(kwargs or {}))
        seconds = time.perf_counter() - start
        leaves = tree_leaves((args, kwargs, result))
        exact = any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in leaves)
        self.seconds[kind(function.overloadpacket.__name__, exact)] += seconds
        return result


def kind(name: str, exact: bool) -> str:
    """Return the kind of an operation; of float32 products, linears with a bias are `addmm`."""
    linears, moments, patches, other, products, factors, sums = KINDS
    if exact:
        return products if name in PRODUCTS else factors if name in FACTORS else sums
    if name == "convolution":
        return patches
    return linears if name == "addmm" else moments if name == "mm" else other


def main() -> None:
    torch.set_num_threads(2)
    print(machine("cpu"), torch.backends.cpu.get_cpu_capability())
    names, columns = sys.argv[1:] or list(ROWS), []
    for name in names:
        args = Namespace(width=768, batch=32, device="cpu")
        run_package = contestants(ROWS[name], args)[1]
        if ROWS[name].samples < 256:
            run_package()  # warm up
        start = time.perf_counter()
        with Shares() as shares:
            run_package()
        total = time.perf_counter() - start
        columns.append([f"{shares.seconds[k] / total:.0%}" for k in KINDS])
        columns[-1] += [f"{1 - shares.seconds.total() / total:.0%}", f"{total:.1f} s"]
    print("| | " + " | ".join(names) + " |\n|---|" + "--:|" * len(names))
    for row in zip([*KINDS, "between operations", "whole"], *columns, strict=True):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
