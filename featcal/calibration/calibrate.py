"""FeatCal's public function: a merged model, its base and its experts in, the calibrated model out (Algorithm 1)."""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from featcal.blocks.plan import BlockPlan
from featcal.blocks.plans import plan_for
from featcal.blocks.replay import check_replay
from featcal.calibration.block import calibrate_block
from featcal.calibration.checks import check_models, check_tasks
from featcal.calibration.models import as_module, evaluation_mode, label, student_of, write_calibrated
from featcal.calibration.observe import BlockView
from featcal.calibration.record import BlockRecord, Result, line
from featcal.calibration.sites import calibrated_modules
from featcal.calibration.tracks import Tracks, check_batch, naming, start_tracks
from featcal.core.precision import exact_products
from featcal.core.weighting import TokenRule
from featcal.settings import Calibration

Model = nn.Module | str | Path
Batches = Iterable[Mapping[str, Any]]


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
        batches: per task an iterable of keyword mappings for the model's own forward, such as {"pixel_values": x}; read once.
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
    check_tasks(experts, batches)
    modules = {task: as_module(experts[task], device) for task in sorted(experts)}
    anchor_base, upstream = as_module(base, device), as_module(merged, device)
    named = {label("merged", merged): upstream, label("base", base): anchor_base}
    check_models(named | {label(f"expert {task!r}", experts[task]): module for task, module in modules.items()})
    plan = plan_for(upstream, plan)
    student = student_of(upstream, merged).eval()
    with evaluation_mode([anchor_base, *modules.values()]), exact_products():
        tracks: dict[str, Tracks] = {}
        for task, expert in modules.items():
            stream = batches[task] if tracks else checked_first(task, student, plan, batches[task])
            tracks[task] = start_tracks(task, student, expert, plan, stream)
        rule = token_weights or plan.token_rule
        blocks = calibrate_stack(student, anchor_base, modules, tracks, plan, rule, settings, progress)
    if out is None:
        return Result(student, None, blocks)
    return Result(None, write_calibrated(student, out, merged, settings, blocks), blocks)


def checked_first(task: str, student: nn.Module, plan: BlockPlan, batches: Batches) -> Batches:
    """The batches as they come, after the check on the first one that the plan replays the model exactly."""
    for number, batch in enumerate(batches):
        if number == 0:
            check_batch(task, number, batch, student)
            with naming(task, number):
                check_replay(student, plan, batch)
        yield batch


def calibrate_stack(
    student: nn.Module,
    base: nn.Module,
    experts: Mapping[str, nn.Module],
    tracks: Mapping[str, Tracks],
    plan: BlockPlan,
    rule: TokenRule,
    settings: Calibration,
    progress: Callable[[str], None] | None,
) -> list[BlockRecord]:
    """Every block of the stack in forward order."""
    blocks, base_blocks = plan.blocks(student), plan.blocks(base)
    teachers = {task: plan.blocks(expert) for task, expert in experts.items()}
    records = []
    for index, block in enumerate(blocks):
        start = time.perf_counter()
        modules = calibrated_modules(block, settings.norm)
        view = BlockView(f"{plan.stack.name}.{index:02d}", plan.stack, index + 1 == len(blocks), modules, rule)
        teachers_here = {task: expert_blocks[index] for task, expert_blocks in teachers.items()}
        records.append(calibrate_block(block, base_blocks[index], teachers_here, tracks, view, settings))
        if progress:
            progress(line(records[-1], len(experts), time.perf_counter() - start))
    return records
