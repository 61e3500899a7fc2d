"""The gap that FeatCal and adapters recover by the number of tasks: drawn parts of a pool, each
merged anew, and how much of the drift is one shift.

Every sample is encoded once by each model. Scored are test samples that no adapter has seen: among
the task's own classes, and among those of all tasks, where an adapter is still the known task's.
n samples · p width of a feature · K classes of all tasks of a pool.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar
from zlib import crc32

from pydantic import NonNegativeInt, PositiveInt

from featcal.baselines.mean_shift import MeanShift
from featcal.settings import Calibration, require
from reproduction.engine.context import Setup
from reproduction.engine.samples import load_split, stream
from reproduction.engine.score import Row
from reproduction.engine.study import Found
from reproduction.experiments import ADAPTER_BATCH, SPLITS, Counts, Rivals, Study, at_papers_once
from reproduction.results import TASK_COUNTS
from reproduction.stages.measure import projected

if TYPE_CHECKING:
    from torch import Tensor

UNSEEN = "unseen"  # test samples that are in no adapter's draw
Features = Mapping[str, "Tensor"]  # (n, p) by the samples' name


@dataclass(frozen=True)
class Part:
    """Tasks of the pool that are merged: the draw'th part with so many of them."""

    draw: int
    tasks: tuple[str, ...]


class TaskCountsStudy(Study):
    """Settings of the study.

    counts:    of tasks that are merged.
    shuffles:  how often the pool is shuffled and cut into parts of every count.
    samples:   of each task; adapters see test samples and, separately, FeatCal's.
    at_papers: FeatCal at the paper's settings too.
    """

    section = "task_counts"
    tables: ClassVar = {"task_counts": TASK_COUNTS}
    upstreams: tuple[str, ...]
    rivals: Rivals
    counts: Counts
    shuffles: PositiveInt
    samples: PositiveInt
    seed: NonNegativeInt
    at_papers: Calibration | None = None

    def check(self) -> None:
        at_papers_once(self)

    @property
    def streams(self) -> tuple[str, ...]:
        """Return the streams that adapters are trained on, in the order of their rows."""
        return tuple(dict.fromkeys((self.rivals.stream, "train")))

    def parts(self, tasks: Sequence[str]) -> list[Part]:
        """Return the pool cut into parts of every count, in each shuffle; the whole pool once.

        Raises: BadSetting for a count that the pool does not have.
        """
        import numpy as np

        found = []
        for count in self.counts:
            expected = f"must be at most {len(tasks)}, the number of tasks in the pool"
            require(count <= len(tasks), f"task_counts.{self.key}.counts", count, expected)
            cut: list[tuple[str, ...]] = []
            for shuffle in range(self.shuffles if count < len(tasks) else 1):
                generator = np.random.default_rng([self.seed, crc32(b"task_counts"), shuffle])
                order = generator.permutation(len(tasks)).tolist()
                starts = range(0, len(tasks) - count + 1, count)
                cut += [tuple(tasks[i] for i in sorted(order[s : s + count])) for s in starts]
            found += [Part(draw, own) for draw, own in enumerate(cut)]
        return found

    def found(self, setup: Setup, folder: Path) -> Found:
        """Return rows of the experts and of every model on every part."""
        from safetensors.torch import load_file

        context, label = setup.context, f"task_counts {self.key}"
        merges = {u: context.experiments.merge[f"{self.key}-{u}"] for u in self.upstreams}
        for upstream, run in merges.items():
            expected = "must be mergers that look at no data"
            require(run.draw is None, f"{label}.upstreams", upstream, expected)
        parts = self.parts(setup.tasks)
        jobs = {task: (setup, self, task, folder / f"{task}.safetensors") for task in setup.tasks}
        experts = context.run(f"{label} experts", encode_expert, jobs)
        named = {
            f"{len(p.tasks)} tasks, draw {p.draw}, {u}": (setup, self, p.tasks, u, folder)
            for p in parts
            for u in self.upstreams
        }
        longest_first = dict(sorted(named.items(), key=lambda item: -len(item[1][2])))
        models, rows = context.run(label, recover, longest_first), list[Row]()
        words = [
            setup.words | {"metric": "accuracy", "tasks": len(p.tasks), "draw": p.draw}
            for p in parts
        ]
        for shared, part in zip(words, parts, strict=True):
            rows += [shared | experts[task] for task in part.tasks]
        for number, name in enumerate(named):
            rows += [words[number // len(self.upstreams)] | own for own in models[name]]
        heads = load_file(setup.heads)
        facts = {
            "parts": {f"{len(p.tasks)}-{p.draw}": p.tasks for p in parts},
            "mergers": {upstream: run.options for upstream, run in merges.items()},
            "classes": {task: len(heads[f"head/{task}"]) for task in setup.tasks},
        }
        return Found(tables={"task_counts": rows}, facts=facts)


@dataclass(frozen=True)
class Judge:
    """What scores features of the unseen samples of one task.

    head:   class vectors of all tasks, (K, p).   span: first and end row of this task's.
    labels: of the samples within their task, (n,).   expert: its unit-length features, (n, p).
    """

    task: str
    head: "Tensor"
    span: tuple[int, int]
    labels: "Tensor"
    expert: "Tensor"

    def row(self, features: "Tensor") -> Row:
        """Return percent right among the task's own classes and among all, and the drift of
        unit-length features from the expert's.

        drift: mean over samples of the squared difference.   mean_drift: squared length of the mean
        difference, the part that one constant vector would undo.
        """
        from featcal.evaluation.zero_shot import require_finite, unit_length

        require_finite(features, f"features of {self.task}")
        unit, (start, end), count = unit_length(features.cpu()), self.span, len(self.labels)
        answers = unit @ self.head.T  # (n, K)
        right = (answers[:, start:end].argmax(1) == self.labels).sum()
        of_all = (answers.argmax(1) == self.labels + start).sum()
        difference = (unit - self.expert).double()  # (n, p)
        return {
            "task": self.task, "value": 100 * float(right) / count, "union": 100 * float(of_all) / count,
            "drift": float(difference.square().sum(1).mean()), "mean_drift": float(difference.mean(0).square().sum()),
            "count": count,
        }  # fmt: skip


def samples_of(setup: Setup, study: TaskCountsStudy, task: str) -> dict[str, Any]:
    """Return the samples of one task that are encoded: every draw, as `adapt` makes them, and the
    test samples that are in none. Raises: BadSetting where no test sample is left.
    """
    import numpy as np

    from featcal.data.batches import draw_indices

    found, test = {}, load_split(setup, task, "test")
    left, count = np.arange(len(test.labels)), len(test.labels)
    for name in study.streams:
        samples = test if SPLITS[name] == "test" else load_split(setup, task, SPLITS[name])
        drawn = draw_indices(task, len(samples.labels), study.samples, study.seed)
        found[name] = samples.take(drawn)
        left = np.setdiff1d(left, drawn) if samples is test else left
    expected = f"must be less than {count}, the number of test samples of {task}: some have to be left to score"
    require(len(left) > 0, f"task_counts.{study.key}.samples", study.samples, expected)
    return found | {UNSEEN: test.take(left)}


def encoded(
    setup: Setup, model: Any, samples: Mapping[str, Any], place: str
) -> dict[str, "Tensor"]:
    """Return features of a model as they leave the projection."""
    head = setup.projection()
    return {n: projected(model, head, own, ADAPTER_BATCH, place) for n, own in samples.items()}


def judge_of(setup: Setup, study: TaskCountsStudy, task: str, expert: "Tensor") -> Judge:
    """Return what scores features of a task. expert: its own features, (n, p)."""
    import torch
    from safetensors.torch import load_file

    from featcal.evaluation.zero_shot import unit_length

    tensors = load_file(setup.heads)
    heads = {name: tensors[f"head/{name}"] for name in setup.tasks}
    start = sum(len(heads[name]) for name in setup.tasks[: setup.tasks.index(task)])
    labels = torch.as_tensor(samples_of(setup, study, task)[UNSEEN].labels)
    whole, span = torch.cat(list(heads.values())), (start, start + len(heads[task]))
    return Judge(task, whole, span, labels, unit_length(expert.cpu()))


def encode_expert(setup: Setup, study: TaskCountsStudy, task: str, out: Path) -> Row:
    """Write the expert's features of all samples of its task; return its row."""
    from safetensors.torch import save_file

    expert, samples = setup.load(setup.expert(task)), samples_of(setup, study, task)
    own = encoded(setup, expert, samples, f"expert of {task}, samples of {task}")
    save_file({name: features.contiguous() for name, features in own.items()}, out)
    words = {"upstream": "", "method": "expert", "setting": "", "seed": ""}
    return words | judge_of(setup, study, task, own[UNSEEN]).row(own[UNSEEN])


def recover(
    setup: Setup, study: TaskCountsStudy, tasks: tuple[str, ...], upstream: str, folder: Path
) -> list[Row]:
    """Return rows of some tasks merged in one way: the merged model, FeatCal at every setting, and
    adapters from every stream.
    """
    from safetensors.torch import load_file

    import featcal

    rivals, device, place = study.rivals, setup.context.device, f"{upstream} of {', '.join(tasks)}"
    base, experts = setup.base, {task: setup.expert(task) for task in tasks}
    run, rows = setup.context.experiments.merge[f"{setup.key}-{upstream}"], list[Row]()
    theirs = {task: load_file(folder / f"{task}.safetensors") for task in tasks}
    judges = {task: judge_of(setup, study, task, theirs[task][UNSEEN]) for task in tasks}
    draw = rivals.draw("featcal", study.samples, study.seed)

    def add(features: Mapping[str, "Tensor"], method: str, setting: str, seed: int | str) -> None:
        words = {"upstream": upstream, "method": method, "setting": setting, "seed": seed}
        rows.extend(words | judges[task].row(own) for task, own in features.items())

    with TemporaryDirectory(dir=folder) as models:
        start = Path(models, "merged")
        featcal.merge(run.method, base, experts, out=start, **(run.options or {}))
        merged = setup.load(start)
        ours = {
            task: encoded(setup, merged, samples_of(setup, study, task), f"{place}, on {task}")
            for task in tasks
        }
        add({task: own[UNSEEN] for task, own in ours.items()}, "merged", "", "")
        settings = {rivals.setting: rivals.featcal}
        settings |= {"paper": study.at_papers} if study.at_papers else {}
        for setting, calibration in settings.items():
            out, batches = Path(models, setting), {t: stream(setup, t, draw) for t in tasks}
            given: dict[str, Any] = {"base": base, "experts": experts, "batches": batches}
            given |= {"settings": calibration, "device": device, "out": out, "resume": False}
            featcal.calibrate(start, **given)
            model, unseen = setup.load(out), dict[str, Any]()
            for task in tasks:
                own = {UNSEEN: samples_of(setup, study, task)[UNSEEN]}
                unseen |= {task: encoded(setup, model, own, f"{place}, on {task}")[UNSEEN]}
            add(unseen, "featcal", setting, study.seed)
    for method, setting, adapters in _trained(study, ours, theirs, device):
        fixed = {task: adapters.apply(task, ours[task][UNSEEN]) for task in tasks}
        add(fixed, method, setting, study.seed)
    return rows


def _trained(
    study: TaskCountsStudy,
    ours: Mapping[str, Features],
    theirs: Mapping[str, Features],
    device: Any,
) -> Iterator[tuple[str, str, Any]]:
    """Yield method, setting and adapters of all tasks, by every method from every stream."""
    import torch

    from featcal.baselines.adapters import Pair

    for name in study.streams:
        pairs = {}
        for task in sorted(ours):
            sides = (ours[task][name].to(device), theirs[task][name].to(device))
            pairs[task] = Pair(*sides, torch.ones(len(sides[0]), dtype=torch.long))
        setting = study.rivals.setting + ("_train" if name == "train" else "")
        for settings in (study.rivals.surgery, study.rivals.prob_surgery, MeanShift()):
            yield settings.name, setting, settings.fit(pairs, study.seed)
