"""The whole calibration of a ViT-B/32 with random weights: the package against the plain version, time and peak memory.

python -m benchmarks.calibrate               Folder to folder, a process for each; then in turns with models in memory.
python -m benchmarks.calibrate --repeats 0   Folder to folder only.
python -m benchmarks.calibrate --device cuda --tasks 8 --samples 256 --layers 12       The paper's size.
"""

import json
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

import torch
from transformers import CLIPVisionModel
from transformers.utils.logging import disable_progress_bar

from benchmarks import plain_version
from benchmarks.block import SETTINGS, TOLERANCE
from benchmarks.measure import (
    MIB,
    arguments,
    averaged,
    images,
    in_turns,
    largest_difference,
    machine,
    memory,
    moved,
    ratio,
    synchronise,
    tower,
)
from featcal.calibration.calibrate import calibrate
from featcal.core.precision import exact_products
from featcal.models.save import save_model

ROOT = Path(__file__).parents[1]


def experiment(args: Namespace):
    """Base, merged and experts by name, and images by task."""
    base = tower(args.width, args.layers).to(args.device)
    experts = {f"task{t}": moved(base, 1 + t, 0.002) for t in range(args.tasks)}
    data = {name: images(100 + t, args.samples).to(args.device) for t, name in enumerate(experts)}
    return averaged(list(experts.values())), base, experts, data


def plain(merged, base, experts, data):
    """The plain version's calibrated model."""
    with exact_products():
        return plain_version.calibrate(merged, base, experts, data, SETTINGS)


def ours(merged, base, experts, data, batch: int, **more):
    """The package's calibrated model, or the folder with `out`."""
    batches = {task: [{"pixel_values": part} for part in x.split(batch)] for task, x in data.items()}
    result = calibrate(merged, base=base, experts=experts, batches=batches, settings=SETTINGS, **more)
    return result.model or result.folder


def compare(args: Namespace):
    """Seconds (plain, ours) of each pair, models in memory. Raises: AssertionError unless both give the same model."""
    given = experiment(args)
    difference = largest_difference(plain(*given), ours(*given, args.batch))
    assert difference < TOLERANCE, f"the results differ by {difference:.1e}"
    return in_turns(lambda: plain(*given), lambda: ours(*given, args.batch), args.repeats, args.device), difference


def write_folders(args: Namespace, root: Path) -> None:
    """The experiment's models as checkpoint folders."""
    merged, base, experts, _ = experiment(args)
    for name, model in {"merged": merged, "base": base, **experts}.items():
        save_model(model, root / name)


def folder_to_folder(contestant: str, args: Namespace, root: Path) -> dict[str, float]:
    """Run one contestant here, from the folders into root/contestant: seconds, and peak bytes above what the imports hold."""
    tasks = [f"task{t}" for t in range(args.tasks)]
    data = {name: images(100 + t, args.samples) for t, name in enumerate(tasks)}
    before, start = memory("VmRSS"), time.perf_counter()
    if contestant == "ours":
        folders = root / "merged", root / "base", {name: root / name for name in tasks}
        ours(*folders, data, args.batch, device=args.device, out=root / contestant)
    else:
        merged, base, *rest = (CLIPVisionModel.from_pretrained(root / n).to(args.device) for n in ("merged", "base", *tasks))
        given = {name: x.to(args.device) for name, x in data.items()}
        plain(merged, base, dict(zip(tasks, rest, strict=True)), given).save_pretrained(root / contestant)
    synchronise(args.device)
    device = torch.cuda.max_memory_allocated() if args.device.startswith("cuda") else 0
    return {"seconds": time.perf_counter() - start, "bytes": memory("VmHWM") - before, "device": device}


def in_children(args: Namespace, root: Path) -> tuple[dict[str, float], dict[str, float]]:
    """What plain and ours took, a process for each. Raises: AssertionError unless both wrote the same model."""
    write_folders(args, root)
    options = [f"--{name}={value}" for name, value in vars(args).items() if name not in ("contestant", "root")]
    taken = []
    for name in ("plain", "ours"):
        command = [sys.executable, "-m", "benchmarks.calibrate", *options, f"--contestant={name}", f"--root={root}"]
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        taken.append(json.loads(done.stdout.splitlines()[-1]))
    difference = largest_difference(*(CLIPVisionModel.from_pretrained(root / name) for name in ("plain", "ours")))
    assert difference < TOLERANCE, f"the results differ by {difference:.1e}"
    return taken[0], taken[1]


def main() -> None:
    options = {"tasks": 2, "samples": 64, "layers": 2, "width": 768, "batch": 64, "repeats": 2, "contestant": "", "root": ""}
    args = arguments(__doc__, **options).parse_args()
    torch.set_num_threads(args.threads)
    disable_progress_bar()
    if args.contestant:
        print(json.dumps(folder_to_folder(args.contestant, args, Path(args.root))))
        return
    print(machine(args.device))
    print(f"{args.layers} blocks of {args.width} features, {args.tasks} tasks of {args.samples} images, our batch {args.batch}")
    with tempfile.TemporaryDirectory() as root:
        theirs, own = in_children(args, Path(root))
    print(f"folder to folder, time, plain / ours: {theirs['seconds'] / own['seconds']:.2f}x (once)")
    for field, name in (("bytes", "host memory above the imports"), ("device", "GPU memory")):
        if own[field]:
            peaks = f"{theirs[field] / MIB:.0f} and {own[field] / MIB:.0f} MiB"
            print(f"folder to folder, peak {name}, ours / plain: {own[field] / theirs[field]:.2f} ({peaks})")
    if args.repeats:
        pairs, difference = compare(args)
        print(f"models in memory, time, plain / ours: {ratio(pairs)}; same model within {difference:.1e}")


if __name__ == "__main__":
    main()
