"""Appendix F on whole models: the features that each linear was solved on, against those that the
finished model gives it.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from featcal.core.ridge import anchor
from featcal.models.families import plan_for
from featcal.models.modules import solved_modules
from featcal.models.plan import blocks_of
from featcal.settings import Calibration
from reproduction.theory.found import Found, relative
from reproduction.theory.sources import Linear, Mismatch, Source, mismatch, relative_loss
from reproduction.theory.tower import Batch, Tower, tower

Inputs = dict[str, dict[str, Tensor]]  # by task, by linear: rows (tokens, d)


@dataclass(frozen=True)
class Models:
    """Everything Appendix F speaks of.

    forward: calibrated on what the calibrated model itself puts out.   stale: on what the merged
    model puts out.
    """

    base: nn.Module
    merged: nn.Module
    experts: Mapping[str, nn.Module]
    forward: nn.Module
    stale: nn.Module


@torch.no_grad()
def check_sources(
    models: Models, batches: Mapping[str, Batch], settings: Calibration, found: Found
) -> None:
    """Every linear of every block."""
    merged, forward, stale = (
        {t: tower(m, x) for t, x in batches.items()}
        for m in (models.merged, models.forward, models.stale)
    )
    experts = {task: tower(models.experts[task], x) for task, x in batches.items()}
    check_prefix(models, batches, forward, found)
    sides: list[tuple[str, Mismatch]] = []
    for index in range(len(next(iter(experts.values())).blocks)):
        names = list(solved_modules(next(iter(experts.values())).blocks[index], norm=False)[0])

        def reaching(
            towers: Mapping[str, Tower],
            hidden: Mapping[str, Tower],
            i: int = index,
            n: list[str] = names,
        ) -> Inputs:
            return {task: towers[task].inputs(i, hidden[task].features[i], n) for task in batches}

        taught = reaching(experts, experts)
        used = {
            "stale": reaching(merged, merged),
            "forward": reaching(merged, forward),
        }  # what each was solved on
        given = {
            "stale": reaching(stale, stale),
            "forward": reaching(forward, forward),
        }  # what the finished model gives
        weights = {"stale": models.stale, "forward": models.forward}
        for kind in used:
            off = torch.stack([_off(used[kind], given[kind], name) for name in names]).sum(0)
            found.add(
                "proposition_8",
                f"{kind}_moved",
                100 * float((off[0] / off[1]).sqrt()),
                len(names),
                block=f"{index:02d}",
            )
        fits: dict[str, list[float]] = {}
        for name in names:
            linear = linear_of(
                models, index, name, {task: taught[task][name] for task in batches}, settings
            )

            def source(inputs: Inputs, name: str = name, linear: Linear = linear) -> Source:
                return linear.source(
                    {task: inputs[task][name] for task in batches}, settings.interpolation
                )

            sources = {kind: source(used[kind]) for kind in used}
            for kind in used:
                W = weight(weights[kind], index, name)
                fits.setdefault(f"{kind}_on_source", []).append(relative_loss(W, sources[kind]))
                fits.setdefault(f"{kind}_deployed", []).append(
                    relative_loss(W, source(given[kind]))
                )
            if index == 0:
                continue  # the first block's source is the same for both
            place = f"{index:02d}.{name}"
            sides.append((place, mismatch(sources["stale"], sources["forward"], linear, settings)))
        for quantity, values in fits.items():
            found.add(
                "proposition_8",
                quantity,
                100 * sum(values) / len(values),
                len(values),
                block=f"{index:02d}",
            )
    for statement, bound in (
        ("proposition_8", "largest"),
        ("proposition_8_transport", "transport"),
    ):
        gaps = torch.tensor([side.gap for _, side in sides], dtype=torch.float64)
        bounds = torch.tensor([getattr(side, bound) for _, side in sides], dtype=torch.float64)
        found.bounded(statement, bounds, gaps)
        for i, (place, _) in enumerate(sides):
            found.show(statement, gaps[i : i + 1], bounds[i : i + 1], place)
    for place, side in sides:
        found.add("proposition_8", "excess", 100 * side.gap / side.best, 1, block=place)


def check_prefix(
    models: Models, batches: Mapping[str, Batch], forward: Mapping[str, Tower], found: Found
) -> None:
    """Eq. 45: what reaches a block is the same before and after that block and the later ones have
    been calibrated.
    """
    half = deepcopy(models.merged)
    stack = plan_for(half).stacks[0]
    errors = []
    for index, (block, solved) in enumerate(
        zip(blocks_of(half, stack), blocks_of(models.forward, stack), strict=True)
    ):
        for task, x in batches.items():
            whole = forward[task].features[index]
            errors.append(relative(tower(half, x).features[index] - whole, whole))
        block.load_state_dict(solved.state_dict())
    found.exact("equation_45", "digits", torch.cat(errors))


def linear_of(
    models: Models, index: int, name: str, x: dict[str, Tensor], settings: Calibration
) -> Linear:
    """One linear with its experts and its anchor."""
    weights = {task: weight(expert, index, name) for task, expert in models.experts.items()}
    pull = anchor(
        weight(models.merged, index, name), weight(models.base, index, name), settings.anchor_blend
    )
    return Linear(weights, x, pull)


def weight(model: nn.Module, index: int, name: str) -> Tensor:
    """The weight (o, d) of one linear of one block."""
    block = blocks_of(model, plan_for(model).stacks[0])[index]
    return block.get_submodule(name).get_parameter("weight").detach()


def _off(used: Inputs, given: Inputs, name: str) -> Tensor:
    """Σ‖used − given‖² and Σ‖given‖² over all tasks, (2,)."""
    pairs = [(used[task][name], given[task][name]) for task in used]
    return torch.stack(
        [sum(((a - b) ** 2).sum() for a, b in pairs), sum((b**2).sum() for _, b in pairs)]
    )  # type: ignore[arg-type,list-item]
