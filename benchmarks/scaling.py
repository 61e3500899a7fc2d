"""How time grows with depth, width, samples and tasks: exponents fitted on log-log axes, and a
plot.

python -m benchmarks.scaling --out scaling.png
"""

import math
import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import calibrate
from benchmarks.measure import arguments, machine

SIZES = {
    "layers": (2, 4, 8, 16),
    "width": (128, 256, 512),
    "samples": (64, 128, 256, 512),
    "tasks": (2, 4, 8, 16),
}
BOUND = 1.05  # what is claimed of the exponents of depth, samples and tasks

Seconds = tuple[float, float]  # of the plain version and of the package


def medians(args: Namespace, key: str, sizes: Sequence[int]) -> dict[int, Seconds]:
    """Median seconds of both at each size of one key; equal results are asserted at each."""
    seconds = {}
    for size in sizes:
        pairs, _ = calibrate.compare(Namespace(**(vars(args) | {key: size})))
        plain, ours = zip(*pairs, strict=True)
        seconds[size] = statistics.median(plain), statistics.median(ours)
    return seconds


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of log(value) over log(size) by least squares."""
    x, y = [math.log(s) for s in sizes], [math.log(v) for v in values]
    return statistics.linear_regression(x, y).slope


def exponents(seconds: Mapping[int, Seconds]) -> Seconds:
    """Exponents of the plain version and of the package."""
    plain, ours = zip(*seconds.values(), strict=True)
    return exponent(list(seconds), plain), exponent(list(seconds), ours)


def plot(seconds: Mapping[str, Mapping[int, Seconds]], title: str, out: str | Path) -> None:
    """One panel per key: time over its smallest size's time of the package, both axes
    logarithmic.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(seconds), 3.2), layout="constrained")
    for axis, (key, times) in zip(
        figure.subplots(1, len(seconds), squeeze=False)[0], seconds.items(), strict=True
    ):
        unit = next(iter(times.values()))[1]
        for index, (label, marker) in enumerate((("plain version", "s--"), ("featcal", "o-"))):
            values = [pair[index] / unit for pair in times.values()]
            axis.loglog(
                list(times), values, marker, label=f"{label}: {key}^{exponents(times)[index]:.2f}"
            )
        axis.set_xticks(list(times), [str(size) for size in times], minor=False)
        axis.minorticks_off()
        axis.set(xlabel=key, ylabel="time / featcal's at the smallest size")
        axis.legend(fontsize="small")
    figure.suptitle(title, fontsize="small")
    figure.savefig(out, dpi=150)


def main() -> None:
    sizes = {
        "tasks": 2,
        "samples": 64,
        "layers": 2,
        "width": 256,
        "batch": 32,
        "opponent": "plain",
        "warm": 1,
    }
    args = arguments(
        __doc__, **sizes, repeats=3, keys=" ".join(SIZES), out="scaling.png"
    ).parse_args()
    torch.set_num_threads(args.threads)
    print(machine(args.device))
    seconds = {}
    for key in args.keys.split():
        sizes = SIZES[key]
        seconds[key] = medians(args, key, sizes)
        plain, ours = exponents(seconds[key])
        claim = "" if key == "width" else f" (claimed: at most {BOUND})"
        growth = ", ".join(
            f"{size}: {pair[1] / seconds[key][sizes[0]][1]:.2f}"
            for size, pair in seconds[key].items()
        )
        print(
            f"{key:8s} exponent {ours:.2f}{claim}, plain version {plain:.2f};  growth {growth}",
            flush=True,
        )
    plot(seconds, machine(args.device), args.out)
    print(f"plot: {args.out}")


if __name__ == "__main__":
    main()
