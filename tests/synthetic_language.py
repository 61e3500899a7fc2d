"""Invented results of language models, like synthetic_results.py for texts.

On GLUE base 60, merged 70, Surgery 74, FeatCal 80, experts 90; a domain's expert is 10 above the base
on its own tests and 10 below elsewhere. The larger models have 2 more but gain less.
"""

from pathlib import Path

from synthetic_correct import model, write_answers

GLUE = ["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb"]
TESTS = {
    "math500": "math", "gsm8k": "math", "humaneval_plus": "coding", "mbpp_plus": "coding", "ifeval": "instruction",
    "arc_challenge": "",
}  # fmt: skip
DOMAINS = ("coding", "math", "instruction")
TA = "task_arithmetic"
LEVELS = {("", "base", ""): 60, (TA, "merged", ""): 70}
AVERAGES = {"featcal": 80, "anchor": 66, "surgery": 74, "prob_surgery": 74}
LEVELS |= {(TA, m, setting): n for m, n in AVERAGES.items() for setting in ("suite", "paper")}
ROLES = dict(
    flan_t5_base="glue", flan_t5_large="glue", llama_3b="mergebench", llama_8b="mergebench"
)


def write_language(folder: Path, suite: str) -> None:
    for role, pool in ROLES.items():
        write_answers(folder / f"scores/{role}-{pool}/scores.csv", list(_scores(suite, role, pool)))


def _scores(suite, role, pool):
    larger = role in ("flan_t5_large", "llama_8b")
    tasks = GLUE if pool == "glue" else list(TESTS)
    models = dict(LEVELS) | ({("", "expert", ""): 90} if pool == "glue" else {})
    rows = []
    for key, level in models.items():
        level += 2 * larger - 4 * (larger and key[1] == "featcal")
        rows += [(key, task, level + 0.5 * i) for i, task in enumerate(tasks)]
    if pool == "mergebench":
        base = {task: value for (_, method, _), task, value in rows if method == "base"}
        for domain in DOMAINS:
            moved = {t: base[t] + (10 if TESTS[t] == domain else -10) for t in tasks}
            rows += [(("", "expert", domain), task, value) for task, value in moved.items()]
    for key, task, value in rows:
        seeded = key[1] in ("featcal", "surgery", "prob_surgery")
        columns = dict(suite=suite, role=role, pool=pool) | model(key) | {"task": task}
        columns |= {"metric": "spearman" if task == "stsb" else "accuracy"}
        yield columns | {"seed": 42 if seeded else "", "value": float(value), "count": 400}
