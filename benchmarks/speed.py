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

    def run_published():
        with exact_products():
            return published.calibrate(merged, base, experts, data, SETTINGS)

    def run_package():
        options = {"base": base, "experts": experts, "batches": batches, "settings": SETTINGS}
        return calibrate(merged, **options, block_drift=False).model  # nor does theirs measure it

    return [run_published, run_package]


def machine_seconds() -> float:
    """Return the processor time that all processes have used, 0 where the system does not say."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _wait, *interrupts = map(int, stat.read_text().split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def timed(run: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return a result, its seconds, and the share of the processors that others used meanwhile."""
    start, spent, everyone = time.perf_counter(), time.process_time(), machine_seconds()
    result = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds, spent = time.perf_counter() - start, time.process_time() - spent
    others_share = (machine_seconds() - everyone - spent) / (seconds * (os.cpu_count() or 1))
    return result, seconds, others_share


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
        first, first_seconds, first_busy = timed(runs[0])
        second, second_seconds, second_busy = timed(runs[1])
        longest = max(longest, time.monotonic() - began)
        if tolerance is not None:
            difference = largest_difference(first, second)
            assert difference < tolerance, f"the results differ by {difference:.1e}"
        if max(first_busy, second_busy) < BUSY:
            ratios.append(first_seconds / second_seconds)
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
        used = growth.run_calibration(size, Path(root))["device_bytes"]
        return growth.planned_bytes(size, Path(root))["device"] / used


def products() -> str:
    """Return the library that torch multiplies matrices with."""
    match = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return match[1] if match else "unknown"


def written(name: str, ratios: list[float], args: Namespace, out: Path) -> dict[str, str]:
    """Add a row to the results, in the place of an earlier one of the same kind, and return it."""
    on_gpu = args.device.startswith("cuda")
    chip = torch.cuda.get_device_name() if on_gpu else torch.backends.cpu.get_cpu_capability()
    values = [name, *(f"{f(ratios):.2f}" for f in (statistics.median, min, max)), len(ratios)]
    values += [chip, torch.get_num_threads(), "cublas" if on_gpu else products(), args.commit]
    row = dict(zip(COLUMNS, map(str, [*values, date.today()]), strict=True))
    with out.open(newline="") if out.exists() else open(os.devnull) as file:
        others = [r for r in csv.DictReader(file) if any(r[key] != row[key] for key in KEYS)]
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        order = [*ROWS, *GPU, BFLOAT16, MEMORY]
        writer.writerows(sorted([*others, row], key=lambda r: (order.index(r["row"]), *r.values())))
    return row


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
    all_rows = [*ROWS] if args.device == "cpu" else [*GPU, BFLOAT16, MEMORY]
    rows = args.rows.split(";") if args.rows else all_rows
    if unknown := set(rows) - set(all_rows):
        raise SystemExit(f"no row {', '.join(sorted(unknown))}; rows: {'; '.join(all_rows)}")
    for name in rows:
        ratios = ratios_of(name, args)
        if not ratios:
            print(f"{name}: no ratio, as other processes used the processors", flush=True)
            continue
        row = written(name, ratios, args, Path(args.out))
        unsteady = float(row["high"]) - float(row["low"]) > SPREAD * float(row["ratio"])
        remark = "; the spread is above 10 %" if unsteady else "; one pair" * (len(ratios) == 1)
        print(f"{name}: {row['ratio']} ({row['low']} to {row['high']}){remark}", flush=True)


if __name__ == "__main__":
    main()
