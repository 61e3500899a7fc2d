"""The gap that FeatCal and adapters recover by the number of tasks: drawn parts of a pool, each
merged anew, and how much of the drift is one shift.

Every sample is encoded once by each model. Scored are test samples that no adapter has seen: among
the task's own classes, and among those of all tasks, where an adapter is still the known task's.
n samples · p width of a feature · K classes of all tasks of a pool.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, ClassVar
from zlib import crc32

from pydantic import NonNegativeInt, PositiveInt

from featcal.baselines.corrections import MeanShift
from featcal.settings import Calibration, require
from reproduction.engine.context import Setup
from reproduction.engine.samples import load_split
from reproduction.engine.score import Counts, Row, score
from reproduction.engine.spec import ModelSpec
from reproduction.engine.study import StudyResult, make_and_score
from reproduction.experiments import (
    ADAPTER_BATCH,
    SPLITS,
    Draw,
    Each,
    Rivals,
    Study,
    at_papers_once,
)
from reproduction.results import TASK_COUNTS
from reproduction.stages.measure import projected

if TYPE_CHECKING:
    from torch import Tensor

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
    counts: Each[PositiveInt]
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

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        """Return rows of the experts and of every model on every part."""
        from safetensors.torch import load_file

        context, label = setup.context, f"task_counts {self.key}"
        merges = {u: context.experiments.merge[f"{self.key}-{u}"] for u in self.upstreams}
        for upstream, run in merges.items():
            expected = "must be mergers that look at no data"
            require(run.draw is None, f"{label}.upstreams", upstream, expected)
        parts, rows = self.parts(setup.tasks), list[Row]()
        jobs = {task: (setup, self, task, folder) for task in setup.tasks}
        context.run(f"{label} experts", encode_expert, jobs)
        evaluate = partial(judged, study=self, folder=folder)
        named = {f"{len(part.tasks)}-{part.draw}": part for part in parts}
        own = {n: replace(setup, only=p.tasks, made=folder / n) for n, p in named.items()}
        columns = {n: {"tasks": len(p.tasks), "draw": p.draw} for n, p in named.items()}
        for name, some in own.items():
            expert = ModelSpec("expert", None, "expert", columns=columns[name])
            rows += score(f"{label} {name}", some, [expert], evaluate)["expert"]
        for (name, some), (upstream, run) in product(own.items(), merges.items()):
            merged = ModelSpec("merged", some.merged(upstream), "merged", upstream, settings=run)
            models = [m.but(columns=columns[name]) for m in (merged, *self.models(some, upstream))]
            rows += make_and_score(some, f"{label} {name} {upstream}", models, evaluate=evaluate)
            rmtree(some.folder(""))
        heads = load_file(setup.heads)
        facts = {
            "parts": {name: part.tasks for name, part in named.items()},
            "mergers": {upstream: run.options for upstream, run in merges.items()},
            "classes": {task: len(heads[f"head/{task}"]) for task in setup.tasks},
        }
        return StudyResult(tables={"task_counts": rows}, facts=facts)

    def models(self, setup: Setup, upstream: str) -> Iterator[ModelSpec]:
        """Yield FeatCal at every setting, then adapters from every stream."""
        rivals = self.rivals
        settings = {rivals.setting: rivals.featcal}
        settings |= {"paper": self.at_papers} if self.at_papers else {}
        draw = rivals.draw("featcal", self.samples, self.seed)
        for setting, own in settings.items():
            words = ("featcal", upstream, setting, self.seed, own, draw)
            yield ModelSpec(f"featcal-{setting}", setup.folder("calibrated", setting), *words)
        for stream in self.streams:
            setting = rivals.setting + ("_train" if stream == "train" else "")
            drawn = Draw(stream=stream, samples=self.samples, batch=ADAPTER_BATCH, seed=self.seed)
            for adapter in (rivals.surgery, rivals.prob_surgery, MeanShift()):
                name = f"{adapter.name}-{setting}"
                words = (adapter.name, upstream, setting, self.seed, adapter, drawn)
                out = setup.folder("adapted", name)
                yield ModelSpec(name, out, *words, corrects="merged")


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
        from featcal.evaluation.accuracy import require_finite
        from featcal.models.batch import unit_length

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


def unseen(setup: Setup, study: TaskCountsStudy, task: str) -> Any:
    """Return the test samples of a task that are in no adapter's draw. Raises: BadSetting for none."""
    import numpy as np

    from featcal.data.batches import draw_indices

    test = load_split(setup, task, "test")
    left, count = np.arange(len(test.labels)), len(test.labels)
    if any(SPLITS[name] == "test" for name in study.streams):
        left = np.setdiff1d(left, draw_indices(task, count, study.samples, study.seed))
    expected = f"must be less than {count}, the number of test samples of {task}: some have to be left to score"
    require(len(left) > 0, f"task_counts.{study.key}.samples", study.samples, expected)
    return test.take(left)


def encode_expert(setup: Setup, study: TaskCountsStudy, task: str, folder: Path) -> None:
    """Write the expert's features of the unseen samples of its task, as they leave the projection."""
    from safetensors.torch import save_file

    expert, samples = setup.load(setup.expert(task)), unseen(setup, study, task)
    given = (setup.projection(), samples, ADAPTER_BATCH, f"expert of {task}, samples of {task}")
    save_file({UNSEEN: projected(expert, *given).contiguous()}, folder / f"{task}.safetensors")


def judged(
    setup: Setup,
    model: ModelSpec,
    corrected: Sequence[ModelSpec],
    study: TaskCountsStudy,
    folder: Path,
) -> dict[str, Counts]:
    """Return the scores of one model, or of each task's own expert, and of the same with adapters."""
    import torch
    from safetensors.torch import load_file

    from featcal.baselines.adapters import Adapters
    from featcal.models.batch import unit_length

    pool, tensors = replace(setup, only=()).tasks, load_file(setup.heads)
    heads = {name: tensors[f"head/{name}"] for name in pool}
    ours = setup.load(model.folder) if model.folder else None
    adapters = {one.name: Adapters.load(one.folder) for one in corrected if one.folder}
    found: dict[str, Counts] = {name: {} for name in (model.name, *adapters)}
    for task in setup.tasks:
        samples, theirs = unseen(setup, study, task), load_file(folder / f"{task}.safetensors")
        start = sum(len(heads[name]) for name in pool[: pool.index(task)])
        span, labels = (start, start + len(heads[task])), torch.as_tensor(samples.labels)
        expert, place = theirs[UNSEEN], f"{model.upstream} of {', '.join(setup.tasks)}, on {task}"
        judge = Judge(
            task, torch.cat(list(heads.values())), span, labels, unit_length(expert.cpu())
        )
        given = (setup.projection(), samples, ADAPTER_BATCH, place)
        own = projected(ours, *given) if ours else expert
        found[model.name][task] = judge.row(own)
        for name, adapter in adapters.items():
            found[name][task] = judge.row(adapter.apply(task, own))
    return found
