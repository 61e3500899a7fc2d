"""Result files with invented, clearly regular numbers, in the formats of results/, for tests of the report and the book.

No number here was measured: base 50, merged 60, Surgery 70, FeatCal 80, experts 90 with small regular steps from task to task.
"""

import json
from pathlib import Path

from PIL import Image

from featcal.stages.columns import CORRUPTED, CURVES, EXAMPLES, SCALES, SWEEP
from featcal.storage.results import DRIFT, PROJECTION, SCORES, write_rows

TASKS = ["sun397", "stanford-cars", "resisc45", "eurosat", "svhn", "gtsrb", "mnist", "dtd"]
LEVELS = {("", "base", ""): 50, ("", "expert", ""): 90}
for _upstream, _level in (("average", 60), ("task_arithmetic", 64)):
    LEVELS |= {(_upstream, "merged", ""): _level, (_upstream, "featcal", "suite"): 80, (_upstream, "featcal", "paper"): 72}
LEVELS |= {("task_arithmetic", "surgery", setting): 70 for setting in ("suite", "suite_train", "paper", "paper_train")}
LEVELS |= {("task_arithmetic", "anchor", ""): 58, ("task_arithmetic", "rescaled", ""): 66}
LEVELS |= {("task_arithmetic", "featcal", "without_bias"): 79, ("regmean", "merged", ""): 65}
DAMAGE = ("gaussian_noise", "motion_blur", "fog")
SWEPT = {
    "ridge": (1e-6, (1e-6, 1e-4, 0.05, 100)),
    "anchor_blend": (2, (0, 1, 2, 10)),
    "interpolation": (0.9, (0, 0.3, 0.6, 0.9, 1)),
}
SEEDS = {"task_arithmetic": ("42", "43", "44"), "average": ("42",)}


def write_project(root: Path, suite: str = "mini", empty: bool = False, tasks: list[str] | None = None) -> Path:
    """A folder that pages take for the project; without results when `empty`. Returns the folder of results."""
    (root / "params.yaml").write_text(f"suite: {suite}\n")
    folder = root / "results" / suite
    folder.mkdir(parents=True)
    if not empty:
        for role in ("clip_b32", "clip_l14"):
            write_role(folder, suite, role, tasks or TASKS)
        write_suite(folder, suite, tasks or TASKS)
    return folder


def write_role(folder: Path, suite: str, role: str, tasks: list[str]) -> None:
    """Scores, references, drift, projection, settings and run record of one role with 8 tasks."""
    scores = [row for key, level in LEVELS.items() for row in _scores(suite, role, key, level, tasks)]
    write_rows(folder / f"{role}-8.csv", scores, SCORES)
    write_rows(folder / f"{role}-8.references.csv", [r for r in scores if r["method"] in ("base", "expert", "merged")], SCORES)
    write_rows(folder / f"{role}-8.drift.csv", list(_drift(suite, role, tasks)), DRIFT)
    write_rows(folder / f"{role}-8.projection.csv", list(_projection(tasks)), PROJECTION)
    write_rows(folder / f"{role}-8.curves.csv", list(_curves(suite, role)), CURVES)
    swept = {"suite": suite, "role": role, "pool": 8, "upstream": "task_arithmetic"}
    factors = [swept | {"factor": f, "value": 60.0 + f, "chosen": int(f == 1.5)} for f in (0.5, 1.0, 1.5)]
    write_rows(folder / f"{role}-8.scales.csv", factors, SCALES)
    write_studies(folder, suite, role, tasks)
    run = {"role": role, "pool": 8, "upstream": "task_arithmetic", "samples": 256, "batch": 128, "seeds": [42, 43, 44]}
    values = {"ridge": 0.0003, "anchor_blend": 2.0, "interpolation": 0.6}
    used = {f"{role}-8-task_arithmetic-suite": run | {"setting": "suite", "calibration": values}}
    _json(folder / f"{role}-8.settings.json", {"suite": {"name": suite}, "merge": {}, "calibrate": used})
    host = {"cpu": "invented", "cores": 2}
    record = {"seconds": {"prepare": 60.0, "calibrate": 4.0}, "host": host, "versions": {"python": "3.11"}, "commit": "0" * 40}
    _json(folder / f"{role}-8.run.json", record)


def write_studies(folder: Path, suite: str, role: str, tasks: list[str]) -> None:
    """Damaged calibration images and sweeps of one role with 8 tasks."""
    write_rows(folder / f"{role}-8.corrupted.csv", list(_corrupted(suite, role, tasks)), CORRUPTED)
    kinds = ("clean", *DAMAGE)
    shown = [{"task": tasks[1], "index": 7, "corruption": kind, "row": 0, "column": i} for i, kind in enumerate(kinds)]
    write_rows(folder / f"{role}-8.corrupted.examples.csv", shown, EXAMPLES)
    Image.linear_gradient("L").resize((32, 8)).convert("RGB").save(folder / f"{role}-8.corrupted.examples.png")
    _json(folder / f"{role}-8.corrupted.settings.json", {"strengths": dict.fromkeys(DAMAGE, "Invented.")})
    write_rows(folder / f"{role}-8.sweep.csv", list(_sweep(suite, role, tasks)), SWEEP)
    around = {"setting": "suite", "featcal": {"ridge": 1e-6, "anchor_blend": 2.0, "interpolation": 0.9}}
    _json(folder / f"{role}-8.sweep.settings.json", {"study": {"samples": 256, "seed": 42, "around": [around]}})


def _corrupted(suite, role, tasks):
    """FeatCal loses 4 points in every kind of damage, 1 at the paper's settings; Surgery 12."""
    shared = {"suite": suite, "role": role, "pool": 8, "upstream": "task_arithmetic", "metric": "accuracy", "count": 500}
    for method, setting, level in (("featcal", "suite", 76.0), ("featcal", "paper", 71.0), ("surgery", "suite", 58.0)):
        for kind in DAMAGE:
            row = shared | {"method": method, "setting": setting, "corruption": kind, "seed": "42"}
            yield from (row | {"task": task, "value": level + 0.5 * i} for i, task in enumerate(tasks))


def _sweep(suite, role, tasks):
    """Accuracy 80 where chosen, elsewhere 4 points lower on task arithmetic and 8 on WUDI; the small λ all do alike."""
    shared = {"suite": suite, "role": role, "pool": 8, "method": "featcal", "metric": "accuracy", "seed": "42", "count": 500}
    for upstream, lost in (("task_arithmetic", 4.0), ("wudi", 8.0)):
        for parameter, (chosen, values) in SWEPT.items():
            for at in values:
                level = 80.0 if at == chosen or (parameter == "ridge" and at < 1) else 80.0 - lost
                row = shared | {"upstream": upstream, "setting": "suite", "parameter": parameter}
                row |= {"at": f"{at:g}", "chosen": int(at == chosen)}
                yield from (row | {"task": task, "value": level + 0.5 * i} for i, task in enumerate(tasks))


def _scores(suite, role, key, level, tasks):
    upstream, method, setting = key
    shared = {"suite": suite, "role": role, "pool": 8, "metric": "accuracy", "count": 500}
    drawn = method in ("featcal", "surgery")
    for step, seed in enumerate(SEEDS[upstream] if drawn else ("",)):
        for i, task in enumerate(tasks):
            value = float(level + 0.5 * i + 0.2 * step)
            row = {"upstream": upstream, "method": method, "setting": setting, "task": task, "seed": seed, "value": value}
            yield shared | row


def _drift(suite, role, tasks, blocks=6):
    shared = {"suite": suite, "role": role, "pool": 8, "upstream": "task_arithmetic", "count": 500}
    for method, setting, seed, size in (("merged", "", "", 0.1), ("featcal", "suite", "42", 0.05)):
        for i, task in enumerate(tasks):
            for depth, block in enumerate(["embeddings", *(f"{b:02d}" for b in range(blocks)), "features"]):
                drift = size * depth * (1 + 0.05 * i)
                row = {"method": method, "setting": setting, "seed": seed, "task": task, "block": block}
                yield shared | row | {"relative_drift": drift, "l2": 3 * drift, "cosine": 1 - drift / 3}


def _curves(suite, role):
    shared = {"suite": suite, "role": role, "pool": 8}
    trained = [("adamerging", "merged", "", "42"), *(("task_arithmetic", "surgery", "suite", s) for s in ("42", "43"))]
    for upstream, method, setting, seed in trained:
        row = shared | {"upstream": upstream, "method": method, "setting": setting, "seed": seed}
        yield from (row | {"step": step, "loss": 1.0 / step} for step in (10, 20, 30))


def _projection(tasks, images=120, classes=8):
    for model, away in (("expert", 0.0), ("merged", 0.6), ("featcal", 0.2)):
        for i in range(images):
            label = i % classes
            x, y = label % 4 + 0.1 * (i % 7), label // 4 + 0.1 * (i % 5)
            place = {"index": i, "label": label, "x": x + away, "y": y - away}
            yield {"task": tasks[min(1, len(tasks) - 1)], "model": model} | place


def write_suite(folder: Path, suite: str, tasks: list[str]) -> None:
    """suite.json, choice.json and a contact sheet of coloured squares."""
    counts = {"train": 10, "validation": 5, "test": 5}
    described = [{"task": task, "description": "Invented.", "classes": ["one", "two", "three"]} | counts for task in tasks]
    _json(folder / "suite.json", {"suite": suite, "pools": {"8": tasks}, "tasks": described})
    bases = {s: {"clip_b32": 50.0, "clip_l14": 51.0} for s in ("0.5", "0.55")}
    sweep = {"0.3": {"clip_b32": 70.0, "clip_l14": 71.0}, "0.6": {"clip_b32": 75.0, "clip_l14": 76.0}}
    run = {"base": 50.0, "average": 60.0, "experts": 90.0, "task_arithmetic": {"0.2": 61.0, "0.3": 62.0}}
    pools = {"8": {role: {"0": run, "1": run | {"experts": 91.0}} for role in ("clip_b32", "clip_l14")}}
    chosen = {"strength": 0.55, "scale": {role: {"8": 0.3} for role in pools["8"]}, "settings": {"interpolation": 0.6}}
    measured = {"base_by_strength": bases, "pools": pools}
    _json(folder / "choice.json", {"suite": measured, "settings": {"sweeps": {"interpolation": sweep}}, "chosen": chosen})
    sheet = Image.new("RGB", (320, 16 * len(tasks)))
    for place in range(20 * len(tasks)):
        column, row = place % 20, place // 20
        sheet.paste((12 * column, 20 * (row % 12), 128), (16 * column, 16 * row, 16 * column + 16, 16 * row + 16))
    sheet.save(folder / "contact_sheet.png")


def _json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
