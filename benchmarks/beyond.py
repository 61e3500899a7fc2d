"""Time what goes beyond the paper against the paper's method on the same data, in turns.

python -m benchmarks.beyond                  Two blocks of ViT-B/32's shape with random weights, two
tasks of 64 images.
"""

from argparse import Namespace
from typing import Any

import torch

from benchmarks.calibrate import experiment
from benchmarks.measure import arguments, in_turns, machine, ratio
from featcal.calibration.calibrate import calibrate
from featcal.calibration.choose import STREAM
from featcal.settings import Calibration

PAPER = Calibration()
VARIANTS: dict[str, dict[str, Any]] = {
    "residual": {"residual": 1.0},
    "sites": {"order": "sites"},
    "joint": {"affine": "joint"},
    "prior": {"prior": 0.1},
}


def variants() -> dict[str, Calibration]:
    """Every idea alone, and all that a candidate of the preset auto combines."""
    return {name: PAPER.but(**change) for name, change in VARIANTS.items()} | {"stream": STREAM}


def runs(args: Namespace, settings: Calibration):
    """One calibration, as a function without arguments."""
    merged, base, experts, data = experiment(args)
    batches = {
        task: [{"pixel_values": part} for part in x.split(args.batch)] for task, x in data.items()
    }
    return lambda: calibrate(merged, base=base, experts=experts, batches=batches, settings=settings)


def main() -> None:
    sizes = {"tasks": 2, "samples": 64, "layers": 2, "width": 768, "batch": 32}
    args = arguments(__doc__, **sizes, repeats=3).parse_args()
    torch.set_num_threads(args.threads)
    print(machine(args.device))
    paper = runs(args, PAPER)
    for name, settings in variants().items():
        pairs = in_turns(runs(args, settings), paper, args.repeats, args.device)
        print(f"{name}: time {ratio(pairs)}", flush=True)


if __name__ == "__main__":
    main()
