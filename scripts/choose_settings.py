"""λ and α of FeatCal for the mini suite's language models, on validation texts; ρ stays the
paper's.

The models were chosen before and are frozen; test texts are not looked at. Writes
reproduction/mini/language/settings_choice.json; the best average of a family is in params.yaml
as the setting `suite` of both its sizes. Needs the prepared and merged models: dvc repro
pipeline/models/dvc.yaml:merge_role@…

  python scripts/choose_settings.py flan_t5_base-glue llama_3b-mergebench
"""

import argparse
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import featcal
from featcal.files import read_json, write_json
from featcal.models.load import load_model, load_tokenizer
from reproduction.engine.context import Context, Setup, load_context
from reproduction.engine.samples import stream
from reproduction.engine.workers import fan_out
from reproduction.experiments import DOMAIN_POOL, Draw, role_and_pool

RIDGES = (1.0e-5, 1.0e-3, 1.0e-1, 1.0, 10.0)
INTERPOLATIONS = (0.3, 0.6, 0.9)
ROWS = 150  # of each task or test
FOUND = Path(__file__).parents[1] / "reproduction" / "mini" / "language" / "settings_choice.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("key", nargs="+")
    context, known = load_context(), read_json(FOUND) if FOUND.is_file() else {}
    for key in parser.parse_args().key:
        jobs: dict[str, tuple[Any, ...]] = {"merged": (context, key, None, None)}
        for ridge, interpolation in product(RIDGES, INTERPOLATIONS):
            jobs[f"ridge {ridge:g}, interpolation {interpolation:g}"] = (
                context,
                key,
                ridge,
                interpolation,
            )
        scores = dict(fan_out(key, average, jobs, context.suite.workers))
        best = max((name for name in scores if name != "merged"), key=lambda name: scores[name])
        known[key] = {"rows": ROWS, "best": best, "averages": {name: scores[name] for name in jobs}}
        print(key, best, scores)
        write_json(FOUND, known)


def average(context: Context, key: str, ridge: float | None, interpolation: float | None) -> float:
    """Average score on validation texts of the merged model, or of one calibration of it."""
    role, pool = role_and_pool(key)
    layout, run = context.layout, context.experiments.calibrate[f"{key}-task_arithmetic-paper"]
    base, merged, tasks = (
        layout.base(role, pool),
        Setup(context, role, pool).merged("task_arithmetic"),
        context.suite.tasks_of(role, pool),
    )
    if ridge is None or interpolation is None:
        return score(context, role, pool, load_model(merged))
    assert run.calibration is not None
    draw = Draw(stream="train", samples=run.samples, batch=run.batch, seed=run.seeds[0])
    result = featcal.calibrate(
        merged,
        base=base,
        experts={task: layout.expert(role, pool, task) for task in tasks},
        batches={
            task: stream(Setup(context, role, pool), task, draw, run.reading) for task in tasks
        },
        settings=run.calibration.but(ridge=ridge, interpolation=interpolation),
    )
    return score(context, role, pool, result.model)


def score(context: Context, role: str, pool: Any, model: Any) -> float:
    """Average over the tasks of GLUE, or over the tests."""
    tokenizer = load_tokenizer(context.layout.base(role, pool))
    values = (
        _on_tests(context, model, tokenizer)
        if pool == DOMAIN_POOL
        else _on_glue(context, role, pool, model, tokenizer)
    )
    return round(sum(values.values()) / len(values), 2)


def _on_glue(
    context: Context, role: str, pool: Any, model: Any, tokenizer: Any
) -> Mapping[str, float]:
    from reproduction.language.generation import score_glue
    from reproduction.prepare.texts import load_texts

    scores = {}
    for task in context.suite.tasks_of(role, pool):
        samples = [
            (one.text, one.target or "")
            for one in list(load_texts(context.layout.texts, task, "validation"))[:ROWS]
        ]
        scores[task] = score_glue(model, tokenizer, task, samples, batch=64)[0]
    return scores


def _on_tests(context: Context, model: Any, tokenizer: Any) -> Mapping[str, float]:
    from reproduction.language.harness import score_tests
    from reproduction.language.tests import load_tests

    tests = load_tests(context.layout.texts, context.suite.language, "validation")
    return {
        key: value for key, (value, _, _) in score_tests(model, tokenizer, tests, batch=64).items()
    }


if __name__ == "__main__":
    main()
