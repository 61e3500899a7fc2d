"""Time a calibration of ViT-B/32's shape with random weights against the method's published form.

python -m benchmarks.speed                   Measure every row and write reproduction/report/speed.csv,
which the book shows. Takes about 15 minutes on an idle machine with two cores.
python -m benchmarks.speed --rows "2 x 32;8 x 8" --threads 1
python -m benchmarks.speed --device cuda     The rows of a GPU instead: all twelve blocks against the
published form, float32 against bfloat16, and planned against used memory.

Both run in turns, with models in memory, and must give the same model. A run during which other
processes used the processors is not counted. A row ends once its last three ratios lie within 10 %,
or with its time.
"""

import csv
import os
import re
import statistics
import subprocess
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import growth, published
from benchmarks.measure import (
    ROOT,
    SETTINGS,
    arguments,
    averaged,
    images,
    largest_difference,
    machine,
    moved,
    tower,
)
from featcal.calibration.calibrate import calibrate
from featcal.core.precision import exact_products

TOLERANCE = (
    1e-4  # relative, of every parameter: float32 sums and solves cost the published form that
)
BUSY = 0.05  # share of the processors; with more for other processes no ratio is stated
PAIRS, SPREAD = 3, 0.1  # a row ends once the ratios of its last pairs lie so near to each other
OUT = ROOT / "reproduction/report/speed.csv"
KEYS = ("row", "instruction set", "threads", "products")  # a new measurement replaces the old one
COLUMNS = ("row", "ratio", "low", "high", "pairs", *KEYS[1:], "commit", "date")


@dataclass(frozen=True)
class Row:
    """Tasks, samples of each task, blocks, and seconds for all pairs; at least one is run."""

    tasks: int
    samples: int
    layers: int
    seconds: float


ROWS = {
    "8 x 8": Row(8, 8, 2, 110),
    "2 x 32": Row(2, 32, 3, 110),
    "2 x 256": Row(2, 256, 2, 250),
    "8 x 256": Row(8, 256, 2, 300),
}
GPU = {"8 x 256, 12 blocks": Row(8, 256, 12, 40)}
BFLOAT16, MEMORY = "float32 / bfloat16", "planned / used memory"  # further rows of a GPU


def experiment(row: Row, width: int, device: str, dtype: torch.dtype):
    """Return merged, base, experts by name, and images by task."""
    base = tower(width, row.layers).to(device, dtype)
    experts = {f"task{t}": moved(base, 1 + t, 0.002) for t in range(row.tasks)}
    data = {name: images(100 + t, row.samples).to(device, dtype) for t, name in enumerate(experts)}
    return averaged(list(experts.values())), base, experts, data


def contestants(
    row: Row, args: Namespace, dtype: torch.dtype = torch.float32
) -> list[Callable[[], Any]]:
    """Return the published form and the package as functions that return a calibrated model."""
    merged, base, experts, data = experiment(row, args.width, args.device, dtype)
    batches = {t: [{"pixel_values": part} for part in x.split(args.batch)] for t, x in data.items()}

    def theirs():
        with exact_products():
            return published.calibrate(merged, base, experts, data, SETTINGS)

    def ours():
        given = {"base": base, "experts": experts, "batches": batches, "settings": SETTINGS}
        return calibrate(merged, **given, block_drift=False).model  # nor does theirs measure it

    return [theirs, ours]


def machine_seconds() -> float:
    """Return the processor time that all processes have used, 0 where the system does not say."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _wait, *interrupts = map(int, stat.read_text().split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def timed(run: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return a result, its seconds, and the share of the processors that others used meanwhile."""
    start, own, everyone = time.perf_counter(), time.process_time(), machine_seconds()
    result = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds, own = time.perf_counter() - start, time.process_time() - own
    others = (machine_seconds() - everyone - own) / (seconds * (os.cpu_count() or 1))
    return result, seconds, others


def measured(
    runs: Sequence[Callable[[], Any]], seconds: float, tolerance: float | None = TOLERANCE
) -> list[float]:
    """Return the time of the first run over that of the second in the last pairs, at most three.

    tolerance: of the models' relative difference; None: they are not compared.
    Raises: AssertionError if the models differ.
    """
    ratios, start, longest = list[float](), time.monotonic(), 0.0
    while time.monotonic() + longest < start + seconds or not longest:
        began = time.monotonic()
        (one, theirs, busy), (two, own, more) = timed(runs[0]), timed(runs[1])
        longest = max(longest, time.monotonic() - began)
        if tolerance is not None:
            difference = largest_difference(one, two)
            assert difference < tolerance, f"the results differ by {difference:.1e}"
        if max(busy, more) < BUSY:
            ratios.append(theirs / own)
        last = ratios[1:][-PAIRS:]  # the first pair warms up
        if len(last) == PAIRS and max(last) - min(last) < SPREAD * statistics.median(last):
            break
    return (ratios[1:] or ratios)[-PAIRS:]


def planned_over_used(row: Row, args: Namespace) -> float:
    """Return the GPU memory that the plan of a calibration of folders states, over what it takes."""
    sizes = {"width": args.width, "batch": args.batch, "device": args.device, "clock": 0}
    size = Namespace(tasks=row.tasks, samples=row.samples, layers=row.layers, **sizes)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with TemporaryDirectory() as root:
        growth.write_models(size, Path(root))
        used = growth.taken(size, Path(root))["device_bytes"]
        return growth.planned(size, Path(root))["device"] / used


def products() -> str:
    """Return the library that torch multiplies matrices with."""
    found = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return found[1] if found else "unknown"


def written(name: str, found: list[float], args: Namespace, out: Path) -> dict[str, str]:
    """Add a row to the results, in the place of an earlier one of the same kind, and return it."""
    on_gpu = args.device.startswith("cuda")
    chip = torch.cuda.get_device_name() if on_gpu else torch.backends.cpu.get_cpu_capability()
    values = [name, *(f"{f(found):.2f}" for f in (statistics.median, min, max)), len(found)]
    values += [chip, torch.get_num_threads(), "cublas" if on_gpu else products(), args.commit]
    own = dict(zip(COLUMNS, map(str, [*values, date.today()]), strict=True))
    with out.open(newline="") if out.exists() else open(os.devnull) as file:
        kept = [r for r in csv.DictReader(file) if any(r[key] != own[key] for key in KEYS)]
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        order = [*ROWS, *GPU, BFLOAT16, MEMORY]
        writer.writerows(sorted([*kept, own], key=lambda r: (order.index(r["row"]), *r.values())))
    return own


def ratios_of(name: str, args: Namespace) -> list[float]:
    """Return the ratios of one row."""
    if name in ROWS:
        return measured(contestants(ROWS[name], args), ROWS[name].seconds)
    ((full, row),) = GPU.items()
    if name == MEMORY:
        return [planned_over_used(row, args)]
    exact = contestants(row, args)
    if name == full:
        return measured(exact, row.seconds)
    half = contestants(row, args, torch.bfloat16)
    return measured([exact[1], half[1]], row.seconds, tolerance=None)


def main() -> None:
    options = {"rows": "", "width": 768, "batch": 32, "out": str(OUT)}
    args = arguments(__doc__, **options, threads=min(2, os.cpu_count() or 1)).parse_args()
    torch.set_num_threads(args.threads)
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    args.commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    print(machine(args.device))
    print(f"{torch.backends.cpu.get_cpu_capability()}, products by {products()}")
    _, _, others = timed(lambda: time.sleep(3))
    print(f"other processes use {others:.0%} of the processors")
    if others > BUSY:
        raise SystemExit(f"No ratio is stated above {BUSY:.0%}: end other work and start again.")
    known = [*ROWS] if args.device == "cpu" else [*GPU, BFLOAT16, MEMORY]
    rows = args.rows.split(";") if args.rows else known
    if unknown := set(rows) - set(known):
        raise SystemExit(f"no row {', '.join(sorted(unknown))}; rows: {'; '.join(known)}")
    for name in rows:
        found = ratios_of(name, args)
        if not found:
            print(f"{name}: no ratio, as other processes used the processors", flush=True)
            continue
        own = written(name, found, args, Path(args.out))
        wide = float(own["high"]) - float(own["low"]) > SPREAD * float(own["ratio"])
        remark = "; the spread is above 10 %" if wide else "; one pair" * (len(found) == 1)
        print(f"{name}: {own['ratio']} ({own['low']} to {own['high']}){remark}", flush=True)


if __name__ == "__main__":
    main()
