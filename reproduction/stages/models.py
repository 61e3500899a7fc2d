"""Stages `merge`, `calibrate`, `adapt` and `multitask`: the models of params.yaml."""

from typing import Any

from reproduction.engine import make, spec
from reproduction.engine.context import Context, Setup, load_context, pick, runs_of
from reproduction.engine.workers import fan_out
from reproduction.prepare.experts import MultitaskJob, write_multitask


def merge(key: str) -> None:
    """Write outputs/<suite>/merged/<role>-<pool>-<merger>/ of a role and pool, or of one merger of
    them; empty folders where the suite does not run it.
    """
    context = load_context()
    runs = runs_of("merge", context.experiments.merge, key)
    with context.recorded("merge", key):
        setup = _setup(context, runs)
        models = [m for m in spec.merged(setup) if m.name in runs] if _plays(setup) else []
        for name in runs.keys() - {model.name for model in models}:
            context.not_run(f"merge {name}", context.layout.merged(name))
        make.merge_all(key, setup, models)


def calibrate(key: str) -> None:
    """Write outputs/<suite>/calibrated/<merged>-<setting>/seed<NN>/ of a role and pool, or of one
    merged model of them; of language models also ablated/<merged>-<setting>/anchor/.

    Folders are empty where the suite does not run it.
    """
    context = load_context()
    runs, layout = runs_of("calibrate", context.experiments.calibrate, key), context.layout
    with context.recorded("calibrate", key) as record:
        setup = _setup(context, runs)
        made = [*(spec.anchors(setup) if setup.of_texts else ()), *spec.calibrated(setup)]
        models = [m for m in made if _plays(setup) and _run_of(m) in runs]
        for name in runs.keys() - {_run_of(model) for model in models}:
            context.not_run(f"calibrate {name}", layout.calibrated(name, 0).parent)
            if setup.of_texts:
                context.not_run(f"calibrate {name}, anchor", layout.ablated(name))
        seconds = make.calibrate_all(key, setup, models)
        record["cost"] = cost = dict[str, dict[str, Any]]()
        for model in models:
            if model.method == "featcal":
                own = cost.setdefault(f"calibrate@{_run_of(model)}", {})
                own[f"seed {model.seed}"] = {"seconds": round(seconds[model.name], 3)}


def adapt(key: str) -> None:
    """Write outputs/<suite>/adapted/<merged>-<adapter>/<setting>/seed<NN>/ of a role and pool, or of
    one merged model of them; empty folders where the suite does not run it.
    """
    context = load_context()
    runs = runs_of("adapt", context.experiments.adapt, key)
    with context.recorded("adapt", key):
        setup = _setup(context, runs)
        models = [m for m in spec.adapted(setup) if _run_of(m) in runs]
        models = models if _plays(setup) else []
        for name in runs.keys() - {_run_of(model) for model in models}:
            context.not_run(f"adapt {name}", context.layout.adapted(name))
        make.adapt_all(key, setup, models)


def _setup(context: Context, runs: Any) -> Setup:
    """Return the role and pool that the runs of one stage have in common."""
    run = next(iter(runs.values()))
    return Setup(context, run.role, run.pool)


def _plays(setup: Setup) -> bool:
    return setup.context.plays(setup.role, setup.pool)


def _run_of(model: spec.ModelSpec) -> str:
    """Return the key of the run in params.yaml that a model belongs to."""
    return model.name.partition("/")[0]


def multitask(key: str) -> None:
    """Write outputs/<suite>/multitask/<key>/, one model trained on all tasks of a role and pool; an
    empty folder where the suite has none.
    """
    context = load_context()
    chosen, suite = pick("multitask", context.experiments.multitask, key), context.suite
    out = context.layout.multitask(key)
    with context.recorded("multitask", key):
        if chosen is None or not context.plays(chosen.role, chosen.pool):
            context.not_run(f"multitask {key}", out)
            return
        setup = Setup(context, chosen.role, chosen.pool)
        sentences = chosen.role in suite.sentences.roles
        recipe: Any = suite.sentences.fine_tune if sentences else suite.fine_tune
        recipe = recipe.but(steps=chosen.steps) if chosen.steps else recipe
        job = MultitaskJob(setup.tasks, chosen.model, recipe, chosen.seed, suite.device)
        data, pins = context.layout.data_of(chosen.role), context.layout.pins
        jobs = {key: (job, setup.base.parent, data, pins, out)}
        dict(fan_out("multitask", write_multitask, jobs, min(suite.workers, 1)))
