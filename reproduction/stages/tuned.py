"""What one search works on: models, samples kept and held out, and of encoders the heads of every task."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featcal.tuning.holdout import Batch, split_all
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
    layout, tasks = context.layout, context.suite.tasks_of(study.role, study.pool)
    base, merged = layout.base(study.role, study.pool), layout.merged(f"{study.role}-{study.pool}-{study.upstream}")
    batches, plan, head, heads = (generated if study.reading is not None else samples)(context, study, tasks)
    experts = {task: layout.expert(study.role, study.pool, task) for task in tasks}
    return Parts(merged, base, experts, *split_all(batches, study.holdout, study.seed), plan, head, heads)


def samples(context: Context, study: TuneStudy, tasks: Any) -> tuple[Any, None, Any, Any]:
    """Training images or texts of an encoder, and the zero-shot heads times the logit scale."""
    from safetensors.torch import load_file

    from reproduction.stages.streams import streams

    tensors = load_file(context.layout.heads(study.role, study.pool))
    heads = {task: tensors["logit_scale"].exp() * tensors[f"head/{task}"] for task in tasks}
    batches = streams(context, study.role, study.pool, Draw("train", study.samples, study.batch, study.seed))
    return batches, None, tensors.get("visual_projection"), heads


def generated(context: Context, study: TuneStudy, tasks: Any) -> tuple[Any, Any, None, None]:
    """Training texts, read as the study says."""
    from reproduction.stages.text_streams import text_stream
    from reproduction.suites.text_batches import plan_of_reading

    assert study.reading is not None
    draw = Draw("train", study.samples, study.batch, study.seed)
    batches = {task: text_stream(context, study.role, study.pool, task, draw, study.seed, study.reading) for task in tasks}
    return batches, plan_of_reading(context.layout.base(study.role, study.pool), study.reading), None, None
