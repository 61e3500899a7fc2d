"""Stage `task_counts`: FeatCal and adapters on drawn parts of a pool, each merged anew, and what of
the drift is one shift.

Every sample is encoded once by each model. Everything is scored on test samples that no adapter has
seen: among the task's own classes, and among those of all tasks of the pool, where an adapter is
still the known task's. n samples · p width of a feature.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from zlib import crc32

from featcal.baselines.mean_shift import MeanShift
from featcal.settings import require
from reproduction.experiments.comparisons import TaskCountsStudy
from reproduction.results import TASK_COUNTS
from reproduction.stages.context import Context
from reproduction.stages.study import Found, run_study
from reproduction.stages.unseen import (
    UNSEEN,
    Row,
    encoded,
    judge_of,
    samples_of,
    spans_of,
    streams_of,
)
from reproduction.stages.workers import fan_out

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Part:
    """Tasks of the pool that are merged: the draw'th part with so many of them."""

    draw: int
    tasks: tuple[str, ...]


def run(key: str) -> None:
    """Write outputs/<suite>/task_counts/<key>/task_counts.csv; no rows where the suite does not run
    it.
    """
    run_study("task_counts", key, found, more={"task_counts": TASK_COUNTS})


def found(context: Context, key: str, study: TaskCountsStudy, folder: Path) -> Found:
    """Rows of every part, and what was merged in it."""
    parts = parts_of(study, context.suite.tasks_of(study.role, study.pool))
    rows = rows_of(context, key, study, parts, folder)
    told = {
        "study": study.model_dump(),
        "parts": {f"{len(p.tasks)}-{p.draw}": p.tasks for p in parts},
    }
    told["mergers"] = {u: context.experiments.merge[f"{key}-{u}"].options for u in study.upstreams}
    told["classes"] = {
        task: end - start for task, (start, end) in spans_of(context, study)[1].items()
    }
    return Found(more={"task_counts": rows}, told=told)


def parts_of(study: TaskCountsStudy, tasks: Sequence[str]) -> list[Part]:
    """The pool cut into parts of every count, in each of its shuffles; the whole pool once.

    Raises: BadSetting for a count that the pool does not have.
    """
    import numpy as np

    found = []
    for count in study.counts:
        there = f"must be at most {len(tasks)}, the number of tasks in the pool"
        require(count <= len(tasks), f"task_counts.{study.role}-{study.pool}.counts", count, there)
        cut: list[tuple[str, ...]] = []
        for shuffle in range(study.shuffles if count < len(tasks) else 1):
            order = (
                np.random.default_rng([study.seed, crc32(b"task_counts"), shuffle])
                .permutation(len(tasks))
                .tolist()
            )
            cut += [
                tuple(tasks[i] for i in sorted(order[start : start + count]))
                for start in range(0, len(tasks) - count + 1, count)
            ]
        found += [Part(draw, those) for draw, those in enumerate(cut)]
    return found


def rows_of(
    context: Context, key: str, study: TaskCountsStudy, parts: Sequence[Part], folder: Path
) -> list[Row]:
    """Rows of the experts and of every model on every part; features of the experts lie in `folder`
    meanwhile.
    """
    for upstream in study.upstreams:
        drawn = context.experiments.merge[f"{study.role}-{study.pool}-{upstream}"].draw
        require(
            drawn is None,
            f"task_counts.{key}.upstreams",
            upstream,
            "must be mergers that look at no data",
        )
    workers, tasks = context.suite.workers, context.suite.tasks_of(study.role, study.pool)
    jobs = {task: (context, study, task, folder / f"{task}.safetensors") for task in tasks}
    experts = dict(fan_out(f"task_counts {key} experts", encode_expert, jobs, workers))
    named = {
        f"{len(p.tasks)} tasks, draw {p.draw}, {u}": (p, u) for p in parts for u in study.upstreams
    }
    longest_first = dict(sorted(named.items(), key=lambda item: -len(item[1][0].tasks)))
    ways = {
        name: (context, study, part, upstream, folder)
        for name, (part, upstream) in longest_first.items()
    }
    found = dict(fan_out(f"task_counts {key}", recover, ways, workers))
    rows = [_words(context, study, part) | experts[task] for part in parts for task in part.tasks]
    return rows + [
        _words(context, study, part) | row
        for name, (part, _) in named.items()
        for row in found[name]
    ]


def _words(context: Context, study: TaskCountsStudy, part: Part) -> Row:
    """What rows of one part have in common."""
    shared = {
        "suite": context.suite.name,
        "role": study.role,
        "pool": study.pool,
        "metric": "accuracy",
    }
    return shared | {"tasks": len(part.tasks), "draw": part.draw}


def encode_expert(context: Context, study: TaskCountsStudy, task: str, out: Path) -> Row:
    """Write the expert's features of every stream and of the unseen samples of its task; its
    row.
    """
    from safetensors.torch import save_file

    from featcal.models.load import load_as_calibrated, torch_device

    device = torch_device(context.suite.device)
    expert = load_as_calibrated(context.layout.expert(study.role, study.pool, task)).to(device)
    own = encoded(context, study, expert, task, f"expert of {task}")
    save_file({name: features.contiguous() for name, features in own.items()}, out)
    words = {"upstream": "", "method": "expert", "setting": "", "seed": ""}
    return words | judge_of(context, study, task, own[UNSEEN]).row(own[UNSEEN])


def recover(
    context: Context, study: TaskCountsStudy, part: Part, upstream: str, folder: Path
) -> list[Row]:
    """Rows of one part merged in one way: the merged model, FeatCal at every setting, and adapters
    from every stream.
    """
    from safetensors.torch import load_file

    import featcal
    from featcal.models.load import load_as_calibrated, torch_device
    from reproduction.stages.streams import stream

    layout, role, pool, device = (
        context.layout,
        study.role,
        study.pool,
        torch_device(context.suite.device),
    )
    base, experts = (
        layout.base(role, pool),
        {task: layout.expert(role, pool, task) for task in part.tasks},
    )
    merge = context.experiments.merge[f"{role}-{pool}-{upstream}"]
    own = {task: load_file(folder / f"{task}.safetensors") for task in part.tasks}
    judges = {task: judge_of(context, study, task, own[task][UNSEEN]) for task in part.tasks}
    draw = study.rivals.draw("featcal", study.samples, study.seed)
    rows = []

    def row(
        task: str, features: "Tensor", method: str, setting: str = "", seed: int | str = study.seed
    ) -> None:
        words = {"upstream": upstream, "method": method, "setting": setting, "seed": seed}
        rows.append(words | judges[task].row(features))

    with TemporaryDirectory(dir=folder) as models:
        start = Path(models, "merged")
        featcal.merge(merge.method, base, experts, out=start, **(merge.options or {}))
        merged = load_as_calibrated(start).to(device)
        place = f"{upstream} of {', '.join(part.tasks)}"
        ours = {task: encoded(context, study, merged, task, place) for task in part.tasks}
        for task in part.tasks:
            row(task, ours[task][UNSEEN], "merged", seed="")
        for setting, settings in study.calibrations.items():
            out = Path(models, setting)
            batches = {task: stream(context, role, pool, task, draw) for task in part.tasks}
            featcal.calibrate(
                start,
                base=base,
                experts=experts,
                batches=batches,
                settings=settings,
                device=device,
                out=out,
                resume=False,
            )
            model = load_as_calibrated(out).to(device)
            for task in part.tasks:
                unseen = {UNSEEN: samples_of(context, study, task)[UNSEEN]}
                row(
                    task,
                    encoded(context, study, model, task, f"FeatCal on {place}", unseen)[UNSEEN],
                    "featcal",
                    setting,
                )
    for method, setting, adapters in _trained(study, ours, own, device):
        for task in part.tasks:
            row(task, adapters.apply(task, ours[task][UNSEEN]), method, setting)
    return rows


def _trained(
    study: TaskCountsStudy,
    ours: Mapping[str, Mapping[str, "Tensor"]],
    own: Mapping[str, Mapping[str, "Tensor"]],
    device: Any,
) -> Iterator[tuple[str, str, Any]]:
    """Method, setting and adapters of all tasks, by every method from every stream."""
    import torch

    from featcal.baselines.adapters import Pair

    for stream in streams_of(study):
        pairs = {}
        for task in sorted(ours):
            sides = (ours[task][stream].to(device), own[task][stream].to(device))
            pairs[task] = Pair(*sides, torch.ones(len(sides[0]), dtype=torch.long))
        setting = study.rivals.setting + ("_train" if stream == "train" else "")
        for settings in (study.rivals.surgery, study.rivals.prob_surgery, MeanShift()):
            yield settings.name, setting, settings.fit(pairs, study.seed)
