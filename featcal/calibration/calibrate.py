"""FeatCal's public function: a merged model, its base and its experts in, the calibrated model out (Algorithm 1)."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from featcal.blocks.coverage import check_blocks
from featcal.blocks.plan import BlockPlan, Stack, blocks_of
from featcal.blocks.plans import plan_for
from featcal.blocks.replay import check_replay
from featcal.calibration.block import calibrate_block
from featcal.calibration.checks import check_models, check_tasks
from featcal.calibration.models import as_module, evaluation_mode, label, student_of, write_calibrated
from featcal.calibration.observe import BlockView
from featcal.calibration.ranks import Ranks, current
from featcal.calibration.record import BlockRecord, Result, line
from featcal.calibration.sites import calibrated_modules
from featcal.calibration.tracks import HandedOn, Tracks, check_batch, hand_on, naming, start_tracks
from featcal.core.precision import exact_products
from featcal.core.weighting import TokenRule
from featcal.settings import Calibration

Model = nn.Module | str | Path
Batches = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class Run:
    """What stays the same from stack to stack."""

    student: nn.Module
    base: nn.Module
    experts: Mapping[str, nn.Module]  # by task of this process, in the order of names
    plan: BlockPlan
    settings: Calibration
    progress: Callable[[str], None] | None
    ranks: Ranks
    tasks: int  # of all processes


def calibrate(
    merged: Model,
    *,
    base: Model,
    experts: Mapping[str, Model],
    batches: Mapping[str, Batches],
    settings: Calibration,
    out: str | Path | None = None,
    plan: BlockPlan | None = None,
    token_weights: TokenRule | None = None,
    device: str | torch.device | None = None,
    progress: Callable[[str], None] | None = None,
) -> Result:
    """Calibrate the merged model's blocks to its experts' features, in forward order and in closed form.

    Args:
        merged, base, experts: modules or checkpoint folders of one architecture; modules are not modified.
        batches: per task an iterable of keyword mappings for the model's own forward, such as {"pixel_values": x}; read once,
            and kept for models with several stacks (T5: {"input_ids": i, "attention_mask": m, "labels": l}).
        settings: λ, ρ, α and which parts are on.
        out: a folder to write instead of returning the model.
        plan: which blocks the model has; looked up or inferred where None.
        token_weights: (module name, last block?, (batch, tokens)) -> weights of that shape; the family's rule where None.
        device: where models given as folders are loaded to, the CPU where None; modules stay where they are, and batches follow
            them.
        progress: called with one line of text per block.

    Returns: Result with model (None with `out`), folder (None without) and one record per block.
    Raises: FeatCalError, before the first block is touched, for models or batches that do not fit.
    """
    ranks = current()
    with ranks.ending_as_one():
        check_tasks(experts, batches)
        modules = {task: as_module(experts[task], device) for task in ranks.mine(experts)}
        anchor_base, upstream = as_module(base, device), as_module(merged, device)
        named = {label("merged", merged): upstream, label("base", base): anchor_base}
        check_models(named | {label(f"expert {task!r}", experts[task]): module for task, module in modules.items()})
        plan = plan_for(upstream, plan)
        check_blocks(upstream, plan, settings.norm)
        student = student_of(upstream, merged).eval()
        with evaluation_mode([anchor_base, *modules.values()]), exact_products():
            run = Run(student, anchor_base, modules, plan, settings, progress if ranks.first else None, ranks, len(experts))
            streams = batches if len(plan.stacks) == 1 else {task: list(batches[task]) for task in modules}
            blocks = calibrate_stacks(run, streams, token_weights)
        if out is None:
            return Result(student, None, blocks)
        if ranks.first:
            write_calibrated(student, out, merged, settings, blocks)
    return Result(None, Path(out), blocks)


def checked_first(task: str, student: nn.Module, plan: BlockPlan, batches: Batches) -> Batches:
    """The batches as they come, after the check on the first one that the plan replays the model exactly."""
    for number, batch in enumerate(batches):
        if number == 0:
            check_batch(task, number, batch, student)
            with naming(task, number):
                check_replay(student, plan, batch)
        yield batch


def calibrate_stacks(run: Run, streams: Mapping[str, Batches], token_weights: TokenRule | None) -> list[BlockRecord]:
    """Every stack in forward order; what one feeds to the next comes from the calibrated student and from each expert."""
    records: list[BlockRecord] = []
    handed: dict[str, HandedOn | None] = {}
    first = min(run.experts)
    unchecked = {first: checked_first(first, run.student, run.plan, streams[first])}
    for source, stack in run.plan.in_order:
        tracks = {
            task: start_tracks(task, run.student, expert, stack, unchecked.pop(task, streams[task]), source, handed.get(task))
            for task, expert in run.experts.items()
        }
        rule = token_weights or run.plan.rule(stack)
        records += calibrate_stack(run, stack, tracks, rule, source.feeds if source else "")
        handed = {task: hand_on(tracks[task], run.student, expert, stack) for task, expert in run.experts.items()}
    return records


def calibrate_stack(run: Run, stack: Stack, tracks: Mapping[str, Tracks], rule: TokenRule, fed: str) -> list[BlockRecord]:
    """Every block of one stack in forward order."""
    blocks, base_blocks = blocks_of(run.student, stack), blocks_of(run.base, stack)
    teachers = {task: blocks_of(expert, stack) for task, expert in run.experts.items()}
    records = []
    for index, block in enumerate(blocks):
        start = time.perf_counter()
        modules = calibrated_modules(block, run.settings.norm)
        view = BlockView(f"{stack.name}.{index:02d}", stack, index + 1 == len(blocks), modules, rule, fed)
        teachers_here = {task: expert_blocks[index] for task, expert_blocks in teachers.items()}
        records.append(calibrate_block(block, base_blocks[index], teachers_here, tracks, view, run.settings, run.ranks))
        if run.progress:
            run.progress(line(records[-1], run.tasks, time.perf_counter() - start))
    return records
