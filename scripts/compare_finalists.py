"""Would more samples change the default's choice? Measured on validation samples, with 256 of a task.

The default compares its candidates after a calibration on 32 samples. Here the one that it chooses
and *small ridge*, which gains most from more samples, are calibrated on all that it does not hold
out. Writes reproduction/report/finalists.json: the divergence from the experts on held-out samples,
and the average accuracy on validation samples. Needs the prepared models: dvc repro
pipeline/prepare/dvc.yaml:prepare_role@vit_s-8 pipeline/prepare/dvc.yaml:prepare_role@minilm-8

  python scripts/compare_finalists.py
"""

from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import featcal
from featcal.calibration import choose
from featcal.calibration.features import open_models
from featcal.files import write_json
from featcal.models.streamed import InMemoryModel
from reproduction.engine.context import load_setup, pick
from reproduction.engine.samples import Selection, streams
from reproduction.engine.score import for_all_tasks, model_scores
from reproduction.engine.workers import fan_out

KEYS, MERGERS = ("vit_s-8", "minilm-8"), ("average", "tsv_merge")
SAMPLES, SEED, CONTENDER = 256, 42, "small ridge"
OUT = Path(__file__).parents[1] / "reproduction" / "report" / "finalists.json"


def main() -> None:
    jobs = {f"{key}, {merger}": (key, merger) for key, merger in product(KEYS, MERGERS)}
    record = dict(fan_out("finalists", compare, jobs, 2, fresh=True))
    write_json(OUT, {name: record[name] for name in jobs})


def compare(key: str, merger: str) -> dict[str, dict[str, float]]:
    """Return divergence and accuracy of the chosen candidate and of the contender."""
    setup = load_setup(key)
    study: Any = pick("default", setup.context.experiments.studies["default"], key)
    base = setup.load(setup.base)
    experts = {task: setup.load(folder) for task, folder in setup.experts.items()}
    merged: Any = featcal.merge(merger, base, experts, **study.mergers[merger])
    draw = study.featcal_draw(samples=SAMPLES, seed=SEED)
    batches = {t: list(b) for t, b in streams(setup, draw, study.reading).items()}
    arguments: dict[str, Any] = {"base": base, "experts": experts, "block_drift": False}
    auto = featcal.calibrate(merged, batches=batches, **arguments)
    assert auto.choice is not None
    few, rest, held_out = (
        {task: choose.Part(b, mask) for task, b in batches.items()}
        for mask in choose.parts_of(SAMPLES)
    )
    settings = choose.CANDIDATES[CONTENDER]
    contender = featcal.calibrate(merged, batches=rest, settings=settings, **arguments)
    models = {auto.choice.chosen: auto.model, CONTENDER: contender.model}
    opened = open_models(merged, base, experts, None, "auto", whole=True, device=None, dtype=None)
    handles = {name: InMemoryModel(model) for name, model in models.items()}
    divergences = choose.divergences(opened, handles, held_out, few)
    scores = model_scores(setup, for_all_tasks(models), Selection("validation", study.scored))
    rows = {}
    for name in models:
        divergence = fmean(fmean(values[name]) for values in divergences.values())
        accuracy = fmean(score["value"] for score in scores[name].values())
        rows[name] = {"divergence": round(divergence, 4), "validation": round(accuracy, 2)}
    return rows


if __name__ == "__main__":
    main()
