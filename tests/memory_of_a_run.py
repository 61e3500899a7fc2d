"""Not a test: one calibration of a CLIP tower of random weights, what it was planned to need beside what it took.

python tests/memory_of_a_run.py FOLDER [--width 512 --blocks 2 --tasks 3 --samples 32 --batch 16] prints one JSON object; the
peak of a process means something only in a process that does nothing else.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

import featcal
from featcal.blocks.plans import plan_for
from featcal.calibration.cost import counting
from featcal.calibration.needs import Workload, needs
from featcal.commands.model_folders import skeleton
from featcal.commands.plan import shapes
from featcal.models.save import save_model

SETTINGS = featcal.Calibration(ridge=0.05, anchor_blend=2.0, interpolation=0.3)


def model_folder(folder: Path, width: int, blocks: int, seed: int) -> Path:
    """A tower of the ViT-B/32 shape (50 tokens, MLP four times as wide) at another width and depth; written once."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=blocks, num_attention_heads=width // 64
    )
    if not folder.exists():
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            save_model(CLIPVisionModel(config), folder)
    return folder


def batches(seed: int, samples: int, batch: int):
    """Random images, each batch made when it is asked for."""
    draw = torch.Generator().manual_seed(seed)
    for start in range(0, samples, batch):
        yield {"pixel_values": torch.randn(min(batch, samples - start), 3, 224, 224, generator=draw)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name, default in (("width", 512), ("blocks", 2), ("tasks", 3), ("samples", 32), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    base, merged, *experts = (
        model_folder(asked.folder / f"{i}", asked.width, asked.blocks, seed=i) for i in range(asked.tasks + 2)
    )
    load = Workload(asked.tasks, asked.samples, asked.batch)
    planned = needs(shapes(skeleton(base), load, None, False, "float32"), load)
    data = {f"task{i}": batches(i, asked.samples, asked.batch) for i in range(asked.tasks)}
    with counting() as meter:
        featcal.calibrate(
            merged,
            base=base,
            experts={f"task{i}": folder for i, folder in enumerate(experts)},
            batches=meter.watched(data),
            settings=SETTINGS,
            out=asked.folder / "calibrated",
        )
        bare = skeleton(base)
        took = meter.cost(bare, plan_for(bare), SETTINGS)
    print(json.dumps({"planned": planned.host, "took": took.peak_host_bytes, "flops": [planned.work.total, took.flops]}))
    print(json.dumps({"phases": planned.phases, "waiting": planned.waiting} | asdict(took), indent=1))


if __name__ == "__main__":
    main()
