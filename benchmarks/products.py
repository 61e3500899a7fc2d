"""Float32 matrix products on a CPU: MKL's, which torch asks, against oneDNN's, which workers and
commands ask for.

python -m benchmarks.products                Both must give the same product within TOLERANCE, or
the run stops.
"""

import torch

from benchmarks.measure import arguments, in_turns, machine, ratio, seeded
from featcal.models.products import onednn_products

SHAPES = {  # rows, terms of every sum, columns
    "tokens through a linear of 192": (4250, 192, 192),
    "tokens into an MLP of 768": (4096, 768, 3072),
    "tokens out of an MLP of 3072": (4096, 3072, 768),
    "Gram matrix of 768 features": (768, 4096, 768),
}
TOLERANCE = 1e-5  # relative, of the whole product


def compare(shape: tuple[int, int, int], repeats: int) -> tuple[list[tuple[float, float]], float]:
    """Seconds (MKL, oneDNN) of each pair, and how far the products lie apart. Raises:
    AssertionError above TOLERANCE.
    """
    n, d, o = shape
    x, W = torch.randn(n, d, generator=seeded(0)), torch.randn(o, d, generator=seeded(1))

    def plain() -> torch.Tensor:
        return x @ W.T

    def ours() -> torch.Tensor:
        with onednn_products():
            return x @ W.T

    expected = plain()
    difference = float((ours() - expected).norm() / expected.norm())
    assert difference < TOLERANCE, f"the results differ by {difference:.1e}"
    return in_turns(plain, ours, repeats), difference


def main() -> None:
    args = arguments(__doc__, repeats=9).parse_args()
    torch.set_num_threads(args.threads)
    print(machine("cpu"))
    for name, shape in SHAPES.items():
        pairs, difference = compare(shape, args.repeats)
        print(f"{name}: same product within {difference:.1e}; time, MKL / oneDNN: {ratio(pairs)}")


if __name__ == "__main__":
    main()
