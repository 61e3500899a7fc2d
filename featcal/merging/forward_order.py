"""Block-by-block merging: carry every task's features to a block, merge its linears, go on.

One module takes the tensors of the model to run, so at most one block of the experts is in memory.
A site is a group of linears that read the same tensor (q, k, v).
"""

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from featcal.calibration.features import (
    StudentTeacherFeatures,
    advance,
    first_features,
    leave_stack,
)
from featcal.calibration.observe import BlockSpec, Site, row_weights, shared_sites
from featcal.calibration.scratch import Spool
from featcal.core.moments import add_gram, every_token, mirror
from featcal.core.precision import SUM_DTYPE, exact_products, wide
from featcal.errors import BadFile
from featcal.merging.registry import MergeJob, NamedTensors
from featcal.merging.sources import Tensors
from featcal.merging.tensors import average_tensor, stacked_vectors, task_vectors
from featcal.models.batch import check_tasks
from featcal.models.blocks import hooked, module_inputs, step
from featcal.models.modules import normalised, solved_modules
from featcal.models.plan import Stack, blocks_of, plan_for


@dataclass
class Gram:
    """The Gram matrix Σ x xᵀ (d, d) over the tokens of one task at one site."""

    total: Tensor
    tokens: int = 0

    def mean(self, off_diagonal: float) -> Tensor:
        """Return the Gram matrix per token, entries off its diagonal times a factor."""
        G = self.total / self.tokens
        return off_diagonal * G + (1 - off_diagonal) * torch.diag(G.diagonal())


# sums over one task's tokens in one block: Grams by site; Σ x̂² (d,) of norms' inputs before scaling
BlockSums = tuple[dict[Site, Gram], dict[str, Tensor]]
# (label, each task's Gram, W₀, each task's τ (Σo, d) in float64) -> merged weight (Σo, d)
SolveSite = Callable[[str, Sequence[Gram], Tensor, list[Tensor]], Tensor]
# (each task's squares, each task's τ (d,) in float64) -> task vector of the merged scale (d,)
SolveNorm = Callable[[list[Tensor], list[Tensor]], Tensor]


@dataclass
class ForwardOrder:
    """One merge in forward order; all that `solve` and `solve_norm` leave becomes the mean.

    own: carry every expert's own features (True) or those of the merge so far.
    """

    job: MergeJob
    solve: SolveSite
    own: bool
    solve_norm: SolveNorm | None = None

    def __post_init__(self) -> None:
        check_tasks(self.job.experts, self.job.batches)
        self.worker = self.job.structure().to(self.job.device).eval()
        joined = sorted(set(self.job.names) - self.worker.state_dict().keys())
        if joined:  # experts of an MoE
            raise BadFile(
                self.job.base[joined[0]].file,
                f"{joined[0]} is stored separately, but this method runs blocks that hold it joined",
                "save all models with model.save_pretrained(folder, save_original_format=False)",
            )
        self.plan = plan_for(self.worker)
        several = len(self.plan.stacks) > 1  # then batches are read once per stack
        self.batches = {
            task: list(self.job.batches[task]) if several else self.job.batches[task]
            for task in self.job.experts
        }
        # without a limit: all features stay on their device
        self.spool = Spool(sys.maxsize, sys.maxsize, tempfile.gettempdir())
        self.tokens: dict[str, int] = {}
        self.job.record["tokens"] = self.tokens
        self.before: set[int] = set()  # addresses of tensors that run before the blocks

    @torch.no_grad()
    def tensors(self) -> NamedTensors:
        """Yield every tensor of the job."""
        done: set[str] = set()
        state = self.worker.state_dict()
        if not self.own:  # outside the blocks the merge so far is the mean
            inside = tuple(f"{stack.blocks}." for stack in self.plan.stacks)
            for name in self.job.names:
                if not name.startswith(inside):
                    state[name].copy_(average_tensor(*self.job.read(name)))
        tasks = dict[str, StudentTeacherFeatures]()
        for feeder, stack in self.plan.in_order:
            tasks = {t: self._start(t, feeder, stack, tasks.get(t)) for t in self.job.experts}
            for i, block in enumerate(blocks_of(self.worker, stack)):
                path = f"{stack.blocks}.{i}."
                with exact_products():
                    merged = self._merge_block(path, block, feeder, stack, tasks)
                done |= merged.keys()
                yield from merged.items()
                self.job.progress(f"{path[:-1]}  {len(tasks)} tasks")
        for name in sorted(set(self.job.names) - done):
            base, experts = self.job.read(name)
            average = self.own or state[name].data_ptr() in self.before
            yield name, average_tensor(base, experts) if average else base

    def _merge_block(
        self,
        path: str,
        block: nn.Module,
        feeder: Stack | None,
        stack: Stack,
        tasks: Mapping[str, StudentTeacherFeatures],
    ) -> dict[str, Tensor]:
        """Sum over one block, merge it, and move every task's features past it."""
        sums = []
        for task, expert in self.job.experts.items():
            copy_tensors(expert, self.worker, path)
            sums.append(sum_block(block, feeder, stack, tasks[task], move=self.own))
        solved = self._solve_block(path, block, sums)
        merged = {name: tensor.to(self.job.base[name].dtype) for name, tensor in solved}
        for name in self.job.names:
            if name.startswith(path) and name not in merged:
                merged[name] = average_tensor(*self.job.read(name))
        if not self.own:
            copy_tensors(self.job.base, self.worker, path)
            state = self.worker.state_dict()
            for name, tensor in merged.items():
                state[name].copy_(tensor)
            for features in tasks.values():
                advance(block, stack, features.teacher)
        return merged

    def _solve_block(self, path: str, block: nn.Module, sums: Sequence[BlockSums]) -> NamedTensors:
        """Yield the weights of a block's linears and, with `solve_norm`, the scales of its norms.

        The weights of a site are stacked, (Σo, d); those stored as (d, o) are turned.
        """
        grams, squares = zip(*sums, strict=True)
        for site in grams[0]:
            names = [f"{path}{linear}.weight" for linear in site]
            linears = [isinstance(block.get_submodule(linear), nn.Linear) for linear in site]
            turned = {name for name, linear in zip(names, linears, strict=True) if not linear}
            W0, vectors, rows = stacked_vectors(self.job, names, turned)
            merged = self.solve(path + site[0], [own[site] for own in grams], W0, vectors)
            for name, part in zip(names, torch.split(merged, rows), strict=True):
                yield name, (part.T if name in turned else part).contiguous()
        for norm in squares[0] if self.solve_norm else ():
            name = f"{path}{norm}.weight"
            base, experts = self.job.read(name)
            tau = self.solve_norm([own[norm] for own in squares], task_vectors(base, experts))
            yield name, base.to(SUM_DTYPE) + tau

    def _start(
        self,
        task: str,
        feeder: Stack | None,
        stack: Stack,
        fed: StudentTeacherFeatures | None,
    ) -> StudentTeacherFeatures:
        """Return a task's features before a stack's first block; `fed` are those after `feeder`."""
        if feeder and fed:
            model = self.job.experts[task] if self.own else self.job.base
            copy_tensors(model, self.worker, f"{feeder.exit}.")
            leave_stack(self.worker, feeder, fed.teacher)
        if self.own:
            copy_tensors(self.job.experts[task], self.worker)
        # before a later stack only its own part counts: the others ran after blocks
        part = "" if stack is self.plan.stacks[0] else stack.blocks.partition(".")[0]

        def note(module: nn.Module, _: object) -> None:  # tied parameters share an address
            self.before |= {p.data_ptr() for p in module.parameters(recurse=False)}

        modules = self.worker.get_submodule(part).modules()
        own = self.worker, stack, self.batches[task], self.spool
        with hooked([module.register_forward_pre_hook(note) for module in modules]):
            features = first_features(task, [], *own, feeder, fed if feeder else None)
        self.tokens[task] = self.tokens.get(task, 0) + features.tokens
        return features


def sum_block(
    block: nn.Module,
    feeder: Stack | None,
    stack: Stack,
    features: StudentTeacherFeatures,
    move: bool,
) -> BlockSums:
    """Return the sums of one block over a task's batches, and `move` the features past it.

    Products have the data's precision, sums float64.
    """
    grams, squares = dict[Site, Gram](), dict[str, Tensor]()
    linears, norms = solved_modules(block)
    spec = BlockSpec(type(block).__name__, stack, (*linears,), (*norms,), every_token, last=False)
    for number, mask in enumerate(features.masks):
        hidden, arguments = features.teacher[number]
        with module_inputs(block, [*linears, *norms]) as inputs:
            output = step(block, stack, hidden, arguments)
        fed = arguments[0].get(feeder.feeds) if feeder else None
        tokens = (hidden, mask), (fed, features.encoder_masks[number])
        weigh = partial(row_weights, spec, tokens, {})
        for site, weights in shared_sites(inputs, linears, weigh).items():
            rows = wide(inputs[site[0]][weights > 0])  # (n, d)
            d = rows.shape[1]
            gram = grams.setdefault(site, Gram(rows.new_zeros(d, d, dtype=SUM_DTYPE)))
            add_gram(gram.total, rows)
            gram.tokens += len(rows)
        for name in norms:
            x = inputs[name]
            z = wide(normalised(block.get_submodule(name), x)[weigh(name, x) > 0])
            squares[name] = squares.get(name, 0) + z.square().sum(0, dtype=SUM_DTYPE)
        if move:
            features.teacher[number] = output
    for gram in grams.values():
        mirror(gram.total)
    return grams, squares


@torch.no_grad()
def copy_tensors(tensors: Tensors, module: nn.Module, path: str = "") -> None:
    """Copy a model's tensors into a module, or only those below a path."""
    state = module.state_dict()
    for name, each in tensors.items():
        if name.startswith(path):
            state[name].copy_(each.finite())
