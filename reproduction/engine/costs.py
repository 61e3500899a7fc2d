"""Time, memory and energy of making one model, its samples in memory."""

import ctypes
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import featcal
from featcal.baselines.adapters import Adapters
from featcal.baselines.training import adapters_for
from reproduction.engine.context import Setup
from reproduction.engine.samples import draw_at_most, load_split
from reproduction.engine.spec import ModelSpec
from reproduction.engine.workers import Jobs, fan_out
from reproduction.experiments import TRAINED_ADAPTERS, SampleDraw, Study
from reproduction.profiling import profiled

METHODS = ("featcal", *TRAINED_ADAPTERS)
BatchesInMemory = Mapping[str, Sequence[Mapping[str, Any]]]  # by task


def measure(setup: Setup, model: ModelSpec, audit: Mapping[int, Path]) -> dict[str, Any]:
    """Make one model, its samples in memory, and return its seconds, megabytes and watt-hours.

    A brief run comes first: what a process pays once is not measured. Models get the stages' bytes.
    """
    batches = in_memory(setup, model.draw)
    first = {t: [{n: value[:1] for n, value in b[0].items()}] for t, b in batches.items()}
    with TemporaryDirectory(dir=model.folder.parent) as folder:
        brief = model.settings.but(steps=1) if model.corrects else model.settings
        make(setup, model.but(settings=brief, folder=Path(folder, "warm_up")), first, {})
    return_freed_memory()
    on_gpu = setup.context.device.type == "cuda"
    _, profile = profiled(partial(make, setup, model, batches, audit), on_gpu)
    counts = (sum(len(next(iter(b.values()))) for b in series) for series in batches.values())
    columns = {**model.row_keys, "samples": model.draw.samples, "images": min(counts)}
    return {**columns, "encode": getattr(model.settings, "encode", "once"), **asdict(profile)}


def costs(study: Study, setup: Setup, jobs: Jobs, n_jobs: int) -> dict[str, Any]:
    """Return the costs of jobs of `measure` for the run record; those with most samples start first.

    Where the suite has workers each has one thread: on models this small two are slower than one.
    """
    threads = 1 if setup.context.suite.workers else None
    longest_first = dict(sorted(jobs.items(), key=lambda job: -job[1][1].draw.samples))
    results = dict(fan_out(study.label, measure, longest_first, n_jobs, threads, fresh=True))
    record = {"cost": [results[name] for name in jobs], "at_once": n_jobs, "threads": threads}
    return record | {"settings": study.model_dump()}


def in_memory(setup: Setup, draw: SampleDraw) -> BatchesInMemory:
    """Return the batches of a draw; all samples of a task that has fewer."""
    batches = {}
    for task in setup.tasks:
        samples = load_split(setup, task, draw.split)
        indices = draw_at_most(draw.samples, task, len(samples.labels), draw.seed)
        batches[task] = list(samples.batches(indices, draw.batch))
    return batches


def make(
    setup: Setup, model: ModelSpec, batches: BatchesInMemory, audit: Mapping[int, Path]
) -> None:
    merged, device, out = setup.merged(model.upstream), setup.context.device, model.folder
    if not model.corrects:
        arguments: dict[str, Any] = {"settings": model.settings, "device": device, "out": out}
        arguments |= {"base": setup.base, "experts": setup.experts, "batches": batches}
        featcal.calibrate(merged, **arguments, resume=False)
        return
    start = (model.settings, merged, setup.experts, batches, setup.projection())
    audits = {step: partial(Adapters.save, folder=folder) for step, folder in audit.items()}
    adapters_for(*start, model.seed, device, None, audits).save(out)


def return_freed_memory() -> None:
    """Make glibc return freed memory; a run that is served from it would seem to need none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
