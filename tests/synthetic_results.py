"""Result files with invented, clearly regular numbers, for tests of the report and the book.

Base 50, merged 60, Surgery 70, FeatCal 80, experts 90, with small steps from task to task.
"""

import atexit
import re
import shutil
import tempfile
from functools import cache
from itertools import product
from pathlib import Path

from synthetic_correct import COUNT, adapted, grid, model, write_answers, write_seen
from synthetic_language import write_language
from synthetic_studies import write_choices, write_studies

from featcal.files import write_json
from reproduction import results
from reproduction.report.paper import REAL, TEXT_SETS
from reproduction.results import SCORES, write_rows

ROOT = Path(__file__).parent.parent
TASKS = ["sun397", "stanford-cars", "resisc45", "eurosat", "svhn", "gtsrb", "mnist", "dtd"]
FOURTEEN = ["oxford_flowers102", "pcam", "fer2013", "oxford-iiit-pet", "stl10", "cifar100"]
TWENTY = ["cifar10", "food101", "fashion_mnist", "emnist_letters", "kmnist", "rendered-sst2"]
LARGER_TASKS = {14: [*TASKS, *FOURTEEN], 20: [*TASKS, *FOURTEEN, *TWENTY]}
TA = "task_arithmetic"
ENDS = {("", "base", ""): 50, ("", "expert", ""): 90}
LEVELS = ENDS | {
    ("average", "merged", ""): 60, ("average", "featcal", "suite"): 80, ("average", "featcal", "paper"): 72,
    (TA, "merged", ""): 64, (TA, "featcal", "suite"): 80, (TA, "featcal", "paper"): 72,
    (TA, "surgery", "suite"): 70, (TA, "surgery", "suite_train"): 70, (TA, "surgery", "paper"): 70,
    (TA, "surgery", "paper_train"): 70, ("regmean", "merged", ""): 65, ("", "multitask", ""): 88,
    (TA, "mean_shift", "suite"): 68, (TA, "mean_shift", "suite_train"): 69,
    ("wudi_closed_form", "merged", ""): 84, ("wudi_closed_form", "featcal", "suite"): 74,
}  # fmt: skip
CONTROLS = {(TA, "anchor", ""): 58, (TA, "rescaled", ""): 66, (TA, "featcal", "without_bias"): 79}
LARGER_LEVELS = dict(ENDS)
for _upstream, _level in (("average", 60), (TA, 64), ("adamerging", 72), ("wudi", 76)):
    LARGER_LEVELS |= {(_upstream, "merged", ""): _level, (_upstream, "featcal", "suite"): 80}
    LARGER_LEVELS |= {(_upstream, m, "suite"): _level + 3 for m in ("surgery", "prob_surgery")}
SEEDS = {TA: ("42", "43", "44")}  # others have the first
VALUES = {"ridge": 0.0003, "anchor_blend": 2.0, "interpolation": 0.6}
RECORD = dict(host={"cpu": "invented", "cores": 2}, versions={"python": "3.11"}, commit="0" * 40)
SECONDS = {"featcal": 5.0, "surgery": 4.0, "prob_surgery": 4.5}  # as published twenty times that


def write_project(
    root: Path, suite: str = "mini", empty: bool = False, tasks: list[str] | None = None
) -> Path:
    """Make a folder that pages take for the project; return its results, none when `empty`."""
    text = (ROOT / "params.yaml").read_text()
    (root / "params.yaml").write_text(re.sub(r"(?m)^suite: \w+", f"suite: {suite}", text))
    shutil.copytree(ROOT / "suites", root / "suites")
    folder = root / "results" / suite
    folder.mkdir(parents=True)
    if tasks is not None:
        write_results(folder, suite, tasks)
    elif not empty:
        shutil.copytree(_results(suite), folder, copy_function=shutil.copyfile, dirs_exist_ok=True)
    return folder


@cache
def _results(suite: str) -> Path:
    """Return results written once for all tests, which copy them."""
    folder, real = Path(tempfile.mkdtemp()), list(TEXT_SETS)
    atexit.register(shutil.rmtree, folder)
    write_results(folder, suite, TASKS)
    for role, pool in product(("clip_b32", "clip_l14"), LARGER_TASKS):
        write_larger_pool(folder, suite, role, pool, LARGER_TASKS[pool])
    write_role(folder, suite, REAL, real[:8])
    write_larger_pool(folder, suite, REAL, 14, real[:14])
    expert, average = ("", "expert", ""), ("average", "merged", "")
    of_seeds = ((n, _scores(suite, REAL, 8, {expert: 90 + n}, real[:8])) for n in (1, 2))
    seeds = [row | {"expert_seed": n} for n, rows in of_seeds for row in rows]
    write_rows(folder / f"expert_seeds/{REAL}-8/expert_seeds.csv", seeds, results.EXPERT_SEEDS)
    levels = dict.fromkeys((expert, average, ("average", "featcal", "suite")), 95)
    second = list(_scores(suite, REAL, 8, levels, real[:8]))
    write_rows(folder / f"second_encoder/{REAL}-8/second_encoder.csv", second, SCORES)
    return folder


def write_results(folder: Path, suite: str, tasks: list[str]) -> None:
    """Write the files of the smallest pools of images, and of language models."""
    for role in ("clip_b32", "clip_l14"):
        write_role(folder, suite, role, tasks)
    described = [{"task": task} for task in tasks]
    write_json(folder / "suite.json", {"pools": {"8": tasks}, "tasks": described})
    write_choices(folder, suite)
    write_language(folder, suite)


def write_role(folder: Path, suite: str, role: str, tasks: list[str]) -> None:
    """Write everything of one role with 8 tasks."""
    shared = {"suite": suite, "role": role, "pool": 8}
    scored, drifted = folder / f"scores/{role}-8", folder / f"drift/{role}-8"
    write_answers(scored / "scores.csv", list(_scores(suite, role, 8, LEVELS, tasks)))
    write_seen(scored / "seen.csv", shared, tasks, [(None, 42), (256, 42), (256, 43), (256, 44)])
    measured = dict(drift=_drift, projection=_projection, alignment=_alignment)
    measured |= dict(similarity=_similarity, vectors=_vectors)
    merger = shared | {"upstream": TA}
    for name, rows in measured.items():
        write_rows(drifted / f"{name}.csv", list(rows(merger, tasks)), results.MEASURED[name])
    controls = list(_scores(suite, role, 8, CONTROLS, tasks, ("42",)))
    write_answers(folder / f"ablate/{role}-8/ablate.csv", controls)
    theory = folder / f"theory/{role}-8"
    write_rows(theory / "theory.csv", list(_theory(merger, tasks)), results.THEORY)
    write_studies(folder, suite, role, tasks)
    run = dict(role=role, pool=8, upstream=TA, samples=256, batch=128, seeds=[42, 43, 44])
    used = {f"{role}-8-{TA}-suite": run | {"setting": "suite", "calibration": VALUES}}
    write_json(scored / "settings.json", {"calibrate": used} | adapted(role, 8))
    record = {"seconds": {"prepare": 60.0, "calibrate": 4.0}} | RECORD
    write_json(scored / "run.json", record)
    samples, cost = folder / f"samples/{role}-8", folder / f"cost/{role}-8"
    write_answers(samples / "samples.csv", list(_budgets(merger, tasks)), results.SAMPLES)
    adapters = {"steps": 1000, "batch": 16, "lr": 0.001}
    comparison = {"featcal": VALUES, "surgery": adapters | {"rank": 4}}
    comparison |= {"prob_surgery": adapters | {"hidden": 32}, "stream": "test_unlabelled"}
    record |= dict(at_once=2, threads=1, settings={"comparison": comparison})
    costs = list(_costs(("42", "43", "44"), (8, 64, 512)))
    write_json(samples / "run.json", record | {"cost": costs})
    write_json(cost / "run.json", record | {"cost": list(_costs(("42",), (256,), published=True))})


def write_larger_pool(folder: Path, suite: str, role: str, pool: int, tasks: list[str]) -> None:
    """Write one role with 14 or 20 tasks: every merger and all that calibrates it, one seed."""
    scores = list(_scores(suite, role, pool, LARGER_LEVELS, tasks, ("42",)))
    write_answers(folder / f"scores/{role}-{pool}/scores.csv", scores)


def _scores(suite, role, pool, levels, tasks, seeds=None):
    shared = {"suite": suite, "role": role, "pool": pool, "metric": "accuracy", "count": COUNT}
    for key, level in levels.items():
        seeded = key[1] in ("featcal", "surgery", "prob_surgery", "mean_shift")
        draws = (seeds or SEEDS.get(key[0], ("42",))) if seeded else ("",)
        for (step, seed), (i, task) in product(enumerate(draws), enumerate(tasks)):
            value = float(level + 0.5 * i + 0.2 * step)
            yield shared | model(key) | {"task": task, "seed": seed, "value": value}


def _drift(shared, tasks):
    blocks = ["embeddings", *(f"{b:02d}" for b in range(6)), "features"]
    models = [("merged", "", "", 0.1), ("featcal", "suite", "42", 0.05)]
    models.append(("featcal", "paper", "42", 0.07))
    cells = product(models, enumerate(tasks), enumerate(blocks))
    for (method, setting, seed, size), (i, task), (depth, block) in cells:
        drift = size * depth * (1 + 0.05 * i)
        row = dict(method=method, setting=setting, seed=seed, task=task, block=block, count=500)
        yield shared | row | {"relative_drift": drift, "l2": 3 * drift, "cosine": 1 - drift / 3}


EQUATIONS = ("proposition_1", "proposition_2", "proposition_4", "proposition_7", "equation_45")
BOUNDS = ("proposition_3", "proposition_5", "proposition_6", "proposition_7", "corollary_1", "corollary_2", "margin",
          "proposition_8", "proposition_8_transport")  # fmt: skip
PER_BLOCK = {
    "proposition_2": ["share_of_final"],
    "proposition_8": [f"{k}_{q}" for k in ("stale", "forward") for q in ("moved", "deployed")],
}


def _theory(shared, tasks):
    empty = shared | {"block": "", "nodes": "", "count": 40}
    levels = ("merged", "", 12.0), ("featcal", "suite", 13.0), ("required", "", 6.0)
    for method, setting, level in levels:
        row = empty | {"method": method, "setting": setting, "task": ""}
        yield from grid(**row, statement=list(EQUATIONS), quantity="digits", value=level)
        yield from grid(**row, statement=list(BOUNDS), quantity="room", value=10 * (level - 6))
        for task in tasks if method != "required" else ():
            row |= {"task": task, "value": 30.0}
            yield row | {"statement": "proposition_5", "quantity": "applies"}
            for block, (statement, quantities) in product(range(6), PER_BLOCK.items()):
                block_row = row | {"statement": statement, "block": f"{block:02d}"}
                for i, quantity in enumerate(quantities):
                    yield block_row | {"quantity": quantity, "value": 4.0 + block + i}


def _projection(_, tasks):
    models = (("expert", 0.0), ("merged", 0.6), ("featcal", 0.2))
    for task, (model_, away), i in product(tasks, models, range(40)):
        label = i % 8
        x, y = label % 4 + 0.1 * (i % 7), label // 4 + 0.1 * (i % 5)
        row = {"task": task, "model": model_, "index": i, "label": label}
        yield row | {"x": x + away, "y": y - away}


# mean cosine of final features; the step from task to task lets the first tasks gain over Surgery,
# the last ones lose
COSINES = {
    ("merged", ""): (0.60, 0.0), ("surgery", "suite"): (0.74, 0.02), ("featcal", "suite"): (0.84, 0.0),
    ("featcal", "paper"): (0.70, 0.0), ("surgery", "paper"): (0.71, 0.0), ("prob_surgery", "paper"): (0.72, 0.0),
    ("prob_surgery", "suite"): (0.76, 0.0),
}  # fmt: skip


def _alignment(shared, tasks):
    columns = shared | {"cosine_sd": 0.05, "l2": 0.5, "count": 500}
    for ((method, setting), (level, step)), (i, task) in product(COSINES.items(), enumerate(tasks)):
        row = dict(method=method, setting=setting, seed="42" if setting else "", task=task)
        yield columns | row | {"cosine": level + step * i}


def _similarity(_, tasks):
    shown = tasks[min(1, len(tasks) - 1)]
    for ((method, setting), (level, _)), i in product(COSINES.items(), range(60)):
        row = {"task": shown, "method": method, "setting": setting, "index": i}
        yield row | {"similarity": level + 0.001 * (i % 9) * (2 if method == "featcal" else 1)}


def _vectors(shared, tasks):
    models = (("merged", "", 0.4), ("featcal", "suite", 0.2), ("featcal", "paper", 0.3))
    cells = product(models, enumerate(tasks), (("backbone", 1000), ("linear", 900)))
    for (method, setting, level), (i, task), (part, count) in cells:
        row = dict(method=method, setting=setting, seed="42" if setting else "", task=task)
        row |= {"part": part, "cosine": level + 0.01 * i, "size": 1.5, "count": count}
        yield shared | row


def _budgets(shared, tasks):
    scored = {"metric": "accuracy", "count": 500}
    runs = [("merged", "", 0, "", 64.0)]
    starts = {"featcal": (76, 2), "surgery": (66, 4), "prob_surgery": (63, 6)}
    cells = product(enumerate((8, 64, 512)), (42, 43, 44), starts.items())
    for (step, samples), seed, (method, (at, gain)) in cells:
        runs.append((method, "suite", samples, seed, at + gain * step + seed % 42))
    first = {name: shared[name] for name in ("suite", "role", "pool")} | scored
    for method, setting, samples, seed, value in runs:
        row = first | {"upstream": TA, "method": method, "setting": setting, "samples": samples}
        yield from grid(**row, seed=seed, value=float(value), task=tasks)


def _costs(seeds, budgets, published=False):
    shared = {"upstream": TA, "setting": "suite", "energy_wh": None}
    for method, seconds in SECONDS.items():
        encodings = ("once", "each_step")[: 2 if published and method != "featcal" else 1]
        for encode, samples, (i, seed) in product(encodings, budgets, enumerate(seeds)):
            longer = 20 if encode == "each_step" else 1
            row = {"method": method, "encode": encode, "seed": int(seed), "samples": samples}
            row |= {"images": min(samples, 512 if method == "featcal" else 500)}
            row |= {"seconds": seconds * longer + 0.1 * i, "memory_mib": 10 * seconds}
            yield shared | row
