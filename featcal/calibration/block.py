"""One block of Algorithm 1: observe every task, add up the systems, solve, load, move on.

A system holds the normal equations of one site or of one norm, summed over tasks."""

from collections.abc import Mapping
from contextlib import ExitStack

from torch import Tensor, nn

from featcal.calibration.features import (
    StudentTeacherFeatures,
    advance,
    advance_student,
    advanced_copy,
)
from featcal.calibration.models import Models
from featcal.calibration.observe import (
    BlockMoments,
    BlockSpec,
    Site,
    Systems,
    block_parts,
    observe,
)
from featcal.calibration.ranks import Ranks
from featcal.calibration.report import BlockRecord, block_record
from featcal.core.norm import norm_system, solve_norm
from featcal.core.ridge import anchor, eliminate_bias, prior_system, solve_ridge, task_system
from featcal.errors import BadCapture
from featcal.models.modules import load_side_by_side, shift_of, side_by_side
from featcal.models.moe import expert_of
from featcal.models.streamed import in_turn
from featcal.settings import Calibration

# a task with fewer tokens in one expert of a mixture says too little to count like other tasks
FEWEST_TOKENS = 32


def calibrate_block(
    models: Models,
    path: str,
    student: nn.Module,
    features: Mapping[str, StudentTeacherFeatures],
    spec: BlockSpec,
    settings: Calibration,
    ranks: Ranks,
    block_drift: bool = True,
) -> BlockRecord:
    """Calibrate the student's block in place and move every task's features past it (Algorithm 1,
    lines 2-18).

    Args:
        models: opened models, with the experts of this process.
        path: of the block in each model; `student` is the student's, in memory.
        features: of every task of this process, before the block.
        block_drift: measure the drift after the block. Without it, nothing runs through the last
            block.

    Returns: the record, which like the student is the same on all processes.
    """
    stack, merged_features = spec.stack, {}
    if settings.order == "stale":  # the next block then sees the merged model's features
        for task in features:
            merged_features[task] = advanced_copy(student, stack, features[task].student)
    expert_tokens: dict[str, dict[str, int]] = {}
    conditioning: list[float] = []
    with ExitStack() as opened:
        base = opened.enter_context(models.base.block(path)) if settings.prior else None
        for part in block_parts(student, next(iter(features.values())), spec, settings.order):
            systems = Systems()
            # tasks come sorted by name, so that sums do not depend on the caller's order
            for task, teacher in in_turn(models.experts, path):
                first = not expert_tokens
                moments = observe(student, teacher, features[task], part, check_inputs=first)
                expert_tokens.setdefault(task, {}).update(moments.expert_tokens)
                add_task_systems(systems, moments, teacher, settings, base)
            if base is None:
                base = opened.enter_context(models.base.block(path))
            conditioning += solve_systems(systems, student, base, part, settings, ranks)
    models.round_to_stored_dtype(path, student)
    results = {}
    for task, own in features.items():
        drift = None
        if block_drift:
            drift = advance_student(student, stack, own)
        elif stack.feeds or not spec.last:
            advance(student, stack, own.student)
        if settings.order == "stale":
            own.student.clear()
            own.student = merged_features[task]
        results[task] = drift, own.tokens, expert_tokens[task]
    return block_record(spec.name, ranks.gathered(results), conditioning)


def replay_block(
    models: Models,
    path: str,
    student: nn.Module,
    features: Mapping[str, StudentTeacherFeatures],
    spec: BlockSpec,
    settings: Calibration,
    solved: Mapping[str, Tensor],
) -> None:
    """Load the solution of an earlier run and move every task's features past the block,
    bit-identical to `calibrate_block`.
    """
    if settings.order == "stale":
        for own in features.values():
            advance(student, spec.stack, own.student)
    for name, value in solved.items():
        student.get_parameter(name).copy_(value)
    if settings.order != "stale":
        for own in features.values():
            advance(student, spec.stack, own.student)
    for task, teacher in in_turn(models.experts, path):
        advance(teacher, spec.stack, features[task].teacher)


def add_task_systems(
    systems: Systems,
    moments: BlockMoments,
    teacher: nn.Module,
    settings: Calibration,
    base: nn.Module | None = None,
) -> None:
    """Add one task's normal equations to every system of the block (Eqs. 10, 14, 58).

    The moments are consumed, so that memory does not grow with the number of tasks. `base`, the
    base's block, is needed for the prior. Raises: BadCapture if tasks differ in their sites.
    """
    if systems.sites and systems.sites.keys() != moments.sites.keys():
        linears = sorted({name for site in systems.sites for name in site})
        raise BadCapture(linears, "they share inputs differently from task to task")
    for site in list(moments.sites):
        sums, expert = moments.sites.pop(site), expert_of(site[0], moments.expert_tokens)
        W, b = side_by_side(teacher.get_submodule(name) for name in site)  # (o, d), (o,)
        if expert and moments.expert_tokens[expert] < FEWEST_TOKENS:
            sums.weight.zero_()  # no share; without any task the anchor is kept
        affine = affine_of(teacher, site, settings)
        share = task_system(sums, W, b, settings.interpolation, settings.task_weights, affine)
        if settings.prior and base is not None:
            W_base = side_by_side(base.get_submodule(name) for name in site)[0]
            share += prior_system(W, W_base, settings.prior)
        if site in systems.sites:
            systems.sites[site] += share
        else:
            systems.sites[site] = share
    for name, norm_moments in moments.norms.items():
        norm = teacher.get_submodule(name)
        gain = norm.get_parameter("weight").detach()
        norm_share = norm_system(norm_moments, gain, shift_of(norm))
        known = systems.norms.get(name)
        systems.norms[name] = norm_share if known is None else known + norm_share


def solve_systems(
    systems: Systems,
    student: nn.Module,
    base: nn.Module,
    spec: BlockSpec,
    settings: Calibration,
    ranks: Ranks,
) -> list[float]:
    """Solve every system against its anchor and load the solutions into the student's block (Eqs.
    11, 17, 51, 55, 59).

    The systems are consumed; until it is loaded, the student's block holds the merged weights.
    Returns: a lower bound of each site's condition number. Raises: SingularGram.
    """
    systems, rho, solutions = ranks.summed(systems), settings.anchor_blend, {}
    for site in list(systems.sites):
        A, a = anchors(student, base, site, rho)  # (o, d), (o,)
        system = systems.sites.pop(site)
        if affine_of(student, site, settings) == "joint":
            system = eliminate_bias(system, a, settings.ridge)
        label = f"{spec.name}.{'+'.join(site)}"
        solutions[site] = solve_ridge(system, A, a, settings.ridge, site=label)
    solutions = ranks.shared(solutions)
    for site, solution in solutions.items():
        bias = solution.bias if settings.bias else None
        load_side_by_side([student.get_submodule(n) for n in site], solution.weight, bias)
    for name, sums in systems.norms.items():
        norm, norm_base = student.get_submodule(name), base.get_submodule(name)
        gain, gain_base = (n.get_parameter("weight").detach() for n in (norm, norm_base))
        shift, shift_base = shift_of(norm), shift_of(norm_base)
        blended = None if shift is None or shift_base is None else anchor(shift, shift_base, rho)
        new_gain, new_shift = solve_norm(
            sums, anchor(gain, gain_base, rho), blended, settings.ridge
        )
        gain.copy_(new_gain)
        if shift is not None and new_shift is not None:
            shift.copy_(new_shift)
    return [solution.conditioning for solution in solutions.values()]


def anchors(student: nn.Module, base: nn.Module, site: Site, rho: float) -> tuple[Tensor, Tensor]:
    """Return the anchors (o, d) and (o,) of a site's weight and bias (Eqs. 11 and 51)."""
    (W, b), (W_base, b_base) = (
        side_by_side(block.get_submodule(name) for name in site) for block in (student, base)
    )
    return anchor(W, W_base, rho), anchor(b, b_base, rho)


def affine_of(block: nn.Module, site: Site, settings: Calibration) -> str:
    """Return how weight and bias of a site are solved: "separate" unless all its linears have a
    bias.
    """
    with_bias = all(isinstance(block.get_submodule(name).bias, Tensor) for name in site)
    return settings.affine if with_bias else "separate"
