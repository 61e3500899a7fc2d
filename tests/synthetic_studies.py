"""Invented results of studies, with known relations between methods."""

from itertools import product
from pathlib import Path

from synthetic_correct import COUNT, grid, model, write_answers

from reproduction import results
from reproduction.results import SCORES, write_rows

DAMAGE = ("gaussian_noise", "motion_blur", "fog")
SWEPT = dict(
    ridge=(1e-6, (1e-6, 1e-4, 0.05, 100)),
    anchor_blend=(2, (0, 1, 2, 10)),
    interpolation=(0.9, (0, 0.3, 0.6, 0.9, 1)),
)
# mean of the default 80, deviation 1
CHOSEN = [(("", ""), str(seed), value) for seed, value in ((42, 79.0), (43, 80.0), (44, 81.0))]
OTHERS = {("tokens", "12"): 70.0, ("modules", "attention"): 79.5, ("samples", "64"): 82.0}
CHOSEN += [(choice, "42", value) for choice, value in OTHERS.items()]
# Merged 50, experts 90: FeatCal recovers 75, 50 and 40 % of the gap with 2, 4 and 8 tasks,
# ProbSurgery 60, Surgery 50.
RECOVERED = {
    ("featcal", "suite"): {2: 80.0, 4: 70.0, 8: 66.0}, ("featcal", "paper"): dict.fromkeys((2, 4, 8), 60.0),
    ("surgery", "suite"): dict.fromkeys((2, 4, 8), 70.0), ("prob_surgery", "suite"): dict.fromkeys((2, 4, 8), 74.0),
    ("mean_shift", "suite"): dict.fromkeys((2, 4, 8), 62.0), ("merged", ""): dict.fromkeys((2, 4, 8), 50.0),
}  # fmt: skip
DRIFTS = {  # squared, and the part of the mean
    "merged": (0.4, 0.3), "featcal": (0.2, 0.15), "surgery": (0.1, 0.0), "prob_surgery": (0.06, 0.0), "mean_shift": (0.1, 0.0),
    "expert": (0.0, 0.0),
}  # fmt: skip
# By merger: as it is, followed by FeatCal, Surgery and SVC.
FIELD = dict(
    average=(60.0, 80.0, 70.0, 58.0),
    iso_c=(75.0, 82.0, 74.0, 76.0),
    wudi_closed_form=(83.0, 85.0, 84.0, 81.0),
)
ALONE = dict(  # after the first merger
    prodistill=81.0, surgery_v2=78.0, interv_merge=72.0, featcal_auto=82.5, prob_surgery=71.0
)


def write_studies(folder: Path, suite: str, role: str, tasks: list[str]) -> None:
    shared = {"suite": suite, "role": role, "pool": 8}
    write_corrupted(folder / f"corrupted/{role}-8", shared, tasks)
    write_task_counts(folder / f"task_counts/{role}-8", shared, tasks)
    write_field(folder / f"field/{role}-8", shared, tasks)
    write_answers(folder / f"sweep/{role}-8/sweep.csv", list(_sweep(shared, tasks)), results.SWEEP)


def write_corrupted(folder: Path, shared: dict, tasks: list[str]) -> None:
    """Write scores: FeatCal loses 4 points by every damage, 1 at the paper's settings; Surgery 12."""
    levels = {("featcal", "suite"): 76.0, ("featcal", "paper"): 71.0}
    levels |= {("surgery", "suite"): 58.0, ("surgery", "suite_train"): 57.0}
    common = shared | {"upstream": "task_arithmetic", "metric": "accuracy", "count": COUNT}
    rows = []
    for ((method, setting), level), kind, i in product(levels.items(), DAMAGE, range(len(tasks))):
        columns = {"method": method, "setting": setting, "corruption": kind, "seed": "42"}
        rows.append(common | columns | {"task": tasks[i], "value": level + 0.5 * i})
    write_answers(folder / "corrupted.csv", rows, results.CORRUPTED)


def write_task_counts(folder: Path, shared: dict, tasks: list[str]) -> None:
    """Write scores of the pool, cut once in its own order. With the union of classes the adapters
    keep their accuracy, all else loses 20 points; FeatCal's last part is 4 points better."""
    common, rows = shared | {"metric": "accuracy", "count": 244}, []
    for count in (2, 4, 8):
        parts = [tasks[start : start + count] for start in range(0, len(tasks), count)]
        for (draw, part), upstream in product(enumerate(parts), ("", "average", "task_arithmetic")):
            models = RECOVERED if upstream else {("expert", ""): {count: 90.0}}
            for (method, setting), levels in models.items():
                better = 4.0 if method == "featcal" and draw and draw == len(parts) - 1 else 0.0
                value, (drift, mean) = levels[count] + better, DRIFTS[method]
                columns = model((upstream, method, setting)) | {"seed": "42" if setting else ""}
                columns |= dict(tasks=count, draw=draw, value=value, drift=drift, mean_drift=mean)
                lost = 0 if method in ("surgery", "prob_surgery") else 20
                rows += grid(**common, **columns, union=value - lost, task=part)
    write_rows(folder / "task_counts.csv", rows, results.TASK_COUNTS)


def write_field(folder: Path, shared: dict, tasks: list[str]) -> None:
    rows, after = [], ("merged", "featcal", "surgery", "svc")
    levels = [(m, *pair) for m, own in FIELD.items() for pair in zip(after, own, strict=True)]
    alone = [("average", method, level) for method, level in ALONE.items()]
    alone += [("tangent", "merged", 65.0), ("tangent", "expert", 88.0)]
    for upstream, method, level in (*levels, *alone):
        seeded = (upstream, method, level) in alone or method in ("featcal", "surgery")
        key = model((upstream, method, "suite" if seeded else ""))
        key |= {"seed": "42" if seeded else "", "metric": "accuracy"}
        columns = shared | {"task": tasks} | key
        rows += grid(**columns, value=level, count=COUNT)
    write_answers(folder / "field.csv", rows, SCORES)


def write_choices(folder: Path, suite: str) -> None:
    """Write the study of unstated choices: inputs move the score, solved modules do not."""
    for role, pool, task in (("flan_t5_base", "glue", "rte"), ("llama_3b", "mergebench", "gsm8k")):
        shared = {"suite": suite, "role": role, "pool": pool, "task": task}
        shared |= model(("task_arithmetic", "featcal", "paper"))
        shared |= {"metric": "accuracy", "count": 400}
        rows = [
            shared | {"choice": c, "option": o, "default": int(not c), "seed": seed, "value": value}
            for (c, o), seed, value in CHOSEN
        ]
        write_answers(folder / f"choices/{role}-{pool}/choices.csv", rows, results.CHOICES)


def _sweep(shared, tasks):
    """Yield accuracy 80 at the chosen value and small λ, elsewhere 4 points less, on WUDI 8."""
    common = shared | {"method": "featcal", "metric": "accuracy", "seed": "42", "count": COUNT}
    curves = product((("task_arithmetic", 4.0), ("wudi", 8.0)), SWEPT.items())
    for (upstream, lost), (parameter, (chosen, values)) in curves:
        for at, setting, i in product(values, ("suite", "paper"), range(len(tasks))):
            level = 80.0 if at == chosen or (parameter == "ridge" and at < 1) else 80.0 - lost
            columns = {"upstream": upstream, "parameter": parameter, "at": f"{at:g}"}
            columns |= {"chosen": int(at == chosen), "setting": setting}
            yield common | columns | {"task": tasks[i], "value": level + 0.5 * i}
