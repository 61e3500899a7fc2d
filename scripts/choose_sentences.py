"""Chooses the training of the experts of sentence encoders on validation rows. Writes
reproduction/real_text/choice.json.

Judged by the experts' own scores alone, on three tasks of the pool of 8, before anything was
merged: rate and steps. Of what lies within half a point of the best average, the fewest steps are
taken, then the best. All weights learn, as those of the paper's experts do.
"""

import json
import time
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from reproduction.engine.context import HEADS, load_context
from reproduction.engine.workers import fan_out
from reproduction.prepare.suite import FineTuneSentences
from reproduction.stages.prepare import model_folder, write_encoder_and_heads

TASKS = ("banking77", "csabstruct", "rt_polarity")
STEPS_AND_RATES = ((100, 1.0e-4), (100, 2.0e-4), (100, 4.0e-4), (200, 2.0e-4))
RECIPES = [FineTuneSentences(steps=steps, lr=rate) for steps, rate in STEPS_AND_RATES]
ENOUGH = 0.5  # percentage points
OUT = Path(__file__).parents[1] / "reproduction" / "real_text" / "choice.json"


def main() -> None:
    """Try every combination on one suite's first encoder."""
    context = load_context()
    role = next(iter(context.suite.sentences.roles))
    model = context.suite.sentences.roles[role].model
    texts = context.root / context.suite.sentences.texts
    encoder = model_folder(context.root, model, context.pins)
    with TemporaryDirectory() as folder:
        store = Path(folder)
        write_encoder_and_heads(encoder, texts, TASKS, RECIPES[0].temperature, store)
        pairs = product(enumerate(RECIPES), TASKS)
        jobs = {f"{i} {task}": (recipe, task, texts, store) for (i, recipe), task in pairs}
        scores = dict(fan_out("expert", score, jobs, context.suite.workers))
    rows = []
    for i, recipe in enumerate(RECIPES):
        right, seconds = zip(*(scores[f"{i} {task}"] for task in TASKS), strict=True)
        row = {"steps": recipe.steps, "lr": recipe.lr, "frozen": list(recipe.frozen)}
        row["validation"] = dict(zip(TASKS, right, strict=True))
        row |= {"average": round(fmean(right), 2), "seconds": round(fmean(seconds), 1)}
        rows.append(row)
    best = max(row["average"] for row in rows)
    enough = (row for row in rows if row["average"] >= best - ENOUGH)
    chosen = min(enough, key=lambda row: (row["steps"], -row["average"]))
    OUT.write_text(json.dumps({"rows": rows, "chosen": chosen}, indent=1) + "\n", "utf-8")


def score(recipe: FineTuneSentences, task: str, texts: Path, store: Path) -> tuple[float, float]:
    """Percent of validation rows that an expert gets right, and the seconds of its training."""
    from safetensors.torch import load_file

    from featcal.evaluation.accuracy import evaluate_pool, percent
    from featcal.models.load import load_model
    from reproduction.prepare.fine_tune import fine_tune
    from reproduction.prepare.sources import load_task

    base, heads = store / "base", load_file(store / HEADS)
    head = heads[f"head/{task}"]
    train, validation = (load_task(texts, task, split, base) for split in ("train", "validation"))
    start = time.perf_counter()
    expert = fine_tune(load_model(base), heads, {task: train}, recipe, seed=0)
    seconds = time.perf_counter() - start
    right = evaluate_pool({"expert": expert}, {task: validation}, {task: head}, None)
    return round(percent(right["expert"][task]), 2), seconds


if __name__ == "__main__":
    main()
