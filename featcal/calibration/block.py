"""Algorithm 1: in every block observe every task, add up the systems, solve, load, move on."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, islice
from math import inf
from operator import add, iadd

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from featcal.calibration import features, observe
from featcal.calibration.features import Models, TaskFeatures, features_by_task, fingerprint
from featcal.calibration.observe import BlockMoments, BlockSpec, Site, Systems
from featcal.calibration.ranks import Ranks
from featcal.calibration.scratch import Digest, RunFolder, Spool, SpooledList
from featcal.card import BlockRecord, round_digits
from featcal.core.moments import Drift
from featcal.core.norm import norm_ridge_by_halves, norm_system, solve_norm
from featcal.core.ridge import anchor, eliminate_bias, ridge_by_halves, solve_ridge, task_halves
from featcal.errors import BadBatches, BadCapture, SingularGram
from featcal.models import modules
from featcal.models.batch import Batch, Batches, TaskBatches, lasting
from featcal.models.blocks import step
from featcal.models.modules import side_by_side, solved_modules
from featcal.models.plan import BlockPlan, Stack, blocks_of
from featcal.models.streamed import ModelHandle, StreamedModel, in_turn
from featcal.settings import Calibration

# a task that sends fewer tokens to an expert of a mixture does not count for that expert
FEWEST_TOKENS = 32

StudentBlocks = Sequence[tuple[nn.Module, BlockSpec]]
Solved = Sequence[Mapping[str, Tensor]]  # parameters of each student's block by name


@dataclass
class Student:
    """One model that is calibrated with its settings; solved blocks are kept in `folder`."""

    handle: ModelHandle
    settings: Calibration
    folder: RunFolder | None = None
    blocks: list[BlockRecord] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """Models, memory and switches that all sweeps of one calibration share."""

    models: Models
    spool: Spool
    ranks: Ranks
    block_drift: bool = True  # measure the drift after every block
    resume: bool = True
    solve: bool = True  # False only observes the blocks, as a check
    # called after each block: records, seconds, and whether an earlier run had solved it
    report: Callable[[list[BlockRecord], float, bool], None] = lambda *_: None


def calibrate_block(
    run: Run, path: str, students: StudentBlocks, tasks: TaskFeatures
) -> list[BlockRecord]:
    """Calibrate the students' block in place and move all features past it (Alg. 1, lines 3-17)."""
    models, blocks = run.models, [block for block, _ in students]
    stale: dict[tuple[int, str], SpooledList] = {}  # the next block sees the merged features
    for number, (block, spec) in enumerate(students):
        if spec.settings.order == "stale":
            for task, tracks in tasks.items():
                moved = (step(block, spec.stack, *before) for before in tracks.students[number])
                stale[number, task] = SpooledList(run.spool, moved)
    token_counts: dict[str, dict[str, int]] = {}
    conditioning: list[list[float]] = [[] for _ in students]
    by_site = [spec.settings.order == "sites" for _, spec in students]
    pairs = zip(students, next(iter(tasks.values())).students, strict=True)
    parts_of = [observe.block_parts(block, track[0], spec) for (block, spec), track in pairs]
    with ExitStack() as opened:
        base: nn.Module | None = None
        for index, turn in enumerate(max(parts_of, key=len)):
            # students that are not observed by site are observed while the teacher passes the block
            parts = {
                number: student_parts[index if by_site[number] else 0]
                for number, student_parts in enumerate(parts_of)
                if by_site[number] or turn.moves_teacher
            }
            systems = {number: Systems() for number in parts}
            # tasks come sorted by name, so that sums do not depend on the caller's order
            for task, teacher in in_turn(models.experts, path):
                moments = observe.observe(blocks, teacher, tasks[task], parts)
                token_counts.setdefault(task, {}).update(next(iter(moments.values())).expert_tokens)
                if run.solve:
                    for number, sums in moments.items():
                        add_task_systems(systems[number], sums, teacher, parts[number].settings)
            if not run.solve:
                continue
            if base is None:
                base = opened.enter_context(models.base.block(path))
            for number, part in parts.items():
                bounds = solve_systems(systems[number], blocks[number], base, part, run.ranks)
                conditioning[number] += bounds
    records = []
    for number, (block, spec) in enumerate(students):
        if isinstance(models.student, StreamedModel):  # later blocks see what the file will hold
            for name, p in block.named_parameters():
                p.copy_(p.to(models.student.stored[f"{path}.{name}"].dtype))
        results = {}
        for task, tracks in tasks.items():
            drift = None
            if run.block_drift:
                drift = features.advance_student(block, spec.stack, tracks, number)
            elif spec.stack.feeds or not spec.last:
                features.advance(block, spec.stack, tracks.students[number])
            if (number, task) in stale:
                tracks.students[number] = stale[number, task]
            results[task] = drift, tracks.tokens, token_counts[task]
        all_results = run.ranks.gathered(results).values()
        records.append(block_record(spec.name, all_results, conditioning[number]))
    return records


def block_record(
    name: str, tasks: Iterable[tuple[Drift | None, int, Mapping[str, int]]], bounds: list[float]
) -> BlockRecord:
    """Return a block's record from every task's drift, tokens and tokens of each expert."""
    drifts, tokens, counts = zip(*tasks, strict=True)
    means: list[float | None] = [None, None]
    if None not in drifts:
        pairs = [(drift.relative, drift.cosine) for drift in drifts]
        means = [round_digits(sum(values) / len(drifts)) for values in zip(*pairs, strict=True)]
    names = sorted(set().union(*counts))
    experts = {expert: sum(task.get(expert, 0) for task in counts) for expert in names}
    return BlockRecord(name, *means, sum(tokens), round_digits(max(bounds, default=1.0)), experts)


def replay_block(
    models: Models, path: str, students: StudentBlocks, tasks: TaskFeatures, solved: Solved
) -> None:
    """Load an earlier run's solutions and move all features past the block, with the same bits."""
    for number, ((block, spec), solution) in enumerate(zip(students, solved, strict=True)):
        stale = spec.settings.order == "stale"  # the next block sees the merged features
        if not stale:
            block.load_state_dict(solution, strict=False)
        for tracks in tasks.values():
            features.advance(block, spec.stack, tracks.students[number])
        if stale:
            block.load_state_dict(solution, strict=False)
    for task, teacher in in_turn(models.experts, path):
        features.advance(teacher, students[0][1].stack, tasks[task].teacher)


def add_task_systems(
    systems: Systems, moments: BlockMoments, teacher: nn.Module, settings: Calibration
) -> None:
    """Add one task's normal equations to the block's, consuming its moments (Eqs. 10, 14, 58)."""
    if systems.sites and systems.sites.keys() != moments.sites.keys():
        linears = sorted({name for site in systems.sites for name in site})
        raise BadCapture(linears, "they share inputs differently from task to task")
    for site in list(moments.sites):
        parts, expert = moments.sites.pop(site), modules.expert_of(site[0], moments.expert_tokens)
        W, b = side_by_side(teacher.get_submodule(name) for name in site)  # (o, d), (o,)
        if expert and moments.expert_tokens[expert] < FEWEST_TOKENS:
            for sums in parts:
                sums.weight.zero_()  # does not count; if no task does, the anchor is kept
        affine = affine_of(teacher, site, settings)
        shares = task_halves(parts, W, b, settings.interpolation, settings.task_weights, affine)
        total = systems.sites.get(site)
        systems.sites[site] = list(map(iadd, total, shares)) if total else shares
    for name, norm_moments in moments.norms.items():
        norm = teacher.get_submodule(name)
        gain, n = norm.get_parameter("weight").detach(), sum(part[2, 0] for part in norm_moments)
        norm_shares = [norm_system(part, gain, modules.shift_of(norm), n) for part in norm_moments]
        norm_total = systems.norms.get(name)
        systems.norms[name] = list(map(add, norm_total, norm_shares)) if norm_total else norm_shares


def solve_systems(
    systems: Systems, student: nn.Module, base: nn.Module, spec: BlockSpec, ranks: Ranks
) -> list[float]:
    """Solve every system against its anchor and load the solutions (Eqs. 11, 17, 51, 55, 59).

    The systems are consumed. Returns: each site's conditioning. Raises: SingularGram.
    """
    systems, settings, solutions = ranks.summed(systems), spec.settings, {}
    rho, unsolved = settings.anchor_blend, None
    for site in list(systems.sites):
        A, a = anchors(student, base, site, rho)  # (o, d), (o,)
        parts, affine = systems.sites.pop(site), affine_of(student, site, settings)
        ridge = settings.ridge
        if ridge == "auto":
            ridge = ridge_by_halves(parts, A, a, affine)
            parts[0] += parts[1]
        joint = affine == "joint" and ridge < inf
        system = eliminate_bias(parts[0], a, ridge) if joint else parts[0]
        try:
            solutions[site] = solve_ridge(system, A, a, ridge, site=f"{spec.name}.{'+'.join(site)}")
        except SingularGram as error:  # other processes wait for the solution
            unsolved = unsolved or error
    solutions = ranks.shared(solutions, unsolved)
    for site, solution in solutions.items():
        bias = solution.bias if settings.bias else None
        modules.load_side_by_side([student.get_submodule(n) for n in site], solution.weight, bias)
    for name, norm_parts in systems.norms.items():
        norm, norm_base = student.get_submodule(name), base.get_submodule(name)
        gain, gain_base = (n.get_parameter("weight").detach() for n in (norm, norm_base))
        shift = modules.shift_of(norm)
        blended = None if shift is None else anchor(shift, modules.shift_of(norm_base), rho)
        anchors_of_norm = anchor(gain, gain_base, rho), blended
        sums, ridge = norm_parts[0], settings.ridge
        if ridge == "auto":
            sums = norm_parts[0] + norm_parts[1]
            ridge = norm_ridge_by_halves(norm_parts, *anchors_of_norm)
        new = anchors_of_norm if ridge == inf else solve_norm(sums, *anchors_of_norm, ridge)
        if not sums.isfinite().all():
            raise SingularGram(f"{spec.name}.{name}", ridge, len(gain))
        gain.copy_(new[0])
        if shift is not None:
            shift.copy_(new[1])
    return [solution.conditioning for solution in solutions.values()]


def anchors(student: nn.Module, base: nn.Module, site: Site, rho: float) -> tuple[Tensor, Tensor]:
    """Return the anchors (o, d) and (o,) of a site's weight and bias (Eqs. 11 and 51)."""
    models = (map(block.get_submodule, site) for block in (student, base))
    (W, b), (W_base, b_base) = map(side_by_side, models)
    return anchor(W, W_base, rho), anchor(b, b_base, rho)


def affine_of(block: nn.Module, site: Site, settings: Calibration) -> str:
    """Return how a site is solved: "separate" unless all its linears have a bias."""
    with_bias = all(isinstance(block.get_submodule(name).bias, Tensor) for name in site)
    return settings.affine if with_bias else "separate"


def sweep(run: Run, students: Sequence[Student], batches: TaskBatches) -> None:
    """Calibrate the students block by block, each with its settings, and record their blocks."""
    models = run.models
    streams = {task: BatchStream(batches[task], models.plan, run.spool) for task in models.experts}
    task, stream = next(iter(streams.items()))
    for batch in stream.head():
        features.check_plan(models.plan, task, batch, [students[0].handle])
    handles = [student.handle for student in students]
    encoder: TaskFeatures = {}
    for source, stack in models.plan.in_order:
        tasks = features_by_task(models, handles, stack, streams, run.spool, source, encoder)
        single = [task for task, tracks in tasks.items() if tracks.samples < 2]
        if single and any(student.settings.ridge == "auto" for student in students):
            raise BadBatches(single[0], 'has one sample; give two or more for ridge="auto"')
        if not students[0].blocks:  # by now all batches have been read
            digests = {task: str(stream.digest) for task, stream in streams.items()}
            for student in students:
                if student.folder:
                    digest = fingerprint(models, digests, student.settings, run.block_drift)
                    student.folder.resume(run.ranks.gathered({min(streams): digest}), run.resume)
            run.ranks.together()  # no rank reads a block before those of another run are removed
        start = time.perf_counter()
        for path, blocks in student_blocks(models, students, stack, source):
            name = blocks[0][1].name
            solved = [earlier for s in students if s.folder and (earlier := s.folder.solved(name))]
            resumed = len(solved) == len(students)
            if resumed:
                replay_block(models, path, blocks, tasks, [solution for solution, _ in solved])
                records = [record for _, record in solved]
            else:
                records = calibrate_block(run, path, blocks, tasks)
            for student, (block, spec), record in zip(students, blocks, records, strict=True):
                student.blocks.append(record)
                if student.folder and not resumed:
                    student.folder.keep(name, observe.solved_parameters(block, spec), record)
            seconds, start = time.perf_counter() - start, time.perf_counter()
            if run.ranks.first:
                run.report(records, seconds, resumed)
        encoder = features.encoder_outputs(models, handles, stack, tasks)
    run.ranks.together()  # no rank reads a solved block before the first one has written it


class BatchStream:
    """Batches of one task, read once and, if asked, digested; kept for plans with several stacks."""

    def __init__(self, batches: Batches, plan: BlockPlan, spool: Spool, digested: bool = True):
        self._batches, self._digested = iter(lasting(batches)), digested
        self.digest = Digest()
        self._kept = SpooledList(spool) if len(plan.stacks) > 1 else None

    def head(self) -> list[Batch]:
        """Return the first batch in a list, empty if there is none, without consuming it."""
        if self._kept:
            return [self._kept[0]]
        head = list(islice(self._batches, 1))
        self._batches = chain(head, self._batches)
        return head

    def __iter__(self) -> Iterator[Batch]:
        if self._kept:
            yield from self._kept
            return
        for batch in self._batches:
            if self._digested and isinstance(batch, Mapping):
                self.digest.add(*batch, *tree_leaves(dict(batch)))
            if self._kept is not None:
                self._kept.append(batch)
            yield batch


def student_blocks(
    models: Models, students: Sequence[Student], stack: Stack, source: Stack | None
) -> Iterator[tuple[str, StudentBlocks]]:
    """Yield each block's path with every student's block and its specification."""
    count, rule = len(blocks_of(models.student.module, stack)), models.plan.rule(stack)
    keyword = source.feeds if source else ""
    for index in range(count):
        path, name, last = f"{stack.blocks}.{index}", stack.block_name(index), index + 1 == count
        with ExitStack() as opened:
            pairs = []
            for student in students:
                block, settings = opened.enter_context(student.handle.block(path)), student.settings
                linears, norms = map(tuple, solved_modules(block, settings.norm, settings.modules))
                spec = BlockSpec(name, stack, linears, norms, rule, last, keyword, settings)
                pairs.append((block, spec))
            yield path, pairs
