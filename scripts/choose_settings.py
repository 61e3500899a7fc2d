"""λ and α of FeatCal for the mini suite's language models, on validation texts; ρ stays the
paper's.

The models were chosen before and are frozen; test texts are not looked at. Writes
reproduction/mini/language/settings_choice.json; the best average of a family is in params.yaml
as the setting `suite` of both its sizes. Needs the prepared and merged models: dvc repro
pipeline/merge/dvc.yaml:merge@…

  python scripts/choose_settings.py flan_t5_base-glue llama_3b-mergebench
"""

import argparse
from itertools import product
from pathlib import Path
from typing import Any

import featcal
from featcal.files import read_json, write_json
from featcal.models.load import load_model, load_tokenizer
from reproduction.engine.context import Setup, load_setup
from reproduction.engine.samples import streams
from reproduction.engine.score import average as mean
from reproduction.engine.score import language_scores
from reproduction.engine.workers import fan_out
from reproduction.experiments import DOMAIN_POOL, SampleDraw
from reproduction.language.generation import score_glue
from reproduction.prepare.texts import load_texts

RIDGES = (1.0e-5, 1.0e-3, 1.0e-1, 1.0, 10.0)
INTERPOLATIONS = (0.3, 0.6, 0.9)
ROWS = 150  # of each task or test
OUT = Path(__file__).parents[1] / "reproduction" / "mini" / "language" / "settings_choice.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("key", nargs="+")
    record = read_json(OUT) if OUT.is_file() else {}
    for key in parser.parse_args().key:
        setup = load_setup(key)
        jobs: dict[str, tuple[Any, ...]] = {"merged": (setup, None, None)}
        for ridge, interpolation in product(RIDGES, INTERPOLATIONS):
            name = f"ridge {ridge:g}, interpolation {interpolation:g}"
            jobs[name] = (setup, ridge, interpolation)
        scores = dict(fan_out(key, average, jobs, setup.context.suite.workers))
        best = max((name for name in scores if name != "merged"), key=lambda name: scores[name])
        averages = {name: scores[name] for name in jobs}
        record[key] = {"rows": ROWS, "best": best, "averages": averages}
        print(key, best, scores)
        write_json(OUT, record)


def average(setup: Setup, ridge: float | None, interpolation: float | None) -> float:
    """Return the average score on validation texts of the merged model, or of one calibration of it."""
    run = setup.context.experiments.calibrate[f"{setup.key}-task_arithmetic-paper"]
    merged = setup.merged("task_arithmetic")
    if ridge is None or interpolation is None:
        return score(setup, load_model(merged))
    draw = SampleDraw(stream="train", samples=run.samples, batch=run.batch, seed=run.seeds[0])
    result = featcal.calibrate(
        merged,
        base=setup.base,
        experts=setup.experts,
        batches=streams(setup, draw, run.reading),
        settings=run.calibration.but(ridge=ridge, interpolation=interpolation),
    )
    return score(setup, result.model)


def score(setup: Setup, model: Any) -> float:
    """Return the average over the tasks of GLUE, or over the tests."""
    if setup.pool == DOMAIN_POOL:
        (scores,) = language_scores(setup, lambda _: model, {"": None}, "validation").values()
        return round(mean(scores), 2)
    tokenizer, values = load_tokenizer(setup.base), []
    for task in setup.tasks:
        texts = list(load_texts(setup.texts, task, "validation"))[:ROWS]
        samples = [(text.text, text.target or "") for text in texts]
        values.append(score_glue(model, tokenizer, task, samples, batch=64)[0])
    return round(sum(values) / len(values), 2)


if __name__ == "__main__":
    main()
