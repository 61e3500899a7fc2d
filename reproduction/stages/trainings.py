"""Trainings of both adapters behind the merged models of one role and pool, which share what the
frozen models compute.

First every image is encoded, once by the expert of its task and once by each merged model; then
every training, at its settings and seed, reads those features. Methods and settings differ only in
what they do with them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from reproduction.experiments.runs import AdapterSetting, AdaptRun, Draw, Pool
from reproduction.stages.context import Context, not_run
from reproduction.stages.streams import projection_of, stream
from reproduction.stages.trials import room
from reproduction.stages.workers import fan_out, tell


@dataclass(frozen=True)
class Trained:
    """One training: the adapters of all tasks at one setting and seed, which decides images, first
    weights, order and noise.
    """

    key: str
    run: AdaptRun
    setting: str
    chosen: AdapterSetting
    seed: int

    @property
    def name(self) -> str:
        return f"{self.key} {self.setting} seed {self.seed}"

    @property
    def keeps(self) -> bool:
        """Whether features are computed once, and not for every batch."""
        return self.chosen.training.encode == "once"

    def features(self, folder: Path) -> Path:
        """Where the features of its images lie, one file per task."""
        return features_of(folder, self.run.upstream, self.chosen.draw, self.seed)


def features_of(folder: Path, upstream: str, draw: Draw, seed: int) -> Path:
    """Where features of one draw by one merged model and the experts lie; batches decide nothing
    but the rounding.
    """
    return folder / upstream / f"{draw.stream}-{draw.samples or 'all'}-{draw.batch}-{seed}"


def train_all(context: Context, label: str, runs: Mapping[str, AdaptRun]) -> None:
    """Write outputs/<suite>/adapted/<key>/<setting>/seed<NN>/ for every run; an empty folder where
    the suite does not run it.
    """
    wanted: list[Trained] = []
    for key, run in runs.items():
        if run.settings is None or not context.plays(run.role, run.pool):
            not_run(context, f"adapt {key}", context.layout.adapted(key))
            continue
        for setting, chosen in run.settings.items():
            wanted += [Trained(key, run, setting, chosen, seed) for seed in chosen.seeds]
    if not wanted:
        return
    workers = context.suite.workers
    with room(context, "adapt") as folder:
        for _ in fan_out(
            f"{label} encode", encode, dict(_encodings(context, wanted, folder)), workers
        ):
            pass
        longest_first = sorted(
            wanted, key=lambda one: (-one.chosen.training.steps, one.run.method == "surgery")
        )
        jobs = {one.name: (context, one, folder) for one in longest_first}
        for _ in fan_out(label, train_one, jobs, workers):
            pass


def _encodings(
    context: Context, wanted: Sequence[Trained], folder: Path
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Jobs of `encode`, the tasks shared out over the workers; a draw and seed that several
    trainings see is there once.
    """
    kept = [one for one in wanted if one.keeps]
    if not kept:
        return
    seen: dict[
        tuple[Draw, int], dict[str, None]
    ] = {}  # merged models by the draw and seed that a training behind them sees
    for one in kept:
        seen.setdefault((one.chosen.draw, one.seed), {})[one.run.upstream] = None
    (role, pool) = kept[0].run.role, kept[0].run.pool
    tasks, parts = list(context.suite.tasks_of(role, pool)), context.suite.workers or 1
    for number in range(min(parts, len(tasks))):
        own = tasks[number::parts]
        yield ", ".join(own), (context, role, pool, own, seen, folder)


def encode(
    context: Context,
    role: str,
    pool: Pool,
    tasks: Sequence[str],
    seen: Mapping[tuple[Draw, int], Iterable[str]],
    folder: Path,
) -> None:
    """Features of every draw's samples of these tasks, by the merged models that see it and by the
    task's expert.
    """
    from featcal.baselines.training import as_module, pairs_of_several
    from featcal.models.load import torch_device
    from reproduction.stages.pair_file import write_pair

    layout, device = context.layout, torch_device(context.suite.device)
    head = projection_of(context, role, pool)
    names = dict.fromkeys(name for upstreams in seen.values() for name in upstreams)
    merged = {name: as_module(layout.merged(f"{role}-{pool}-{name}"), device) for name in names}
    for task in tasks:
        expert = as_module(layout.expert(role, pool, task), device)
        for (draw, seed), upstreams in seen.items():
            pairs = pairs_of_several(
                task,
                {name: merged[name] for name in upstreams},
                expert,
                stream(context, role, pool, task, draw, seed),
                head,
            )
            for name, pair in pairs.items():
                write_pair(pair, features_of(folder, name, draw, seed) / f"{task}.safetensors")


def train_one(context: Context, one: Trained, folder: Path) -> None:
    """The adapters of all tasks for one setting and seed."""
    from featcal.models.load import torch_device
    from reproduction.stages.pair_file import read_pair

    device, tasks = (
        torch_device(context.suite.device),
        sorted(context.suite.tasks_of(one.run.role, one.run.pool)),
    )
    progress = None if context.suite.workers else partial(tell, one.name)
    if one.keeps:
        pairs = {
            task: read_pair(one.features(folder) / f"{task}.safetensors", device) for task in tasks
        }
        adapters = one.chosen.training.fit(pairs, one.seed, progress)
    else:
        adapters = _encoding_every_batch(context, one, device, progress)
    adapters.save(context.layout.adapted(one.key, one.setting, one.seed))


def _encoding_every_batch(context: Context, one: Trained, device: Any, progress: Any) -> Any:
    """The training that is published: frozen models run for every batch, so there is nothing to
    share.
    """
    from featcal.baselines.training import adapters_for

    layout, role, pool = context.layout, one.run.role, one.run.pool
    merged = layout.merged(f"{role}-{pool}-{one.run.upstream}")
    experts = {task: layout.expert(role, pool, task) for task in context.suite.tasks_of(role, pool)}
    head = projection_of(context, role, pool)
    given = {task: stream(context, role, pool, task, one.chosen.draw, one.seed) for task in experts}
    return adapters_for(
        one.chosen.training, merged, experts, given, head, one.seed, device, progress
    )
