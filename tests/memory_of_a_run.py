"""Not a test: one calibration of random models in folders, estimated and measured.

python tests/memory_of_a_run.py FOLDER [--family clip --width 512 --blocks 2 --tasks 3 --samples 32
--batch 16 --tokens 64
--host-memory BYTES --settings JSON] prints one JSON object; the peak of a process means something
only in a process that does nothing else.
"""

import argparse
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import torch
import transformers as tf

import featcal
from benchmarks.measure import memory
from featcal.calibration.calibrate import calibrate  # imported before the measurement
from featcal.calibration.estimate import Job, estimate, model_shape
from featcal.cli.calibrate import return_large_blocks
from featcal.cli.plan import meta_batch
from featcal.models.families import plan_for
from featcal.models.save import save_model
from featcal.models.stored import skeleton


def built(family: str, width: int, blocks: int):
    """Build ViT-B/32 (50 tokens), T5, Mixtral or Llama at another width and depth."""
    heads = width // 64
    if family == "t5":
        sizes = {"d_model": width, "d_ff": 4 * width, "num_layers": blocks, "num_heads": heads}
        return tf.T5ForConditionalGeneration(tf.T5Config(**sizes, vocab_size=8000))
    sizes = {"hidden_size": width, "num_hidden_layers": blocks, "num_attention_heads": heads}
    if family == "clip":
        return tf.CLIPVisionModel(tf.CLIPVisionConfig(**sizes, intermediate_size=4 * width))
    sizes |= {"intermediate_size": 3 * width, "num_key_value_heads": heads // 2, "vocab_size": 8000}
    if family == "mixtral":
        return tf.MixtralForCausalLM(tf.MixtralConfig(**sizes, num_local_experts=4))
    return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes))


def model_folder(folder: Path, seed: int, *shape) -> Path:
    """Written once."""
    if not folder.exists():
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            save_model(built(*shape), folder)
    return folder


def batches(seed: int, asked: argparse.Namespace):
    """Random images or texts, each batch made when it is asked for."""
    draw = torch.Generator().manual_seed(seed)
    for start in range(0, asked.samples, asked.batch):
        count = min(asked.batch, asked.samples - start)
        if asked.family == "clip":
            yield {"pixel_values": torch.randn(count, 3, 224, 224, generator=draw)}
        else:
            ids = torch.randint(2, 8000, (count, asked.tokens), generator=draw)
            yield {"input_ids": ids} | ({"decoder_input_ids": ids} if asked.family == "t5" else {})


class Files:
    """The most bytes that files below a folder had together while the `with` ran: looked at before
    each file is removed or replaced, since until then they only grow.
    """

    def __init__(self, folder: Path):
        self.folder, self.peak, self.watching = folder, 0, False
        sys.addaudithook(self.before)

    def before(self, event: str, _: tuple[object, ...]) -> None:
        if self.watching and event in {"os.remove", "os.rename", "os.truncate", "os.rmdir"}:
            self.look()

    def look(self) -> None:
        sizes = {}  # by inode: a file may have two names
        for place, _, names in os.walk(self.folder):
            for name in names:
                with suppress(FileNotFoundError):  # a thread may remove one meanwhile
                    about = os.stat(os.path.join(place, name))
                    sizes[about.st_ino] = about.st_size
        self.peak = max(self.peak, sum(sizes.values()))

    def __enter__(self) -> "Files":
        self.watching = True
        return self

    def __exit__(self, *_: object) -> None:
        self.look()
        self.watching = False


SIZES = {"width": 512, "blocks": 2, "tasks": 3, "samples": 32, "batch": 16, "tokens": 64}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", default="clip")
    parser.add_argument("--host-memory", type=int)
    parser.add_argument("--settings", type=json.loads, default={})
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    shape = asked.family, asked.width, asked.blocks
    name = "-".join(map(str, shape))
    base, merged, *experts = (
        model_folder(asked.folder / f"{name}-{i}", i, *shape) for i in range(asked.tasks + 2)
    )
    settings = featcal.Calibration(**asked.settings)
    job = Job(asked.tasks, asked.samples, asked.batch, settings, host_memory=asked.host_memory)
    tokens = None if asked.family == "clip" else asked.tokens
    model = skeleton(base)
    batch = meta_batch(model, asked.batch, tokens, False)
    needs = estimate(model_shape(model, plan_for(model), batch, settings), job)
    run = asked.folder / "run"
    run.mkdir(exist_ok=True)
    return_large_blocks()  # as the command line does
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = memory("VmRSS")
    with Files(run) as files:
        calibrate(
            merged,
            base=base,
            experts={f"task{i}": folder for i, folder in enumerate(experts)},
            batches={f"task{i}": batches(i, asked) for i in range(asked.tasks)},
            settings=settings,
            out=run / "calibrated",
            host_memory=asked.host_memory,
        )
    took = {"host": memory("VmHWM") - before, "disk": files.peak}
    estimated = {name: sum(parts.values()) for name, parts in needs.items()}
    print(json.dumps({"estimated": estimated, "took": took, "parts": needs}))


if __name__ == "__main__":
    main()
