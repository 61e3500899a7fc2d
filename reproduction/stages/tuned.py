"""What one search works on: models, samples kept and held out, and of encoders the heads of every
task.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featcal.tuning.search import Batch, split_all
from reproduction.experiments.runs import Draw
from reproduction.experiments.tunings import TuneStudy
from reproduction.stages.context import Context


@dataclass(frozen=True)
class Parts:
    """Arguments of a calibration, its samples in two parts, and what scores are made with."""

    merged: Path
    base: Path
    experts: Mapping[str, Path]
    kept: Mapping[str, list[Batch]]
    held: Mapping[str, list[Batch]]
    plan: Any
    head: Any
    heads: Mapping[str, Any] | None


def parts(context: Context, study: TuneStudy) -> Parts:
    """The same for every candidate of a study."""
    from safetensors.torch import load_file

    from reproduction.stages.streams import plan_of, streams

    layout, tasks = context.layout, context.suite.tasks_of(study.role, study.pool)
    base, merged = (
        layout.base(study.role, study.pool),
        layout.merged(f"{study.role}-{study.pool}-{study.upstream}"),
    )
    draw = Draw(stream="train", samples=study.samples, batch=study.batch, seed=study.seed)
    batches = streams(context, study.role, study.pool, draw, reading=study.reading)
    plan, head, heads = plan_of(context, study.role, study.pool, study.reading), None, None
    if study.reading is None:
        tensors = load_file(layout.heads(study.role, study.pool))
        head = tensors.get("visual_projection")
        heads = {task: tensors["logit_scale"].exp() * tensors[f"head/{task}"] for task in tasks}
    experts = {task: layout.expert(study.role, study.pool, task) for task in tasks}
    return Parts(
        merged, base, experts, *split_all(batches, study.holdout, study.seed), plan, head, heads
    )
