"""The gap that FeatCal and adapters recover by the number of tasks: parts of a pool, merged anew."""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Calibration, require
from reproduction.engine.context import Setup
from reproduction.engine.parts import cut, part_scores, write_expert
from reproduction.engine.spec import ModelSpec, compared_models, merged_model
from reproduction.engine.study import StudyResult, score_parts
from reproduction.experiments import ADAPTERS, Comparison, Each, Study
from reproduction.results import TASK_COUNTS


class TaskCountsStudy(Study):
    """Settings of the study.

    counts: of tasks that are merged.   shuffles: how often the pool is cut into parts of every count.
    samples: of each task; adapters see test samples and, separately, FeatCal's.
    """

    tables: ClassVar = {"task_counts": TASK_COUNTS}
    upstreams: tuple[str, ...]
    comparison: Comparison
    counts: Each[PositiveInt]
    shuffles: PositiveInt
    samples: PositiveInt
    seed: NonNegativeInt
    at_papers: Calibration | None = None

    def models(self, setup: Setup, upstream: str) -> list[ModelSpec]:
        """Return a merged model with what is compared after it; without `upstream`, the experts."""
        if not upstream:
            return [ModelSpec("expert", None, "expert")]
        compared = partial(compared_models, self, setup.folder("made"), upstream=upstream)
        adapters = compared(*ADAPTERS, streams=self.comparison.streams)
        return [merged_model(setup, upstream), *compared("featcal"), *adapters]

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        context, parts = setup.context, cut(self, setup.tasks).items()
        expected = "must be mergers that look at no data"
        for upstream in self.upstreams:
            looks = merged_model(setup, upstream).draw is not None
            require(not looks, f"{self.label}.upstreams", upstream, expected)
        experts = {task: (self, setup, task, folder) for task in setup.tasks}
        context.run(f"{self.label} experts", write_expert, experts)
        # a part is a job in one process, which starts none of its own
        alone = replace(setup, context=replace(context, suite=context.suite.but(workers=0)))
        jobs = dict[str, tuple[Any, ...]]()
        units = (*product(parts, [""]), *product(parts, self.upstreams))
        for ((count, draw), tasks), upstream in units:
            name, keys = f"{count}-{draw} {upstream or 'experts'}", {"tasks": count, "draw": draw}
            models, part = partial(self.models, upstream=upstream), replace(alone, only=tasks)
            jobs[name] = (f"{self.label} {name}", part, folder / name, {}, models, keys)
        largest_first = dict(sorted(jobs.items(), key=lambda job: -len(job[1][1].tasks)))
        evaluate = partial(part_scores, study=self, experts=folder)
        rows = context.run(self.label, partial(score_parts, evaluate=evaluate), largest_first)
        return StudyResult(tables={"task_counts": [row for name in jobs for row in rows[name]]})
