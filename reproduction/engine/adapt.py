"""Train adapters; the stage `adapt`.

Samples are encoded once, then every training reads their features.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from reproduction.engine.context import Setup, load_setup
from reproduction.engine.samples import stream, streams
from reproduction.engine.spec import ModelSpec, adapted, replacing
from reproduction.engine.workers import report_progress
from reproduction.experiments import Draw

if TYPE_CHECKING:
    import torch

    from featcal.baselines.adapters import Pair

Drawn = tuple[Draw, str]  # samples of every task, and their damage


def run(key: str) -> None:
    """Write outputs/<suite>/adapted/<role>-<pool>/<merger>-<adapter>/<setting>/seed<NN>/ of a role
    and pool.
    """
    setup = load_setup(key)
    with (
        setup.context.recorded("adapt", key),
        replacing(setup, "adapt", "adapted", adapted(setup)) as models,
    ):
        adapt_all(key, setup, models)


def adapt_all(label: str, setup: Setup, models: Iterable[ModelSpec]) -> None:
    """Train the adapters of all tasks for every specification of them.

    First every sample is encoded, once by the expert of its task and once by each merged model;
    then every training reads those features.
    """
    wanted = [model for model in models if model.corrects]
    if not wanted:
        return
    context, seen = setup.context, dict[Drawn, dict[str, None]]()  # merged models by samples
    for model in wanted:
        if _once(model):
            assert model.draw is not None
            seen.setdefault((model.draw, model.damage), {})[model.upstream] = None
    with context.scratch("adapt") as folder:
        parts = min(context.suite.workers or 1, len(setup.tasks)) if seen else 0
        shared = [setup.tasks[number::parts] for number in range(parts)]
        jobs = {", ".join(tasks): (setup, tasks, seen, folder) for tasks in shared}
        context.run(f"{label} encode", _encode, jobs)
        wanted.sort(
            key=lambda m: (-getattr(m.settings, "steps", 0), m.method == "surgery")
        )  # longest first
        context.run(f"{label} adapt", _train, {m.name: (setup, m, folder) for m in wanted})


def _once(model: ModelSpec) -> bool:
    """Return whether the frozen models see a sample once; a mean shift has no steps."""
    return bool(getattr(model.settings, "encode", "once") == "once")


def _features(folder: Path, upstream: str, draw: Draw, damage: str, task: str) -> Path:
    samples = f"{draw.stream}-{draw.samples or 'all'}-{draw.batch}-{draw.seed}{damage}"
    return folder / upstream / samples / f"{task}.safetensors"


def _encode(
    setup: Setup, tasks: Sequence[str], seen: dict[Drawn, dict[str, None]], folder: Path
) -> None:
    """Write features of every draw by the merged models that see it and by the task's expert."""
    from featcal.baselines.training import as_module, pairs_of_several

    device, head = setup.context.device, setup.projection()
    names = dict.fromkeys(name for upstreams in seen.values() for name in upstreams)
    merged = {name: as_module(setup.merged(name), device) for name in names}
    for task in tasks:
        expert = as_module(setup.expert(task), device)
        for (draw, damage), upstreams in seen.items():
            batches = stream(setup, task, draw, damage=damage)
            own = {name: merged[name] for name in upstreams}
            for name, pair in pairs_of_several(task, own, expert, batches, head).items():
                write_pair(pair, _features(folder, name, draw, damage, task))


def _train(setup: Setup, model: ModelSpec, folder: Path) -> None:
    """Train the adapters of all tasks; as published, frozen models run anew for every batch."""
    from featcal.baselines.training import adapters_for

    draw, device = model.draw, setup.context.device
    assert draw is not None and model.folder is not None
    progress = None if setup.context.suite.workers else partial(report_progress, model.name)
    if _once(model):
        pairs = {
            task: read_pair(_features(folder, model.upstream, draw, model.damage, task), device)
            for task in sorted(setup.tasks)
        }
        adapters = model.settings.fit(pairs, draw.seed, progress)
    else:
        start = (model.settings, setup.merged(model.upstream), setup.experts)
        given = (streams(setup, draw), setup.projection(), draw.seed, device, progress)
        adapters = adapters_for(*start, *given)
    adapters.save(model.folder)


def write_pair(pair: "Pair", path: Path) -> None:
    """Write features of one task by a merged model and its expert."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in vars(pair).items()}, path)


def read_pair(path: Path, device: "torch.device") -> "Pair":
    """Return what write_pair wrote, features on the device; sizes are read on the CPU."""
    from safetensors.torch import load_file

    from featcal.baselines.adapters import Pair

    tensors = load_file(path)
    return Pair(tensors["merged"].to(device), tensors["expert"].to(device), tensors["sizes"])
