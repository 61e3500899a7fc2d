"""Make models and adapters, for the stages `merge`, `calibrate` and `adapt` and for studies."""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from shutil import rmtree
from time import perf_counter
from typing import Any

from safetensors.torch import load_file, save_file

import featcal
from featcal.baselines.adapters import Pair
from featcal.baselines.training import adapters_for, as_module, pairs_of_several
from featcal.merging.registry import method_named
from featcal.models.load import load_as_calibrated
from reproduction.engine.context import Setup, load_setup
from reproduction.engine.samples import plan_of, stream, streams
from reproduction.engine.spec import ModelSpec, adapted, anchors, calibrated, merged, replacing
from reproduction.engine.workers import console, report_progress
from reproduction.experiments import ANCHOR, RESCALED, SampleDraw

CALIBRATED = (ANCHOR, RESCALED, "featcal")


def make(label: str, setup: Setup, models: Sequence[ModelSpec]) -> None:
    """Make merged models, then calibrated ones, then adapters."""
    merge_all(label, setup, models)
    calibrate_all(label, setup, models)
    adapt_all(label, setup, models)


def run_merge(key: str) -> None:
    """Write outputs/<suite>/merged/<role>-<pool>/<merger>/ of every merger."""
    setup = load_setup(key)
    with setup.context.recorded("merge", key):
        models = list(merged(setup)) if setup.available else []
        rmtree(setup.folder("merged"), ignore_errors=True)
        merge_all(key, setup, models)
        if not models:
            setup.context.not_run(f"merge {key}", setup.folder("merged"))


def merge_all(label: str, setup: Setup, models: Iterable[ModelSpec]) -> None:
    """Make the merged models, first those that look at samples, since they take longest."""
    mergers = sorted((m for m in models if m.method == "merged"), key=lambda m: m.draw is None)
    setup.context.run(f"{label} merge", merge, {m.name: (setup, m) for m in mergers})


def merge(setup: Setup, model: ModelSpec) -> None:
    run, arguments = model.settings, {"device": setup.context.device, "out": model.folder}
    if model.draw is not None:
        arguments["batches"] = streams(setup, model.draw)
        arguments["head"] = setup.heads if "head" in method_named(run.method).needs else None
        arguments["n_jobs"] = setup.context.suite.workers or 1  # adamerging takes longest
        arguments["progress"] = lambda line: console.print(f"  {line}", soft_wrap=True)
    featcal.merge(run.method, setup.base, setup.experts, **arguments, **(run.options or {}))


def run_calibrate(key: str) -> None:
    """Write <merger>-<setting>/seed<NN>/ of a role and pool; for language models also anchor/."""
    setup = load_setup(key)
    with setup.context.recorded("calibrate", key) as record:
        planned = [*(anchors(setup) if setup.of_texts else ()), *calibrated(setup)]
        with replacing(setup, "calibrate", "calibrated", planned) as models:
            seconds = calibrate_all(key, setup, models)
        record["cost"] = cost = dict[str, dict[str, Any]]()
        for model in (model for model in models if model.method == "featcal"):
            run = model.name.partition("/")[0]  # its key in params.yaml
            by_seed = cost.setdefault(f"calibrate@{run}", {})
            by_seed[f"seed {model.seed}"] = {"seconds": round(seconds[model.name], 3)}


def calibrate_all(label: str, setup: Setup, models: Iterable[ModelSpec]) -> dict[str, float]:
    """Make the models of FeatCal and of its controls; return the seconds of each by its name."""
    jobs = {m.name: (label, setup, m) for m in models if m.method in CALIBRATED}
    return setup.context.run(f"{label} calibrate", calibrate, jobs)


def calibrate(label: str, setup: Setup, model: ModelSpec) -> float:
    """Make one calibrated or rescaled model; return the seconds of the calibration."""
    if model.method != "featcal":
        rescale(setup, model.upstream, model.settings, model.folder)
        return 0.0
    context, name = setup.context, f"{label} {model.name}"
    work = context.unfinished(f"calibrate-{name}".replace(" ", "-").replace("/", "-"))
    arguments: dict[str, Any] = {"base": setup.base, "experts": setup.experts, "work": work}
    arguments["batches"] = streams(setup, model.draw, model.reading)
    arguments |= {"settings": model.settings, "plan": plan_of(setup, model.reading)}
    arguments |= {"device": context.device, "progress": partial(report_progress, name)}
    start = perf_counter()
    featcal.calibrate(setup.merged(model.upstream), **arguments, out=model.folder)
    return perf_counter() - start


def rescale(setup: Setup, upstream: str, factor: float, out: Path | None = None) -> Any:
    """Return base + factor · (merged − base), task arithmetic of one expert, or write it to `out`."""
    base, expert = setup.base, setup.merged(upstream)
    if out is None:
        base, expert = load_as_calibrated(base), load_as_calibrated(expert)
    return featcal.merge("task_arithmetic", base, {"merged": expert}, scale=factor, out=out)


def run_adapt(key: str) -> None:
    """Write outputs/<suite>/adapted/<role>-<pool>/<merger>-<adapter>/<setting>/seed<NN>/."""
    setup = load_setup(key)
    replaced = replacing(setup, "adapt", "adapted", adapted(setup))
    with setup.context.recorded("adapt", key), replaced as models:
        adapt_all(key, setup, models)


def adapt_all(label: str, setup: Setup, models: Iterable[ModelSpec]) -> None:
    adapters = [model for model in models if model.corrects]
    if not adapters:
        return
    context, draws = setup.context, dict[SampleDraw, dict[str, None]]()  # merged models by samples
    for model in filter(_encodes_once, adapters):
        draws.setdefault(model.draw, {})[model.upstream] = None
    # longest first
    adapters.sort(key=lambda m: (-getattr(m.settings, "steps", 0), m.method == "surgery"))
    with context.scratch("adapt") as folder:
        count = min(context.suite.workers or 1, len(setup.tasks)) if draws else 0
        shared = [setup.tasks[number::count] for number in range(count)]
        jobs = {", ".join(tasks): (setup, tasks, draws, folder) for tasks in shared}
        context.run(f"{label} encode", _encode, jobs)
        context.run(f"{label} adapt", _train, {m.name: (setup, m, folder) for m in adapters})


def _encodes_once(model: ModelSpec) -> bool:
    """Return whether the frozen models see a sample once; a mean shift has no steps."""
    return bool(getattr(model.settings, "encode", "once") == "once")


def _features(folder: Path, upstream: str, draw: SampleDraw, task: str) -> Path:
    samples = f"{draw.stream}-{draw.samples or 'all'}-{draw.batch}-{draw.seed}"
    return folder / upstream / samples / f"{task}.safetensors"


def _encode(
    setup: Setup, tasks: Sequence[str], draws: dict[SampleDraw, dict[str, None]], folder: Path
) -> None:
    """Write features of every draw by the merged models that see it and by the task's expert."""
    device, head = setup.context.device, setup.projection()
    names = dict.fromkeys(name for upstreams in draws.values() for name in upstreams)
    merged = {name: as_module(setup.merged(name), device) for name in names}
    for task in tasks:
        expert = as_module(setup.expert(task), device)
        for draw, upstreams in draws.items():
            batches = stream(setup, task, draw)
            models = {name: merged[name] for name in upstreams}
            for name, pair in pairs_of_several(task, models, expert, batches, head).items():
                path = _features(folder, name, draw, task)
                path.parent.mkdir(parents=True, exist_ok=True)
                save_file({n: tensor.contiguous() for n, tensor in vars(pair).items()}, path)


def _train(setup: Setup, model: ModelSpec, folder: Path) -> None:
    """Train the adapters of all tasks; as published, the frozen models run for every batch."""
    draw, device, upstream = model.draw, setup.context.device, model.upstream
    progress = None if setup.context.suite.workers else partial(report_progress, model.name)
    if _encodes_once(model):
        files = {t: _features(folder, upstream, draw, t) for t in sorted(setup.tasks)}
        pairs = {}
        for task, file in files.items():
            pair = load_file(file)  # its sizes are read on the CPU
            pairs[task] = Pair(pair["merged"].to(device), pair["expert"].to(device), pair["sizes"])
        adapters = model.settings.fit(pairs, draw.seed, progress)
    else:
        arguments = (streams(setup, draw), setup.projection(), draw.seed, device, progress)
        merged = setup.merged(upstream)
        adapters = adapters_for(model.settings, merged, setup.experts, *arguments)
    adapters.save(model.folder)
