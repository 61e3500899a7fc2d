"""The whole calibration of a ViT-B/32 with random weights: the package against the plain version,
time and peak memory.

python -m benchmarks.calibrate               Folder to folder, a process each time; then with models
in memory. Both in turns.
python -m benchmarks.calibrate --repeats 0   Folder to folder only; --folders 0 leaves that out.
python -m benchmarks.calibrate --warm 0      Without the pair of runs before the ones that count,
where one pair takes minutes.
python -m benchmarks.calibrate --opponent published   Against the published form.
python -m benchmarks.calibrate --device cuda --tasks 8 --samples 256 --layers 12 --batch 256
The paper's size.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from functools import partial
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

Taken = dict[
    str, float
]  # clock and processor: seconds; bytes: peak of the host; device: peak of the GPU


def experiment(args: Namespace):
    """Base, merged and experts by name, and images by task."""
    base = tower(args.width, args.layers).to(args.device)
    experts = {f"task{t}": moved(base, 1 + t, 0.002) for t in range(args.tasks)}
    data = {name: images(100 + t, args.samples).to(args.device) for t, name in enumerate(experts)}
    return averaged(list(experts.values())), base, experts, data


def plain(merged, base, experts, data, opponent: str = "plain"):
    """The opponent's calibrated model."""
    with exact_products():
        return plain_version.calibrate(
            merged, base, experts, data, SETTINGS, opponent == "published"
        )


def ours(merged, base, experts, data, batch: int, **more):
    """Return our calibrated model, or the folder where `out` is given."""
    batches = {
        task: [{"pixel_values": part} for part in x.split(batch)] for task, x in data.items()
    }
    result = calibrate(
        merged, base=base, experts=experts, batches=batches, settings=SETTINGS, **more
    )
    return result.model or result.folder


def compare(args: Namespace):
    """Seconds (plain, ours) of each pair after the warm-up, models in memory. Raises:
    AssertionError unless models are alike.
    """
    given, made = experiment(args), []
    more = {"block_drift": args.opponent != "published"}  # which does not measure it either
    theirs, own = (
        partial(plain, *given, args.opponent),
        partial(ours, *given, args.batch, **more),
    )
    keeping = (lambda run=run: made.append(run()) for run in (theirs, own))
    pairs = in_turns(*keeping, args.warm + args.repeats, args.device)
    difference = max(largest_difference(*pair) for pair in zip(made[::2], made[1::2], strict=True))
    assert difference < TOLERANCE, f"the results differ by {difference:.1e}"
    return pairs[args.warm :], difference


def write_folders(args: Namespace, root: Path) -> None:
    """The experiment's models as checkpoint folders."""
    merged, base, experts, _ = experiment(args)
    for name, model in {"merged": merged, "base": base, **experts}.items():
        save_model(model, root / name)


def folder_to_folder(contestant: str, args: Namespace, root: Path) -> Taken:
    """Run one contestant here, from the folders into root/contestant: what it took beyond the
    imports and the images.
    """
    tasks = [f"task{t}" for t in range(args.tasks)]
    data = {name: images(100 + t, args.samples) for t, name in enumerate(tasks)}
    before, clock, processor = memory("VmRSS"), time.perf_counter(), time.process_time()
    if contestant == "ours":
        folders = root / "merged", root / "base", {name: root / name for name in tasks}
        ours(*folders, data, args.batch, device=args.device, out=root / contestant)
    else:
        merged, base, *rest = (
            CLIPVisionModel.from_pretrained(root / n).to(args.device)
            for n in ("merged", "base", *tasks)
        )
        given = {name: x.to(args.device) for name, x in data.items()}
        plain(
            merged, base, dict(zip(tasks, rest, strict=True)), given, args.opponent
        ).save_pretrained(root / contestant)
    synchronise(args.device)
    device = torch.cuda.max_memory_allocated() if args.device.startswith("cuda") else 0
    seconds = {"clock": time.perf_counter() - clock, "processor": time.process_time() - processor}
    return seconds | {"bytes": memory("VmHWM") - before, "device": device}


def in_a_child(contestant: str, args: Namespace, root: Path) -> Taken:
    """The same in a process of its own."""
    options = [
        f"--{name}={value}"
        for name, value in vars(args).items()
        if name not in ("contestant", "root")
    ]
    command = [
        sys.executable,
        "-m",
        "benchmarks.calibrate",
        *options,
        f"--contestant={contestant}",
        f"--root={root}",
    ]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def in_children(args: Namespace, root: Path) -> list[tuple[Taken, Taken]]:
    """What (plain, ours) took, in turns. Raises: AssertionError unless both wrote the same
    model.
    """
    write_folders(args, root)
    pairs = []
    for _ in range(args.folders):
        for name in ("plain", "ours"):
            shutil.rmtree(root / name, ignore_errors=True)
        pairs.append((in_a_child("plain", args, root), in_a_child("ours", args, root)))
        difference = largest_difference(
            *(CLIPVisionModel.from_pretrained(root / name) for name in ("plain", "ours"))
        )
        assert difference < TOLERANCE, f"the results differ by {difference:.1e}"
    return pairs


def print_folders(pairs: list[tuple[Taken, Taken]], device: str) -> None:
    """Ratios of time and of peak memory, folder to folder."""
    for field, name in (("clock", "clock"), ("processor", "processor time")):
        if field == "clock" or not device.startswith("cuda"):
            print(
                f"folder to folder, {name}, theirs / ours: {ratio([(theirs[field], own[field]) for theirs, own in pairs])}"
            )
    for field, name in (("bytes", "host memory above the imports"), ("device", "GPU memory")):
        theirs, own = (max(pair[side][field] for pair in pairs) for side in (0, 1))
        if own:
            peaks = f"{theirs / MIB:.0f} and {own / MIB:.0f} MiB"
            print(f"folder to folder, peak {name}, ours / plain: {own / theirs:.2f} ({peaks})")


def main() -> None:
    sizes = {"tasks": 2, "samples": 64, "layers": 2, "width": 768, "batch": 32}
    how = {"opponent": "plain", "warm": 1}
    args = arguments(
        __doc__, **sizes, **how, repeats=3, folders=1, contestant="", root=""
    ).parse_args()
    torch.set_num_threads(args.threads)
    disable_progress_bar()
    if args.contestant:
        print(json.dumps(folder_to_folder(args.contestant, args, Path(args.root))))
        return
    print(machine(args.device))
    print(
        f"{args.layers} blocks of {args.width} features, {args.tasks} tasks of {args.samples} images, our batch {args.batch}"
    )
    print(f"opponent: {args.opponent}")
    if args.folders:
        with tempfile.TemporaryDirectory() as root:
            print_folders(in_children(args, Path(root)), args.device)
    if args.repeats:
        pairs, difference = compare(args)
        print(
            f"models in memory, time, theirs / ours: {ratio(pairs)}; same model within {difference:.1e}"
        )


if __name__ == "__main__":
    main()
