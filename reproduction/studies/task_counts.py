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
from reproduction.experiments import (
    ADAPTER_BATCH,
    SPLITS,
    Counts,
    Rivals,
    Study,
    at_papers_once,
)
from reproduction.results import TASK_COUNTS
from reproduction.stages.measure import projected

if TYPE_CHECKING:
    from torch import Tensor, nn

UNSEEN = "unseen"  # test samples that are in no adapter's draw


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
        context, label = setup.context, f"task_counts {self.key}"
        merges = {u: context.experiments.merge[f"{self.key}-{u}"] for u in self.upstreams}
        for upstream, run in merges.items():
            place, expected = f"{label}.upstreams", "must be mergers that look at no data"
            require(run.draw is None, place, upstream, expected)
        parts = self.parts(setup.tasks)
        jobs = {task: (setup, self, task, folder / f"{task}.safetensors") for task in setup.tasks}
        experts = context.run(f"{label} experts", encode_expert, jobs)
        named = {
            f"{len(p.tasks)} tasks, draw {p.draw}, {u}": (setup, self, p, u, folder)
            for p in parts
            for u in self.upstreams
        }
        longest_first = dict(sorted(named.items(), key=lambda item: -len(item[1][2].tasks)))
        models = context.run(label, recover, longest_first)
        words = setup.words | {"metric": "accuracy"}

        def row(part: Part, own: Row) -> Row:
            return words | {"tasks": len(part.tasks), "draw": part.draw} | own

        rows = [row(part, experts[task]) for part in parts for task in part.tasks]
        rows += [row(job[2], own) for name, job in named.items() for own in models[name]]
        spans = spans_of(setup)[1]
        facts = {
            "parts": {f"{len(p.tasks)}-{p.draw}": p.tasks for p in parts},
            "mergers": {upstream: run.options for upstream, run in merges.items()},
            "classes": {task: end - start for task, (start, end) in spans.items()},
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
        split = SPLITS[name]
        samples = test if split == "test" else load_split(setup, task, split)
        drawn = draw_indices(task, len(samples.labels), study.samples, study.seed)
        found[name] = samples.take(drawn)
        left = np.setdiff1d(left, drawn) if samples is test else left
    expected = f"must be less than {count}, the number of test samples of {task}: some have to be left to score"
    require(len(left) > 0, f"task_counts.{study.key}.samples", study.samples, expected)
    return found | {UNSEEN: test.take(left)}


def encoded(
    setup: Setup, model: "nn.Module", samples: Mapping[str, Any], place: str
) -> dict[str, "Tensor"]:
    """Return features (n, p) of a model as they leave the projection, by the samples' name."""
    projection = setup.projection()
    return {
        name: projected(model, projection, own, ADAPTER_BATCH, place)
        for name, own in samples.items()
    }


def judge_of(setup: Setup, study: TaskCountsStudy, task: str, expert: "Tensor") -> Judge:
    """Return what scores features of a task. expert: its own features, (n, p)."""
    import torch

    from featcal.evaluation.zero_shot import unit_length

    head, spans = spans_of(setup)
    labels = torch.as_tensor(samples_of(setup, study, task)[UNSEEN].labels)
    return Judge(task, head, spans[task], labels, unit_length(expert.cpu()))


def spans_of(setup: Setup) -> tuple["Tensor", dict[str, tuple[int, int]]]:
    """Return the class vectors of all tasks below each other, and which rows are a task's."""
    import torch
    from safetensors.torch import load_file

    tensors, spans, start = load_file(setup.heads), {}, 0
    heads = [tensors[f"head/{task}"] for task in setup.tasks]
    for task, head in zip(setup.tasks, heads, strict=True):
        spans[task] = (start, start + len(head))
        start += len(head)
    return torch.cat(heads), spans


def encode_expert(setup: Setup, study: TaskCountsStudy, task: str, out: Path) -> Row:
    """Write the expert's features of all samples of its task; return its row."""
    from safetensors.torch import save_file

    expert, samples = setup.load(setup.expert(task)), samples_of(setup, study, task)
    own = encoded(setup, expert, samples, f"expert of {task}, samples of {task}")
    save_file({name: features.contiguous() for name, features in own.items()}, out)
    words = {"upstream": "", "method": "expert", "setting": "", "seed": ""}
    return words | judge_of(setup, study, task, own[UNSEEN]).row(own[UNSEEN])


def recover(
    setup: Setup, study: TaskCountsStudy, part: Part, upstream: str, folder: Path
) -> list[Row]:
    """Return rows of one part merged in one way: the merged model, FeatCal at every setting, and
    adapters from every stream.
    """
    from safetensors.torch import load_file

    import featcal

    rivals, tasks, device = study.rivals, part.tasks, setup.context.device
    base, experts = setup.base, {task: setup.expert(task) for task in tasks}
    run = setup.context.experiments.merge[f"{setup.key}-{upstream}"]
    theirs = {task: load_file(folder / f"{task}.safetensors") for task in tasks}
    judges = {task: judge_of(setup, study, task, theirs[task][UNSEEN]) for task in tasks}
    draw = rivals.draw("featcal", study.samples, study.seed)
    rows, place = [], f"{upstream} of {', '.join(tasks)}"

    def add(task: str, features: "Tensor", method: str, setting: str, seed: int | str) -> None:
        words = {"upstream": upstream, "method": method, "setting": setting, "seed": seed}
        rows.append(words | judges[task].row(features))

    with TemporaryDirectory(dir=folder) as models:
        start = Path(models, "merged")
        featcal.merge(run.method, base, experts, out=start, **(run.options or {}))
        merged = setup.load(start)
        ours = {
            task: encoded(setup, merged, samples_of(setup, study, task), f"{place}, on {task}")
            for task in tasks
        }
        for task in tasks:
            add(task, ours[task][UNSEEN], "merged", "", "")
        settings = {rivals.setting: rivals.featcal}
        settings |= {"paper": study.at_papers} if study.at_papers else {}
        for setting, calibration in settings.items():
            out = Path(models, setting)
            batches = {task: stream(setup, task, draw) for task in tasks}
            given: dict[str, Any] = {"base": base, "experts": experts, "batches": batches}
            given |= {"settings": calibration, "device": device, "out": out, "resume": False}
            featcal.calibrate(start, **given)
            model = setup.load(out)
            for task in tasks:
                unseen = {UNSEEN: samples_of(setup, study, task)[UNSEEN]}
                features = encoded(setup, model, unseen, f"FeatCal on {place}, on {task}")
                add(task, features[UNSEEN], "featcal", setting, study.seed)
    for method, setting, adapters in _trained(study, ours, theirs, device):
        for task in tasks:
            adapted = adapters.apply(task, ours[task][UNSEEN])
            add(task, adapted, method, setting, study.seed)
    return rows


def _trained(
    study: TaskCountsStudy,
    ours: Mapping[str, Mapping[str, "Tensor"]],
    theirs: Mapping[str, Mapping[str, "Tensor"]],
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
