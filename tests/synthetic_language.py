"""Result files of language models with invented numbers, in the formats of results/: like
synthetic_results.py, for texts.

On GLUE base 60, merged 70, Surgery 74, FeatCal 80, experts 90; of the domains' experts each is 10
above the base on its own tests and 10 below it elsewhere. The larger models have 2 more of
everything but gain less.
"""

from pathlib import Path

from synthetic_correct import write_answers

from featcal.files import write_json
from reproduction.results import SCORES, write_rows

GLUE = ["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb"]
TESTS = {
    "math500": "math", "gsm8k": "math", "humaneval_plus": "coding", "mbpp_plus": "coding", "ifeval": "instruction",
    "arc_challenge": "",
}  # fmt: skip
DOMAINS = ("coding", "math", "instruction")
TA = "task_arithmetic"
LEVELS = {("", "base", ""): 60, (TA, "merged", ""): 70}
AVERAGES = {"featcal": 80, "anchor": 66, "surgery": 74, "prob_surgery": 74}
LEVELS |= {
    (TA, method, setting): level
    for method, level in AVERAGES.items()
    for setting in ("suite", "paper")
}
ROLES = dict(
    flan_t5_base="glue", flan_t5_large="glue", llama_3b="mergebench", llama_8b="mergebench"
)


def write_language(folder: Path, suite: str) -> None:
    """Scores, references, settings and run records of the four language models, their tasks, and
    how these were chosen.
    """
    for role, pool in ROLES.items():
        write_text_role(folder, suite, role, pool)
    tasks = {
        task: _task("Invented.", "A prompt?", "an answer") for task in (*GLUE, *DOMAINS, *TESTS)
    }
    counts = {"train": 10, "validation": 5, "test": 5}
    pools = {"glue": GLUE, "mergebench": list(DOMAINS)}
    told = dict(suite=suite, texts=counts, pools=pools, tests={t: t for t in TESTS}, tasks=tasks)
    write_json(folder / "language.json", told)


def write_text_role(folder: Path, suite: str, role: str, pool: str) -> None:
    scored, scores = folder / f"scores/{role}-{pool}", list(_scores(suite, role, pool))
    write_answers(scored / "scores.csv", scores)
    shared = {"role": role, "pool": pool, "upstream": TA}
    values = {"ridge": 0.00001, "anchor_blend": 2.0, "interpolation": 0.6}
    reading = {"split": "train", "decoder": "answer", "counted": "all", "tokens": None}
    run = shared | dict(
        setting="paper", samples=256, batch=32, seeds=[42], calibration=values, reading=reading
    )
    trained = dict(
        training={"rank": 3, "steps": 1000, "features": "raw"}, draw={"samples": 256}, seeds=[42]
    )
    adapted = {
        f"{role}-{pool}-{TA}-surgery": shared
        | {"method": "surgery", "settings": {"suite": trained}}
    }
    write_json(
        scored / "settings.json",
        {"calibrate": {f"{role}-{pool}-{TA}-paper": run}, "adapt": adapted},
    )
    record = dict(seconds={"calibrate_language": 4.0}, host={"cpu": "invented"}, commit="0" * 40)
    write_json(scored / "run.json", record)


def _scores(suite, role, pool):
    larger = role in ("flan_t5_large", "llama_8b")
    tasks = GLUE if pool == "glue" else list(TESTS)
    models = {
        key: level + (2 if larger else 0) - (4 if larger and key[1] == "featcal" else 0)
        for key, level in LEVELS.items()
    }
    if pool == "glue":
        models["", "expert", ""] = 92 if larger else 90
    rows = [
        (key, task, level + 0.5 * i)
        for key, level in models.items()
        for i, task in enumerate(tasks)
    ]
    if pool == "mergebench":
        base = {task: value for (_, method, _), task, value in rows if method == "base"}
        moved = {(d, task): 10 if TESTS[task] == d else -10 for d in DOMAINS for task in tasks}
        rows += [
            (("", "expert", d), task, base[task] + change) for (d, task), change in moved.items()
        ]
    for (upstream, method, setting), task, value in rows:
        drawn = method in ("featcal", "surgery", "prob_surgery")
        words = dict(
            suite=suite, role=role, pool=pool, upstream=upstream, method=method, setting=setting
        )
        metric = "spearman" if task == "stsb" else "accuracy"
        yield words | dict(
            task=task, metric=metric, seed=42 if drawn else "", value=float(value), count=400
        )


def _task(description, prompt, answer):
    rows = {"train": 10, "validation": 5, "test": 5}
    return dict(
        kind="folder",
        description=description,
        rows=rows,
        example={"prompt": prompt, "answer": answer},
    )
