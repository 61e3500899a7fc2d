"""Measure how much longer `featcal calibrate` takes next to one and three calibrations of
its kind than alone.

python -m benchmarks.neighbours              Two blocks of ViT-B/32's shape. --policies passive: as
the command runs, alone.

The neighbours are calibrations too, begun again until the one that is measured has ended. Beside k
of them a job that would take the whole machine is left the share 1/(k + 1) of it: it should take k
+ 1 times as long, and 20 % more at most.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from transformers import CLIPImageProcessor
from transformers.utils.logging import disable_progress_bar

from benchmarks.calibrate import ROOT, write_folders
from benchmarks.measure import arguments, images, machine

BOUND = 1.2  # of the slow-down over k + 1
# what a job's environment says; without anything the command itself has waiting threads sleep
POLICIES = {
    "passive": {},
    "spinning": {"OMP_WAIT_POLICY": "ACTIVE", "KMP_BLOCKTIME": "200"},
    "pinned": {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"},
}
ABOUT_THREADS = (
    "OMP_",
    "KMP_",
    "MKL_",
    "GOMP_",
)  # variables that a job must find as they are here, not where this is started


def prepare(args: Namespace, root: Path) -> None:
    """Models and pictures as the command takes them."""
    from PIL import Image

    write_folders(args, root)
    for name in ("merged", "base"):
        CLIPImageProcessor().save_pretrained(root / name)
    for t in range(args.tasks):
        folder = root / f"pictures{t}" / "train" / "all"
        folder.mkdir(parents=True)
        for number, picture in enumerate(images(100 + t, args.samples)):
            values = (picture.clamp(-2, 2) + 2) * 63
            Image.fromarray(values.permute(1, 2, 0).byte().numpy()).save(
                folder / f"{number:04d}.png"
            )


def job(
    args: Namespace, root: Path, out: Path, policy: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """One calibration, begun."""
    words = [
        "--base",
        "base",
        "--merged",
        "merged",
        "--out",
        str(out),
        "--force",
        "--samples",
        str(args.samples),
    ]
    for t in range(args.tasks):
        words += ["--expert", f"task{t}=task{t}", "--data", f"task{t}=pictures{t}"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ABOUT_THREADS)}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "featcal", "--quiet", "calibrate", *words]
    return subprocess.Popen(
        command, cwd=root, env=kept | {"PYTHONPATH": path} | policy, stdout=subprocess.DEVNULL
    )


@contextmanager
def neighbours(
    count: int, args: Namespace, root: Path, policy: Mapping[str, str]
) -> Iterator[None]:
    """Inside, so many other jobs are always at work."""
    over = threading.Event()

    def again(number: int) -> None:
        while not over.is_set():
            running = job(args, root, root / f"neighbour{number}", policy)
            while running.poll() is None and not over.wait(0.05):
                pass
            if running.poll() is None:
                running.kill()
            code = running.wait()
            assert over.is_set() or code == 0, f"a neighbour ended with exit code {code}"

    threads = [threading.Thread(target=again, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def measured(
    count: int, args: Namespace, root: Path, policy: Mapping[str, str]
) -> tuple[float, str]:
    """Seconds of one job next to others, and the digest of the weights that it wrote."""
    with neighbours(count, args, root, policy):
        start = time.perf_counter()
        code = job(args, root, root / "measured", policy).wait()
        seconds = time.perf_counter() - start
    assert code == 0, f"the job ended with exit code {code}"
    return seconds, hashlib.sha256(
        (root / "measured" / "model.safetensors").read_bytes()
    ).hexdigest()


def slow_downs(args: Namespace, root: Path) -> Iterator[tuple[str, int, float]]:
    """Policy, number of neighbours, and how many times as long as alone. Raises: AssertionError
    unless all wrote the same.
    """
    _, first = measured(0, args, root, {})  # the warm-up: files are read from memory from here on
    for name in args.policies.split():
        alone = 0.0
        for count in (0, *map(int, args.next_to.split())):
            seconds, digest = measured(count, args, root, POLICIES[name])
            assert digest == first, "the results differ"
            if count:
                yield name, count, seconds / alone
            else:
                alone = seconds


def main() -> None:
    sizes = {"tasks": 1, "samples": 32, "layers": 2, "width": 768}
    args = arguments(__doc__, **sizes, policies=" ".join(POLICIES), next_to="1 3").parse_args()
    disable_progress_bar()
    print(f"{machine(args.device)}; {os.cpu_count()} processors", flush=True)
    with tempfile.TemporaryDirectory() as root:
        prepare(args, Path(root))
        for name, count, ratio in slow_downs(args, Path(root)):
            share = f"{ratio / (count + 1):.2f} of what the share allows (asked: at most {BOUND})"
            print(
                f"{name}, next to {count}: {ratio:.2f} times as long as alone, {share}", flush=True
            )


if __name__ == "__main__":
    main()
