"""A first λ in one pass: at every site, which λ brings the solution nearest to the experts on
samples held out.

At a site this is exact for the features that reach it, and all values of λ together cost one
eigendecomposition. From block to
block it is greedy: what a later site sees was calibrated with the λ that was started from, not with
the one tried. So what comes out is a candidate like any other, and is calibrated and compared as
one.
"""

import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featcal.blocks.linear import side_by_side
from featcal.blocks.plan import BlockPlan, Stack, blocks_of
from featcal.calibration.block import add_task, load, solve
from featcal.calibration.calibrate import budgets
from featcal.calibration.models import Model, hold_models
from featcal.calibration.observe import BlockView, observe
from featcal.calibration.ranks import Ranks
from featcal.calibration.run_folder import block_name
from featcal.calibration.sites import Systems, calibrated_modules
from featcal.calibration.stacks import Run, handed_over, opened, started
from featcal.calibration.tracks import HandedOn, Tracks, advance_student
from featcal.core.path import ridge_path
from featcal.core.precision import exact_products
from featcal.core.ridge import anchor
from featcal.core.weighting import TokenRule
from featcal.models.residency import in_turn
from featcal.settings import OFF, Calibration
from featcal.storage.spool import Spool
from featcal.tuning.settings import LOG_RIDGE

Batches = Mapping[str, Iterable[Mapping[str, Any]]]
Gains = dict[str, Tensor]  # by site, for every λ

RIDGES = tuple(
    10 ** (LOG_RIDGE[0] + LOG_RIDGE[2] * n)
    for n in range(round((LOG_RIDGE[1] - LOG_RIDGE[0]) / LOG_RIDGE[2]) + 1)
)


def ridge_of(gains: Gains) -> float:
    """The λ with the largest sum over sites of gain(λ) / largest gain; sites without any gain are
    left out.

    The largest λ where no site gains anything: the anchor is best everywhere.
    """
    shares = [gain / gain.max() for gain in gains.values() if gain.max() > 0]
    return RIDGES[int(torch.stack(shares).sum(0).argmax())] if shares else RIDGES[-1]


def path_gains(
    merged: Model,
    base: Model,
    experts: Mapping[str, Model],
    kept: Batches,
    held: Batches,
    settings: Calibration,
    *,
    plan: BlockPlan | None = None,
    token_weights: TokenRule | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    host_memory: int | None = None,
    work: str | Path | None = None,
) -> Gains:
    """Gains of every site at every λ of RIDGES, on the way of a calibration with `settings` in
    forward order, as in the paper.

    What goes beyond the paper is left out here: the λ found is a candidate, which is calibrated
    with all of the settings.
    kept, held: batches of every task; blocks are solved on the former.   Raises: as `calibrate`.
    """
    settings = settings.but(order="forward", **OFF)
    with ExitStack() as open_:
        models = hold_models(
            merged, base, experts, plan, settings, whole=True, device=device, dtype=dtype
        )
        open_.enter_context(models.evaluated())
        open_.enter_context(exact_products())
        spool = open_.enter_context(
            Spool(*budgets(models.device, host_memory), Path(work or tempfile.gettempdir()))
        )
        run = Run(models, len(experts), settings, token_weights, spool, None, False, Ranks(), None)
        parts = opened(run, kept), opened(run, held)
        handed: tuple[dict[str, HandedOn], ...] = ({}, {})
        gains: Gains = {}
        for source, stack in models.plan.in_order:
            tracks = [
                started(run, source, stack, part, given)
                for part, given in zip(parts, handed, strict=True)
            ]
            gains |= stack_gains(run, stack, tracks[0], tracks[1], source.feeds if source else "")
            handed = tuple(handed_over(run, stack, each) if stack.feeds else {} for each in tracks)
        return gains


def stack_gains(
    run: Run, stack: Stack, kept: Mapping[str, Tracks], held: Mapping[str, Tracks], fed: str
) -> Gains:
    """One stack, block by block: gains first, then the block is solved and both parts of the
    samples move behind it.
    """
    models, settings, gains = run.models, run.settings, Gains()
    rule = run.token_weights or models.plan.rule(stack)
    count = len(blocks_of(models.student.module, stack))
    for index in range(count):
        path = f"{stack.blocks}.{index}"
        with models.student.block(path) as block, models.base.block(path) as base:
            modules = calibrated_modules(block, settings.norm, settings.modules)
            view = BlockView(
                block_name(stack, index), stack, index + 1 == count, modules, rule, fed
            )
            seen, apart = Systems(), Systems()
            for task, teacher in in_turn(models.experts, path):
                add_task(seen, observe(block, teacher, kept[task], view), teacher, settings)
                add_task(apart, observe(block, teacher, held[task], view), teacher, settings)
            gains |= block_gains(seen, apart, block, base, view.name, settings)
            load(block, solve(seen, block, base, view.name, settings, run.ranks), settings)
            for task in models.experts:
                advance_student(block, stack, kept[task])
                advance_student(block, stack, held[task])
    return gains


def block_gains(
    seen: Systems,
    apart: Systems,
    block: nn.Module,
    base: nn.Module,
    place: str,
    settings: Calibration,
) -> Gains:
    """Gains at the sites of one block, which still holds the merged weights."""
    gains = Gains()
    for site, system in seen.sites.items():
        W, W_base = (
            side_by_side(module.get_submodule(name) for name in site)[0] for module in (block, base)
        )
        name = f"{place}.{'+'.join(site)}"
        gains[name] = ridge_path(system, anchor(W, W_base, settings.anchor_blend), site=name).gains(
            apart.sites[site], RIDGES
        )
    return gains
