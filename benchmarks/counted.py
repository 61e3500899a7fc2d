"""Operations of a calibration, counted from shapes alone: the published form against the package,
whatever else the machine does.

python -m benchmarks.counted --tasks 2 --samples 32 --layers 3 --batch 32
"""

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPVisionModel

from benchmarks import plain_version
from benchmarks.measure import arguments, tower
from featcal.blocks.batches import PROVING
from featcal.blocks.plans import CLIP_VISION
from featcal.planning.meta_profiler import to_meta
from featcal.planning.shapes import ModelShape, model_shape
from featcal.planning.work import Done, Work, run_work
from featcal.settings import Calibration

SOLVED = {
    torch.ops.aten._linalg_solve_ex: lambda A, B, *_, **__: (
        2 * A[-1] ** 3 // 3 + 2 * A[-1] ** 2 * B[-1]
    )
}


def published(
    model: CLIPVisionModel, last: ModelShape, tasks: int, samples: int, layers: int
) -> int:
    """Of the published form: counted for one and for two batches of one task, from which all others
    follow.
    """

    def counted(images: int) -> int:
        with FlopCounterMode(display=False, custom_mapping=SOLVED) as counter:
            plain_version.calibrate(
                model, model, {"a": model}, {"a": pictures(images)}, Calibration()
            )
        return counter.get_total_flops()

    d = model.config.hidden_size
    one, two = counted(plain_version.BATCH), counted(2 * plain_version.BATCH)
    right = layers * (
        4 * 2 * d**3 + 2 * d * d * 4 * d + 2 * (4 * d) ** 2 * d
    )  # each task's cross moments times its weights
    behind = (
        last.blocks[-1].forward * samples * tasks // plain_version.BATCH
    )  # the pass that the published form leaves out
    return (
        (two - one) * tasks * samples // plain_version.BATCH
        + (2 * one - two)
        + (tasks - 1) * right
        - behind
    )


def pictures(count: int) -> torch.Tensor:
    """Pictures without numbers."""
    return torch.empty(count, 3, 224, 224, device="meta")


def ours(model: CLIPVisionModel, tasks: int, samples: int, batch: int) -> Work:
    """Of the package without the drift of blocks, which the published form does not measure, as it
    counts what it did.
    """
    whole, checked = shape(model, batch), shape(model, PROVING)
    return run_work(
        Done(
            {whole: tasks * samples // batch}, tasks, whole, checked, left=(whole.blocks[-1].name,)
        )
    )


def shape(model: CLIPVisionModel, batch: int) -> ModelShape:
    """What calibration meets in the model."""
    return model_shape(model, CLIP_VISION, {"pixel_values": pictures(batch)})


def main() -> None:
    args = arguments(__doc__, tasks=2, samples=32, layers=3, width=768, batch=32).parse_args()
    model = to_meta(tower(args.width, args.layers))
    theirs = published(
        model, shape(model, plain_version.BATCH), args.tasks, args.samples, args.layers
    )
    own = ours(model, args.tasks, args.samples, args.batch)
    parts = {"forwards": own.forwards, "sums over tokens": own.moments, "systems": own.systems}
    shares = ", ".join(f"{name} {part / own.total:.0%}" for name, part in parts.items())
    print(
        f"published {theirs / 1e9:.0f} G, ours {own.total / 1e9:.0f} G: {theirs / own.total:.2f}; of ours: {shares}"
    )


if __name__ == "__main__":
    main()
