"""Result files with invented, clearly regular numbers, in the formats of results/, for tests of the
report and the book.

No number here was measured: base 50, merged 60, Surgery 70, FeatCal 80, experts 90 with small
regular steps from task to task.
"""

import atexit
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path

from PIL import Image
from synthetic_correct import COUNT, adapted, write_answers, write_seen
from synthetic_language import write_language
from synthetic_studies import write_choices, write_studies

from featcal.files import write_json
from reproduction.report.paper import REAL, texts
from reproduction.results import (
    ALIGNMENT,
    AUDIT,
    DRIFT,
    PROJECTION,
    SAMPLES,
    SCORES,
    SIMILARITY,
    THEORY,
    THEORY_POINTS,
    VECTORS,
    write_rows,
)  # fmt: skip

ROOT = Path(__file__).parent.parent
TASKS = ["sun397", "stanford-cars", "resisc45", "eurosat", "svhn", "gtsrb", "mnist", "dtd"]
LEVELS = {("", "base", ""): 50, ("", "expert", ""): 90}
for _upstream, _level in (("average", 60), ("task_arithmetic", 64)):
    LEVELS |= {
        (_upstream, "merged", ""): _level,
        (_upstream, "featcal", "suite"): 80,
        (_upstream, "featcal", "paper"): 72,
    }
LEVELS |= {
    ("task_arithmetic", "surgery", setting): 70
    for setting in ("suite", "suite_train", "paper", "paper_train")
}
CONTROLS = {("anchor", ""): 58, ("rescaled", ""): 66, ("featcal", "without_bias"): 79}
LEVELS |= {("regmean", "merged", ""): 65}
LEVELS |= {("", "multitask", ""): 88}
LEVELS |= {
    ("task_arithmetic", "mean_shift", "suite"): 68,
    ("task_arithmetic", "mean_shift", "suite_train"): 69,
}
LEVELS |= {
    ("wudi_closed_form", *key): level
    for key, level in {("merged", ""): 84, ("featcal", "suite"): 74}.items()
}
LARGER_TASKS = {
    14: ["oxford_flowers102", "pcam", "fer2013", "oxford-iiit-pet", "stl10", "cifar100"]
}
LARGER_TASKS[20] = [
    *LARGER_TASKS[14],
    "cifar10",
    "food101",
    "fashion_mnist",
    "emnist_letters",
    "kmnist",
    "rendered-sst2",
]
LARGER_LEVELS = {("", "base", ""): 50, ("", "expert", ""): 90}
for _upstream, _level in (
    ("average", 60),
    ("task_arithmetic", 64),
    ("adamerging", 72),
    ("wudi", 76),
):
    LARGER_LEVELS |= {(_upstream, "merged", ""): _level, (_upstream, "featcal", "suite"): 80}
    LARGER_LEVELS |= {
        (_upstream, method, "suite"): _level + 3 for method in ("surgery", "prob_surgery")
    }
SEEDS = {"task_arithmetic": ("42", "43", "44"), "average": ("42",), "wudi_closed_form": ("42",)}


def write_project(
    root: Path, suite: str = "mini", empty: bool = False, tasks: list[str] | None = None
) -> Path:
    """A folder that pages take for the project; without results when `empty`. Returns the folder of
    results.
    """
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
    """Results written once for all tests, which copy them."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    write_results(folder, suite, TASKS)
    for role in ("clip_b32", "clip_l14"):
        for pool in LARGER_TASKS:
            write_larger_pool(folder, suite, role, pool, [*TASKS, *LARGER_TASKS[pool]])
    write_role(folder, suite, REAL, list(texts())[:8])
    write_larger_pool(folder, suite, REAL, 14, list(texts())[:14])
    scored = {
        seed: _scores(suite, REAL, 8, ("", "expert", ""), 90 + seed, list(texts())[:8])
        for seed in (1, 2)
    }
    seeds = [row | {"expert_seed": seed} for seed, rows in scored.items() for row in rows]
    write_rows(folder / f"expert_seeds/{REAL}-8/expert_seeds.csv", seeds, (*SCORES, "expert_seed"))
    whose = (("", "expert", ""), ("average", "merged", ""), ("average", "featcal", "suite"))
    second = [row for who in whose for row in _scores(suite, REAL, 8, who, 95, list(texts())[:8])]
    write_rows(folder / f"second_encoder/{REAL}-8/second_encoder.csv", second, SCORES)
    return folder


def write_results(folder: Path, suite: str, tasks: list[str]) -> None:
    """The files of the smallest pools of images, and of language models."""
    for role in ("clip_b32", "clip_l14"):
        write_role(folder, suite, role, tasks)
    write_suite(folder, suite, tasks)
    write_choices(folder, suite)
    write_language(folder, suite)


def write_role(folder: Path, suite: str, role: str, tasks: list[str]) -> None:
    """Scores, references, what is measured of features, settings and run record of one role with 8
    tasks.
    """
    scored, drifted = folder / f"scores/{role}-8", folder / f"drift/{role}-8"
    scores = [
        row for key, level in LEVELS.items() for row in _scores(suite, role, 8, key, level, tasks)
    ]
    write_answers(scored / "scores.csv", scores)
    write_seen(
        scored / "seen.csv", suite, role, 8, tasks, [(None, 42), (256, 42), (256, 43), (256, 44)]
    )
    write_rows(drifted / "drift.csv", list(_drift(suite, role, tasks)), DRIFT)
    write_rows(drifted / "projection.csv", list(_projection(tasks)), PROJECTION)
    write_rows(drifted / "alignment.csv", list(_alignment(suite, role, tasks)), ALIGNMENT)
    write_rows(drifted / "similarity.csv", list(_similarity(tasks)), SIMILARITY)
    write_rows(drifted / "vectors.csv", list(_vectors(suite, role, tasks)), VECTORS)
    controls = [
        r
        for key, n in CONTROLS.items()
        for r in _scores(suite, role, 8, ("task_arithmetic", *key), n, tasks, ("42",))
    ]
    write_answers(folder / f"ablate/{role}-8/ablate.csv", controls)
    write_rows(folder / f"theory/{role}-8/theory.csv", list(_theory(suite, role, tasks)), THEORY)
    write_rows(
        folder / f"theory/{role}-8/theory_points.csv", list(_theory_points(tasks)), THEORY_POINTS
    )
    write_studies(folder, suite, role, tasks)
    run = dict(
        role=role, pool=8, upstream="task_arithmetic", samples=256, batch=128, seeds=[42, 43, 44]
    )
    values = {"ridge": 0.0003, "anchor_blend": 2.0, "interpolation": 0.6}
    used = {f"{role}-8-task_arithmetic-suite": run | {"setting": "suite", "calibration": values}}
    write_json(
        scored / "settings.json", {"suite": {"name": suite}, "calibrate": used} | adapted(role, 8)
    )
    host = {"cpu": "invented", "cores": 2}
    record = dict(
        seconds={"prepare": 60.0, "calibrate": 4.0},
        host=host,
        versions={"python": "3.11"},
        commit="0" * 40,
    )
    write_json(scored / "run.json", record)
    budgets = list(_budgets(suite, role, tasks))
    write_answers(folder / f"samples/{role}-8/samples.csv", budgets, SAMPLES)
    drawn = [(samples, seed) for samples in (8, 64, 512) for seed in (42, 43, 44)]
    write_seen(folder / f"samples/{role}-8/samples.seen.csv", suite, role, 8, tasks, drawn, 500)
    write_answers(folder / f"cost/{role}-8/cost.csv", list(_audit(suite, role, tasks)), AUDIT)
    adapters = {"steps": 1000, "batch": 16, "lr": 0.001}
    rivals = dict(
        featcal=values, surgery=adapters | {"rank": 4}, prob_surgery=adapters | {"hidden": 32}
    )
    studied = dict(
        at_once=2, threads=1, settings={"rivals": rivals | {"stream": "test_unlabelled"}}
    )
    write_json(
        folder / f"samples/{role}-8/run.json",
        record | studied | {"cost": list(_costs(("42", "43", "44"), (8, 64, 512)))},
    )
    write_json(
        folder / f"cost/{role}-8/run.json",
        record | studied | {"cost": list(_costs(("42",), (256,), published=True))},
    )


def write_larger_pool(folder: Path, suite: str, role: str, pool: int, tasks: list[str]) -> None:
    """Scores, settings and run record of one role with 14 or 20 tasks: every merger and all that
    calibrates it, one seed.
    """
    scored = folder / f"scores/{role}-{pool}"
    scores = [
        row
        for key, level in LARGER_LEVELS.items()
        for row in _scores(suite, role, pool, key, level, tasks, ("42",))
    ]
    write_answers(scored / "scores.csv", scores)
    write_seen(scored / "seen.csv", suite, role, pool, tasks, [(None, 42), (256, 42)])
    run = dict(
        role=role, pool=pool, upstream="wudi", samples=256, batch=128, seeds=[42], setting="suite"
    )
    used = {
        f"{role}-{pool}-wudi": run
        | {"calibration": {"ridge": 0.0003, "anchor_blend": 2.0, "interpolation": 0.6}}
    }
    write_json(
        scored / "settings.json",
        {"suite": {"name": suite}, "calibrate": used} | adapted(role, pool),
    )
    write_json(
        scored / "run.json",
        {"seconds": {"evaluate": 9.0}, "host": {"cpu": "invented"}, "commit": "0" * 40},
    )


def _scores(suite, role, pool, key, level, tasks, seeds=None):
    upstream, method, setting = key
    shared = {"suite": suite, "role": role, "pool": pool, "metric": "accuracy", "count": COUNT}
    drawn = method in ("featcal", "surgery", "prob_surgery", "mean_shift")
    for step, seed in enumerate((seeds or SEEDS[upstream]) if drawn else ("",)):
        for i, task in enumerate(tasks):
            value = float(level + 0.5 * i + 0.2 * step)
            row = dict(
                upstream=upstream, method=method, setting=setting, task=task, seed=seed, value=value
            )
            yield shared | row


def _drift(suite, role, tasks, blocks=6):
    shared = {"suite": suite, "role": role, "pool": 8, "upstream": "task_arithmetic", "count": 500}
    models = [("merged", "", "", 0.1), ("featcal", "suite", "42", 0.05)]
    models.append(("featcal", "paper", "42", 0.07))
    for method, setting, seed, size in models:
        for i, task in enumerate(tasks):
            for depth, block in enumerate(
                ["embeddings", *(f"{b:02d}" for b in range(blocks)), "features"]
            ):
                drift = size * depth * (1 + 0.05 * i)
                row = dict(method=method, setting=setting, seed=seed, task=task, block=block)
                yield (
                    shared
                    | row
                    | {"relative_drift": drift, "l2": 3 * drift, "cosine": 1 - drift / 3}
                )


EQUATIONS = ("proposition_1", "proposition_2", "proposition_4", "proposition_7", "equation_45")
BOUNDS = ("proposition_3", "proposition_5", "proposition_6", "proposition_7", "corollary_1", "corollary_2", "margin",
          "proposition_8", "proposition_8_transport")  # fmt: skip
PER_BLOCK = {"proposition_1": ("drift", "from_mismatch", "from_upstream"), "proposition_2": ("share_of_final",),
             "proposition_8": [f"{k}_{q}" for k in ("stale", "forward") for q in ("moved", "on_source", "deployed")]}  # fmt: skip


def _theory(suite, role, tasks):
    empty = dict(
        suite=suite, role=role, pool=8, upstream="task_arithmetic", block="", nodes="", count=40
    )
    for method, setting, level in (
        ("merged", "", 12.0),
        ("featcal", "suite", 13.0),
        ("required", "", 6.0),
    ):
        row = empty | {"method": method, "setting": setting, "task": ""}
        yield from (row | {"statement": s, "quantity": "digits", "value": level} for s in EQUATIONS)
        yield from (
            row | {"statement": s, "quantity": "room", "value": 10 * (level - 6)} for s in BOUNDS
        )
        for task in tasks if method != "required" else ():
            row |= {"task": task, "value": 30.0}
            yield from (row | {"statement": s, "quantity": "tightness"} for s in BOUNDS)
            yield from (
                row | {"statement": "margin", "quantity": f"kept_{q}"}
                for q in ("by_score", "by_spread", "in_fact")
            )
            yield from (
                row | {"statement": "proposition_5", "quantity": q} for q in ("applies", "grows")
            )
            for quantity in ("recursion_digits", "unrolled_digits", "digits_by_nodes"):
                yield from (
                    row | {"statement": "", "quantity": quantity, "nodes": n, "value": 2.0 * n}
                    for n in (1, 2, 4)
                )
            for block in range(6):
                shown = {
                    s: {q: 4.0 + block + i for i, q in enumerate(qs)} for s, qs in PER_BLOCK.items()
                }
                for s, values in shown.items():
                    yield from (
                        row | {"statement": s, "quantity": q, "block": f"{block:02d}", "value": v}
                        for q, v in values.items()
                    )


def _theory_points(tasks):
    for method, setting in (("merged", ""), ("featcal", "suite")):
        for i, task in enumerate(tasks):
            for index in range(4):
                row = dict(
                    method=method, setting=setting, task=task, block="", index=index, kept=index % 2
                )
                bounds = dict(proposition_5=0.8, margin=0.7, proposition_3=1.3, proposition_6=3.0)
                bounds |= {"proposition_7": 4.0, "corollary_2": 9.0}
                actual = 1.0 + 0.1 * i + 0.05 * index
                yield from (
                    row | {"statement": s, "actual": actual, "bound": b * actual}
                    for s, b in bounds.items()
                )


def _projection(tasks, images=40, classes=8):
    for task in tasks:
        for model, away in (("expert", 0.0), ("merged", 0.6), ("featcal", 0.2)):
            for i in range(images):
                label = i % classes
                x, y = label % 4 + 0.1 * (i % 7), label // 4 + 0.1 * (i % 5)
                place = {"index": i, "label": label, "x": x + away, "y": y - away}
                yield {"task": task, "model": model} | place


# mean cosine of final features; the step from task to task lets the first tasks gain over Surgery,
# the last ones lose
COSINES = {
    ("merged", ""): (0.60, 0.0),
    ("surgery", "suite"): (0.74, 0.02),
    ("featcal", "suite"): (0.84, 0.0),
}
COSINES |= {("featcal", "paper"): (0.70, 0.0), ("surgery", "paper"): (0.71, 0.0)}
COSINES |= {("prob_surgery", "paper"): (0.72, 0.0), ("prob_surgery", "suite"): (0.76, 0.0)}


def _alignment(suite, role, tasks):
    shared = dict(
        suite=suite,
        role=role,
        pool=8,
        upstream="task_arithmetic",
        cosine_sd=0.05,
        l2=0.5,
        count=500,
    )
    for (method, setting), (level, step) in COSINES.items():
        for i, task in enumerate(tasks):
            row = dict(method=method, setting=setting, seed="42" if setting else "", task=task)
            yield shared | row | {"cosine": level + step * i}


def _similarity(tasks, images=60):
    for (method, setting), (level, _) in COSINES.items():
        for i in range(images):
            row = dict(task=tasks[min(1, len(tasks) - 1)], method=method, setting=setting, index=i)
            yield row | {"similarity": level + 0.001 * (i % 9) * (2 if method == "featcal" else 1)}


def _vectors(suite, role, tasks):
    shared = {"suite": suite, "role": role, "pool": 8, "upstream": "task_arithmetic"}
    for method, setting, level in (
        ("merged", "", 0.4),
        ("featcal", "suite", 0.2),
        ("featcal", "paper", 0.3),
    ):
        for i, task in enumerate(tasks):
            for part, count in (("backbone", 1000), ("linear", 900)):
                row = dict(method=method, setting=setting, seed="42" if setting else "", task=task)
                yield (
                    shared
                    | row
                    | {"part": part, "cosine": level + 0.01 * i, "size": 1.5, "count": count}
                )


def write_suite(folder: Path, suite: str, tasks: list[str]) -> None:
    """Write suite.json and a contact sheet."""
    counts = {"train": 10, "validation": 5, "test": 5}
    described = [
        {"task": task, "description": "Invented.", "classes": ["one", "two", "three"]} | counts
        for task in tasks
    ]
    write_json(folder / "suite.json", {"suite": suite, "pools": {"8": tasks}, "tasks": described})
    sheet = Image.new("RGB", (320, 16 * len(tasks)))
    sheet.save(folder / "contact_sheet.png")


SECONDS = {
    "featcal": 5.0,
    "surgery": 4.0,
    "prob_surgery": 4.5,
}  # with features kept; twenty times that as published


def _budgets(suite, role, tasks):
    shared = dict(
        suite=suite, role=role, pool=8, metric="accuracy", count=500, upstream="task_arithmetic"
    )
    runs = [("merged", "", 0, "", 64.0)]
    for step, samples in enumerate((8, 64, 512)):
        for seed in (42, 43, 44):
            starts = {"featcal": (76, 2), "surgery": (66, 4), "prob_surgery": (63, 6)}
            runs += [
                (m, "suite", samples, seed, at + gain * step + seed % 42)
                for m, (at, gain) in starts.items()
            ]
    for method, setting, samples, seed, value in runs:
        row = shared | dict(
            method=method, setting=setting, samples=samples, seed=seed, value=float(value)
        )
        yield from (row | {"task": task} for task in tasks)


def _audit(suite, role, tasks):
    shared = dict(
        suite=suite, role=role, pool=8, metric="accuracy", count=500, upstream="task_arithmetic"
    )
    shared |= {"setting": "suite", "encode": "each_step", "seed": 42, "samples": 256}
    for method in ("surgery", "prob_surgery"):
        for step in (200, 1000):
            yield from (
                shared | {"method": method, "step": step, "task": t, "value": 60 + step / 100}
                for t in tasks
            )


def _costs(seeds, budgets, published=False):
    shared = {"upstream": "task_arithmetic", "setting": "suite", "energy_wh": None}
    for method, seconds in SECONDS.items():
        for encode in ("once", "each_step")[: 2 if published and method != "featcal" else 1]:
            for samples in budgets:
                for i, seed in enumerate(seeds):
                    times = dict(
                        seconds=seconds * (20 if encode == "each_step" else 1) + 0.1 * i,
                        memory_mib=10 * seconds,
                    )
                    words = dict(method=method, encode=encode, seed=int(seed), samples=samples)
                    yield (
                        shared
                        | words
                        | {"images": min(samples, 500 if method != "featcal" else 512)}
                        | times
                    )
