"""Input size and steps of the experts on real images, by their own scores on validation images.

Trains the experts of eight tasks with each number of steps at the suite's size, and at each size
with the suite's number of steps, with one seed. Of either list the cheapest is taken that is at most
one paired standard error below the best. Writes reproduction/real_images/choice_steps.json after
each. Needs the pictures: dvc repro pipeline/prepare/dvc.yaml:prepare_photos

  python scripts/choose_steps.py
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from featcal.files import write_json
from reproduction.engine.context import HEADS, Setup, load_setup
from reproduction.stages.prepare import FIRST, model_folder, write_vision_and_heads

STEPS, SIZES = (30, 60, 120, 240), (42, 56, 70)
OUT = Path(__file__).parents[1] / "reproduction" / "real_images" / "choice_steps.json"


def main() -> None:
    setup = load_setup("vit_s-8")
    photos = setup.context.suite.photos
    model = model_folder(setup.context.root, photos.roles["vit_s"].model, setup.context.pins)
    lists = {
        "steps": [(photos.size, steps) for steps in STEPS],
        "size": [(size, photos.fine_tune.steps) for size in SIZES],
    }
    right: dict[tuple[int, int], dict[str, list[bool]]] = {}
    for size, steps in dict.fromkeys(chain(*lists.values())):
        with TemporaryDirectory() as folder:
            store = Path(folder)
            write_vision_and_heads(model, setup.data, setup.tasks, size, store)
            jobs = {task: (setup, task, store, steps) for task in setup.tasks}
            right[size, steps] = setup.context.run(f"{size} pixels, {steps} steps", trained, jobs)
        table = {name(trial): scores(flags) for trial, flags in right.items()}
        write_json(OUT, {"validation": table})
    chosen = {key: chosen_of(trials, right) for key, trials in lists.items()}
    write_json(OUT, {"validation": table, **chosen})


def trained(setup: Setup, task: str, store: Path, steps: int) -> list[bool]:
    """Return which validation images an expert with this number of steps gets right."""
    from safetensors.torch import load_file

    from featcal.evaluation.accuracy import evaluate_pool
    from featcal.models.load import load_as_calibrated
    from reproduction.prepare.fine_tune import fine_tune
    from reproduction.prepare.sources import load_task

    recipe, base = setup.context.suite.photos.fine_tune.but(steps=steps), store / "base"
    heads, read = load_file(store / HEADS), partial(load_task, setup.data, task)
    samples = {task: read("train", base)}
    expert = fine_tune(load_as_calibrated(base), heads, samples, recipe, FIRST)
    head = {task: heads[f"head/{task}"]}
    flags = evaluate_pool({"expert": expert}, {task: read("validation", base)}, head, None, 64)
    return [bool(flag) for flag in flags["expert"][task]]


def name(trial: tuple[int, int]) -> str:
    return f"{trial[0]} pixels, {trial[1]} steps"


def scores(right: dict[str, list[bool]]) -> dict[str, float]:
    """Return the accuracy on each task and their average, in percent."""
    accuracies = {task: round(100 * float(np.mean(flags)), 2) for task, flags in right.items()}
    return {**accuracies, "average": round(sum(accuracies.values()) / len(accuracies), 2)}


def chosen_of(trials: Sequence[tuple[int, int]], right: Any) -> dict[str, Any]:
    """Return the cheapest trial at most one paired standard error below the best, and distances."""
    means = {
        trial: np.mean([np.mean(flags) for flags in right[trial].values()]) for trial in trials
    }
    best, below = max(means, key=means.__getitem__), {}
    for trial in trials:
        pairs = [(right[best][task], flags) for task, flags in right[trial].items()]
        gaps = [np.subtract(*pair, dtype=float) for pair in pairs]
        error = np.sqrt(sum(gap.var(ddof=1) / len(gap) for gap in gaps)) / len(gaps)
        below[trial] = 100 * (means[best] - means[trial]), 100 * error
    chosen = min(trial for trial, (gap, error) in below.items() if gap <= error)
    listed = {name(t): {"below": round(g, 2), "error": round(e, 2)} for t, (g, e) in below.items()}
    return {"chosen": name(chosen), "against the best": listed}


if __name__ == "__main__":
    main()
