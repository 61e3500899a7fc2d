"""Measure how time and memory of a calibration grow with samples, tasks, depth and width, next to
the memory that `featcal plan` reports.

python -m benchmarks.growth                  Writes reproduction/report/growth.json, which a page of
the book shows.
python -m benchmarks.growth --keys "layers"  Of one key alone; what the file holds of the others
stays. --clock 0: without time.

Each calibration runs in a process of its own, from folders to a folder, as the command does it. Its
time says something only on a machine that does nothing else meanwhile, and is left out with
`--clock 0`; memory does not mind neighbours.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.measure import (
    ROOT,
    SETTINGS,
    arguments,
    averaged,
    images,
    machine,
    memory,
    moved,
    tower,
)
from featcal.calibration.calibrate import calibrate
from featcal.calibration.estimate import Job, estimate, model_shape
from featcal.cli.plan import meta_batch
from featcal.files import write_json
from featcal.models.load import save_model
from featcal.models.plan import plan_for
from featcal.models.stored import skeleton

SIZES = {
    "samples": (16, 32, 64),
    "tasks": (1, 2, 4, 8),
    "layers": (2, 4, 8, 12),
    "width": (96, 192, 768),
}
BASE = {"tasks": 2, "samples": 16, "layers": 2, "width": 768, "batch": 16}  # where all series meet


def batches(task: int, args: Namespace) -> Iterator[dict[str, torch.Tensor]]:
    """Yield pictures of one task, each batch made when it is asked for."""
    for start in range(0, args.samples, args.batch):
        yield {"pixel_values": images(1000 * task + start, min(args.batch, args.samples - start))}


def run_calibration(args: Namespace, root: Path, host_memory: int | None = None) -> dict[str, Any]:
    """Run one calibration in this process and return its seconds and bytes above the imports."""
    tasks = [f"task{t}" for t in range(args.tasks)]
    before, start = memory("VmRSS"), time.perf_counter()
    calibrate(
        root / "merged",
        base=root / "base",
        experts={name: root / name for name in tasks},
        batches={name: batches(t, args) for t, name in enumerate(tasks)},
        settings=SETTINGS,
        device=args.device,
        out=root / "calibrated",
        host_memory=host_memory,
    )
    seconds = {"seconds": round(time.perf_counter() - start, 3)} if args.clock else {}
    if args.device != "cpu":
        seconds |= {"device_bytes": torch.cuda.max_memory_allocated()}
    return seconds | {"host_bytes": memory("VmHWM") - before}


def planned_bytes(args: Namespace, root: Path, host_memory: int | None = None) -> dict[str, int]:
    """Return the bytes that `featcal plan` estimates by place, from the folders' config.json."""
    options = {"on_gpu": args.device != "cpu", "host_memory": host_memory}
    job = Job(args.tasks, args.samples, args.batch, SETTINGS, **options)
    model = skeleton(root / "merged")
    batch = meta_batch(model, job.batch, None, False)
    needs = estimate(model_shape(model, plan_for(model), batch, SETTINGS), job)
    return {device: sum(parts.values()) for device, parts in needs.items()}


def write_models(args: Namespace, root: Path) -> None:
    """Write folders of a base, its experts and their average."""
    base = tower(args.width, args.layers)
    experts = {f"task{t}": moved(base, 1 + t, 0.002) for t in range(args.tasks)}
    models = {"merged": averaged(list(experts.values())), "base": base, **experts}
    for name, model in models.items():
        save_model(model, root / name)


def measured(args: Namespace, root: Path) -> dict[str, Any]:
    """Return both of one size, the calibration in a process of its own."""
    write_models(args, root)
    options = [f"--{key}={getattr(args, key)}" for key in (*BASE, "threads", "clock", "device")]
    command = [sys.executable, "-m", "benchmarks.growth", *options, f"--root={root}"]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    host = {"host_bytes": planned_bytes(args, root)["host"]}
    return {"planned": host, "took": json.loads(done.stdout.splitlines()[-1])}


def exponents(points: list[dict[str, Any]]) -> dict[str, float]:
    """Return the slopes of log(taken) over log(size) by least squares."""
    sizes, slopes = [math.log(point["size"]) for point in points], {}
    for measure in points[0]["took"]:
        values = [math.log(point["took"][measure]) for point in points]
        slopes[measure] = round(statistics.linear_regression(sizes, values).slope, 3)
    return slopes


def main() -> None:
    sizes = BASE | {
        "keys": " ".join(SIZES),
        "out": "reproduction/report/growth.json",
        "root": "",
        "clock": 1,
    }
    args = arguments(__doc__, **sizes).parse_args()
    torch.set_num_threads(args.threads)
    disable_progress_bar()
    if args.root:
        print(json.dumps(run_calibration(args, Path(args.root))))
        return
    out = ROOT / args.out
    previous = json.loads(out.read_text()) if out.exists() else {}
    about = {"machine": machine(args.device), "processors": os.cpu_count(), "base": BASE}
    assert not previous or {name: previous[name] for name in about} == about, (
        f"{out} is of another machine or base; remove it first"
    )
    series = dict(previous.get("series", {}))
    for key in args.keys.split():
        points: list[dict[str, Any]] = []
        for size in SIZES[key]:
            with tempfile.TemporaryDirectory() as root:
                points.append(
                    {"size": size} | measured(Namespace(**vars(args) | {key: size}), Path(root))
                )
            print(key, json.dumps(points[-1]), flush=True)
            if points[1:]:  # written as it comes: whoever ends this keeps what is there
                series[key] = {
                    "measured": date.today().isoformat(),
                    "points": points,
                    "exponents": exponents(points),
                }
                write_json(
                    out,
                    about | {"series": {name: series[name] for name in SIZES if name in series}},
                )
        print(key, series[key]["exponents"], flush=True)


if __name__ == "__main__":
    main()
