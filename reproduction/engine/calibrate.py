"""Make models of FeatCal and of its controls from merged models; the stage `calibrate`."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from reproduction.engine.context import Setup, load_setup
from reproduction.engine.samples import plan_of, streams
from reproduction.engine.spec import ModelSpec, anchors, calibrated, replacing
from reproduction.engine.workers import report_progress
from reproduction.experiments import ANCHOR, RESCALED

CALIBRATED = (ANCHOR, RESCALED, "featcal")


def run(key: str) -> None:
    """Write outputs/<suite>/calibrated/<role>-<pool>/<merger>-<setting>/seed<NN>/ of a role and
    pool; of language models also anchor/ next to it.
    """
    setup = load_setup(key)
    with setup.context.recorded("calibrate", key) as record:
        models = [*(anchors(setup) if setup.of_texts else ()), *calibrated(setup)]
        with replacing(setup, "calibrate", "calibrated", models) as made:
            seconds = calibrate_all(key, setup, made)
        record["cost"] = cost = dict[str, dict[str, Any]]()
        for model in made:
            if model.method == "featcal":
                run = model.name.partition("/")[0]  # its key in params.yaml
                own = cost.setdefault(f"calibrate@{run}", {})
                own[f"seed {model.seed}"] = {"seconds": round(seconds[model.name], 3)}


def calibrate_all(label: str, setup: Setup, models: Iterable[ModelSpec]) -> dict[str, float]:
    """Make the models of FeatCal and of its controls; return the seconds of each by its name."""
    jobs = {m.name: (label, setup, m) for m in models if m.method in CALIBRATED}
    return setup.context.run(f"{label} calibrate", calibrate, jobs)


def calibrate(label: str, setup: Setup, model: ModelSpec) -> float:
    """Make one calibrated or rescaled model; return the seconds of the calibration."""
    import featcal

    start = perf_counter()
    if model.method != "featcal":
        rescale(setup, model.upstream, model.settings, model.folder)
        return perf_counter() - start
    assert model.draw is not None
    name = f"{label} {model.name}"
    work = f"calibrate-{name}".replace(" ", "-").replace("/", "-")
    batches = streams(setup, model.draw, model.reading, model.damage)
    start = perf_counter()
    featcal.calibrate(
        setup.merged(model.upstream),
        base=setup.base,
        experts=setup.experts,
        batches=batches,
        settings=model.settings,
        plan=plan_of(setup, model.reading),
        device=setup.context.device,
        out=model.folder,
        work=setup.context.layout.unfinished(work),
        progress=partial(report_progress, name),
    )
    return perf_counter() - start


def rescale(setup: Setup, upstream: str, factor: float, out: Path | None = None) -> Any:
    """Return base + factor · (merged − base), or write it to the folder `out`.

    It is task arithmetic of one expert, the merged model.
    """
    import featcal
    from featcal.models.load import load_as_calibrated

    if out is not None:
        one: Any = {"merged": setup.merged(upstream)}
        return featcal.merge("task_arithmetic", setup.base, one, scale=factor, out=out)
    base, merged = (load_as_calibrated(path) for path in (setup.base, setup.merged(upstream)))
    return featcal.merge("task_arithmetic", base, {"merged": merged}, scale=factor)
