"""Do the default's divergences order candidates as the tasks' heads do, on real encoders?

Without a head the default compares relations of features, or similarities to vectors of classes.
Here its candidates are calibrated as it does, on 24 of 32 samples a task, and compared on the other
8 by both and by KL through the tasks' heads; accuracy is on validation samples. Nothing is chosen by the result. Writes
reproduction/report/divergences.json. Needs prepared models: dvc repro
pipeline/prepare/dvc.yaml:prepare_role@{vit_s-8,minilm-8,mpnet-8}

  python scripts/compare_divergences.py [KEY...]
"""

import sys
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import featcal
from featcal.baselines.training import pool_features
from featcal.calibration import choose
from featcal.calibration.features import open_models
from featcal.files import read_json, write_json
from featcal.models.streamed import InMemoryModel
from reproduction.engine.context import load_setup, pick
from reproduction.engine.samples import Selection, streams
from reproduction.engine.score import average, for_all_tasks, model_scores
from reproduction.engine.workers import fan_out
from reproduction.studies.default import divergence

KEYS = ("vit_s-8", "minilm-8", "mpnet-8")
MERGERS = ("average", "task_arithmetic", "tsv_merge", "wudi_closed_form")
SAMPLES, SEED = 32, 42
OUT = Path(__file__).parents[1] / "reproduction" / "report" / "divergences.json"


def main() -> None:
    keys = sys.argv[1:] or KEYS
    jobs = {f"{key}, {merger}": (key, merger) for key, merger in product(keys, MERGERS)}
    record = read_json(OUT) if OUT.is_file() else {}
    record |= dict(fan_out("divergences", compare, jobs, 2, fresh=True))
    names = (f"{key}, {merger}" for key, merger in product(KEYS, MERGERS))
    write_json(OUT, {name: record[name] for name in names if name in record})


def compare(key: str, merger: str) -> dict[str, dict[str, float]]:
    """Return all divergences and the accuracy of every candidate and of the merged model."""
    setup = load_setup(key)
    study: Any = pick("default", setup.context.experiments.studies["default"], key)
    base = setup.load(setup.base)
    experts = {task: setup.load(folder) for task, folder in setup.experts.items()}
    merged: Any = featcal.merge(merger, base, experts, **study.mergers[merger])
    draw = study.featcal_draw(samples=SAMPLES, seed=SEED)
    batches = {t: list(b) for t, b in streams(setup, draw, study.reading).items()}
    few, _, held_out = (
        {task: choose.Part(b, mask) for task, b in batches.items()}
        for mask in choose.parts_of(SAMPLES)
    )
    models, arguments = {choose.MERGED: merged}, {"base": base, "experts": experts, "batches": few}
    for name, settings in choose.CANDIDATES.items():
        result = featcal.calibrate(merged, settings=settings, block_drift=False, **arguments)
        models[name] = result.model
    opened = open_models(merged, base, experts, None, "auto", whole=True, device=None, dtype=None)
    handles = {name: InMemoryModel(model) for name, model in models.items()}
    relations = choose.divergences(opened, handles, held_out, few)
    heads, P = setup.scaled_heads(), setup.projection()
    labels = {task: head if P is None else head @ P for task, head in heads.items()}
    classes = choose.divergences(opened, handles, held_out, few, labels)
    scores = model_scores(setup, for_all_tasks(models), Selection("validation", study.scored))
    rows = {}
    for name, model in models.items():
        pairs = pool_features(model, experts, held_out, P)
        by_head = (
            float(divergence(pair.merged, pair.expert, heads[task]).mean())
            for task, pair in pairs.items()
        )
        rows[name] = {
            "relations": round(fmean(fmean(values[name]) for values in relations.values()), 6),
            "classes": round(fmean(fmean(values[name]) for values in classes.values()), 6),
            "heads": round(fmean(by_head), 6),
            "validation": round(average(scores[name]), 3),
        }
    return rows


if __name__ == "__main__":
    main()
