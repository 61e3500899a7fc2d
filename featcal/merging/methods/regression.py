"""Mergers that solve each linear for outputs near the experts', on features carried block by block.

Sources: RegMean, Jin et al., 2023 (bloomberg/dataless-model-merging, src/configs/exps: 0.1 off the
diagonal for T5 and DeBERTa; padding counts there, but not here); FusionBench's code for CLIP, 0.95.
MaTS, Tam et al., 2024 (arXiv 2312.04339) and the authors' code without gradients of outputs
(r-three/mats, src/merging/conjugateGradient_fisherMerging.py, 100 steps from task arithmetic at 0.3,
scipy's tolerance). LOT, restated from the published formula (Sun et al., 2025, arXiv 2505.23859,
Eqs. 9 and 12); its authors' code could not be consulted. Where the formula is silent we sum over
tokens (no means), and average biases, shifts, embeddings and the norms outside the blocks."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from pydantic import NonNegativeInt, PositiveFloat
from torch import Tensor, nn
from transformers import CLIPModel

from featcal.calibration import features
from featcal.calibration.block import BatchStream
from featcal.calibration.features import StudentTeacherFeatures, TaskFeatures
from featcal.calibration.observe import BlockSpec, Site, Tokens, row_weights, shared_sites
from featcal.calibration.scratch import Spool
from featcal.core.moments import add_gram, every_token, mirror
from featcal.core.precision import SUM_DTYPE, wide
from featcal.errors import BadFile, SingularGram, counted
from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.merging.sources import Tensors
from featcal.merging.tensors import average_tensor, stacked_vectors, task_vectors, tensor_sum
from featcal.models.blocks import hooked, module_inputs, step
from featcal.models.modules import is_solvable_norm, normalised, solved_modules
from featcal.models.plan import Stack, blocks_of, plan_for
from featcal.models.streamed import InMemoryModel
from featcal.settings import Fraction, require

TEXTS, IMAGES = 0.1, 0.95  # factors of the Gram matrices off their diagonal
TOLERANCE = 1e-5  # scipy's: of the residual, relative to the right-hand side


@dataclass
class Gram:
    """The Gram matrix Σ x xᵀ (d, d) over the tokens of one task at one site."""

    total: Tensor
    rounding: float  # of its products, relative
    tokens: int = 0

    def mean(self, off_diagonal: float) -> Tensor:
        """Return the Gram matrix per token, entries off its diagonal times a factor."""
        G = self.total / self.tokens
        return off_diagonal * G + (1 - off_diagonal) * torch.diag(G.diagonal())


# sums over one task's tokens in one block: Grams by site; Σ x̂² (d,) of norms' inputs before scaling
BlockSums = tuple[dict[Site, Gram], dict[str, Tensor]]
# (label, each task's Gram, W₀, each task's τ (Σo, d) in float64) -> merged weight (Σo, d)
SolveSite = Callable[[str, Sequence[Gram], Tensor, list[Tensor]], Tensor]


@dataclass
class ForwardOrder:
    """One merge, block by block; tensors that neither `solve` nor `norms` merges become the mean.

    One module takes the tensors of the model to run, so at most one block of the experts is in
    memory. A site is a group of linears that read the same tensor (q, k, v), not packed experts.
    """

    job: MergeJob
    solve: SolveSite
    per_expert: bool  # carry every expert's own features, or those of the merge so far
    norms: bool = False  # merge the scales of LayerNorms and RMSNorms as LOT does

    def __post_init__(self) -> None:
        self.worker = self.job.structure().to(self.job.device).eval()
        extra = sorted(set(self.job.names) - self.worker.state_dict().keys())
        if extra:  # experts of an MoE
            problem = f"{extra[0]} is stored separately, but this method runs blocks that join it"
            way_out = "save all models with save_pretrained(folder, save_original_format=False)"
            raise BadFile(self.job.base[extra[0]].file, problem, way_out)
        self.plan, given = plan_for(self.worker), self.job.batches
        # without a limit: all features stay on their device
        self.spool = Spool(sys.maxsize, sys.maxsize, tempfile.gettempdir())
        stream_of = partial(BatchStream, plan=self.plan, spool=self.spool, digested=False)
        self.batches = {task: stream_of(given[task]) for task in self.job.experts}
        if isinstance(self.worker, CLIPModel):
            needs = "must have texts too; to merge vision towers, give experts of CLIPVisionModel"
            for batch in chain.from_iterable(self.batches.values()):
                require("input_ids" in batch, "merge.batches", list(batch), needs)
        task, stream = next(iter(self.batches.items()))
        for batch in stream.head():
            features.check_plan(self.plan, task, batch, [InMemoryModel(self.worker)])
        self.tokens: dict[str, int] = self.job.record.setdefault("tokens", {})
        self.before: set[int] = set()  # addresses of tensors that run before the blocks

    @torch.no_grad()
    def tensors(self) -> NamedTensors:
        """Yield every tensor of the job."""
        done, state = set[str](), self.worker.state_dict()
        if not self.per_expert:  # outside the blocks the merge so far is the mean
            inside = tuple(f"{stack.blocks}." for stack in self.plan.stacks)
            for name in self.job.names:
                if not name.startswith(inside):
                    state[name].copy_(average_tensor(*self.job.read(name)))
        tasks = dict[str, StudentTeacherFeatures]()
        for feeder, stack in self.plan.in_order:
            tasks = {t: self._start(t, feeder, stack, tasks.get(t)) for t in self.job.experts}
            for i, block in enumerate(blocks_of(self.worker, stack)):
                path = f"{stack.blocks}.{i}."
                merged = self._merge_block(path, block, feeder, stack, tasks)
                done |= merged.keys()
                yield from merged.items()
                self.job.progress(f"{path[:-1]}  {counted(len(tasks), 'task')}")
        for name in sorted(set(self.job.names) - done):
            base, experts = self.job.read(name)
            average = self.per_expert or state[name].data_ptr() in self.before
            yield name, average_tensor(base, experts) if average else base

    def _merge_block(
        self, path: str, block: nn.Module, feeder: Stack | None, stack: Stack, tasks: TaskFeatures
    ) -> dict[str, Tensor]:
        """Sum over one block, merge it, and move every task's features past it."""
        sums = []
        for task, expert in self.job.experts.items():
            copy_tensors(expert, self.worker, path)
            sums.append(self._sum_block(block, feeder, stack, tasks[task]))
        solved = self._solve_block(path, block, sums)
        merged = {name: tensor.to(self.job.base[name].dtype) for name, tensor in solved}
        for name in self.job.names:
            if name.startswith(path) and name not in merged:
                merged[name] = average_tensor(*self.job.read(name))
        if not self.per_expert:
            copy_tensors(self.job.base, self.worker, path)
            state = self.worker.state_dict()
            for name, tensor in merged.items():
                state[name].copy_(tensor)
            for carried in tasks.values():
                features.advance(block, stack, carried.teacher)
        return merged

    def _sum_block(
        self, block: nn.Module, feeder: Stack | None, stack: Stack, task: StudentTeacherFeatures
    ) -> BlockSums:
        """Return the sums of one block over a task's batches; move its expert's features past it."""
        grams, squares = dict[Site, Gram](), dict[str, Tensor]()
        linears, norms = map(tuple, solved_modules(block, self.norms))
        norms = tuple(name for name in norms if is_solvable_norm(block.get_submodule(name)))
        spec = BlockSpec(type(block).__name__, stack, linears, norms, every_token, last=False)
        for number, mask in enumerate(task.masks):
            hidden, arguments = task.teacher[number]
            with module_inputs(block, [*linears, *norms]) as inputs:
                output = step(block, stack, hidden, arguments)
            fed = arguments[0].get(feeder.feeds) if feeder else None
            tokens = Tokens(hidden, mask, fed, task.encoder_masks[number])
            weigh = partial(row_weights, spec, tokens, {})
            for site, weights in shared_sites(inputs, linears, weigh).items():
                rows = wide(inputs[site[0]][weights > 0])  # (n, d)
                zeros = rows.new_zeros(rows.shape[1], rows.shape[1], dtype=SUM_DTYPE)
                gram = grams.setdefault(site, Gram(zeros, torch.finfo(rows.dtype).eps))
                add_gram(gram.total, rows)
                gram.tokens += len(rows)
            for name in norms:
                x = inputs[name]
                z = wide(normalised(block.get_submodule(name), x)[weigh(name, x) > 0])
                squares[name] = squares.get(name, 0) + z.square().sum(0, dtype=SUM_DTYPE)
            if self.per_expert:
                task.teacher[number] = output
        for gram in grams.values():
            mirror(gram.total)
        return grams, squares

    def _solve_block(self, path: str, block: nn.Module, sums: Sequence[BlockSums]) -> NamedTensors:
        """Yield the weights of a block's linears and the scales of its norms that were summed."""
        grams, squares = zip(*sums, strict=True)
        for site in grams[0]:
            names = [f"{path}{linear}.weight" for linear in site]
            linears = [isinstance(block.get_submodule(linear), nn.Linear) for linear in site]
            transposed = {name for name, linear in zip(names, linears, strict=True) if not linear}
            W0, vectors, rows = stacked_vectors(self.job, names, transposed)
            merged = self.solve(path + site[0], [by_site[site] for by_site in grams], W0, vectors)
            for name, part in zip(names, torch.split(merged, rows), strict=True):
                yield name, (part.T if name in transposed else part).contiguous()
        for norm in squares[0]:
            name = f"{path}{norm}.weight"
            base, experts = self.job.read(name)
            tau = lot_scale([by_norm[norm] for by_norm in squares], task_vectors(base, experts))
            yield name, base.to(SUM_DTYPE) + tau

    def _start(
        self, task: str, feeder: Stack | None, stack: Stack, fed: StudentTeacherFeatures | None
    ) -> StudentTeacherFeatures:
        """Return a task's features before a stack's first block; `fed` are those after `feeder`."""
        if feeder and fed:
            model = self.job.experts[task] if self.per_expert else self.job.base
            copy_tensors(model, self.worker, f"{feeder.exit}.")
            features.leave_stack(self.worker, feeder, fed.teacher)
        if self.per_expert:
            copy_tensors(self.job.experts[task], self.worker)
        # before a later stack only its own part counts: the others ran after blocks
        part = "" if stack is self.plan.stacks[0] else stack.blocks.partition(".")[0]

        def note(module: nn.Module, _: object) -> None:  # tied parameters share an address
            self.before |= {p.data_ptr() for p in module.parameters(recurse=False)}

        modules = self.worker.get_submodule(part).modules()
        arguments = self.worker, stack, self.batches[task], self.spool, feeder
        with hooked([module.register_forward_pre_hook(note) for module in modules]):
            first = features.first_features(task, [], *arguments, fed if feeder else None)
        self.tokens[task] = self.tokens.get(task, 0) + first.tokens
        return first


@torch.no_grad()
def copy_tensors(tensors: Tensors, module: nn.Module, path: str = "") -> None:
    """Copy a model's tensors into a module, or only those below a path."""
    state = module.state_dict()
    for name, tensor in tensors.items():
        if name.startswith(path):
            state[name].copy_(tensor.finite())


def regmean_matrix(grams: list[Tensor], vectors: list[Tensor], label: str = "linear") -> Tensor:
    """Return τ = (Σ τᵢ Gᵢ)(Σ Gᵢ)⁻¹, (o, d) in float64: Wᵀ = (Σ Gᵢ)⁻¹ Σ Gᵢ Wᵢᵀ, W₀ subtracted.

    grams: Gᵢ (d, d), off-diagonals already shrunk; vectors: τᵢ = Wᵢ − W₀ (o, d).
    """
    left = tensor_sum(grams)
    right = tensor_sum([G @ vector.T for G, vector in zip(grams, vectors, strict=True)])  # (d, o)
    factor, failed = torch.linalg.cholesky_ex(left)
    if failed or not factor.isfinite().all():
        no_samples = "if a feature is zero everywhere, no samples help: use the method lot instead"
        ways_out = "give more samples, or", f"lower merge.off_diagonal below 1; {no_samples}"
        raise SingularGram(f"regmean: {label}", 0.0, left.shape[0], *ways_out)
    return torch.cholesky_solve(right, factor).T.contiguous()


def regression_mean(job: MergeJob, off_diagonal: float | None, per_expert: bool) -> NamedTensors:
    """Yield every tensor; `per_expert` as in ForwardOrder. Each G is divided by its tokens."""

    def solve(label: str, grams: Sequence[Gram], W0: Tensor, vectors: list[Tensor]) -> Tensor:
        return W0 + regmean_matrix([gram.mean(off_diagonal) for gram in grams], vectors, label)

    merge = ForwardOrder(job, solve, per_expert)
    if off_diagonal is None:
        config = getattr(merge.worker, "config", None)
        sees = hasattr(config, "vision_config") or hasattr(config, "patch_size")
        off_diagonal = job.record["off_diagonal"] = IMAGES if sees else TEXTS
    return merge.tensors()


@method(source="Jin et al., 2023; for images FusionBench", needs=("batches",))
def regmean(job: MergeJob, off_diagonal: Fraction | None = None) -> NamedTensors:
    """Yield linears of the blocks by RegMean, all other tensors and packed experts by their mean.

    off_diagonal: factor of the Gram matrices off their diagonal. Default: 0.1 for texts, as in
                  most of the authors' runs, and 0.95 for images, as in FusionBench.
    """
    yield from regression_mean(job, off_diagonal, per_expert=True)


@method(source="Nguyen et al., 2025", needs=("batches",))
def regmean_plus_plus(job: MergeJob, off_diagonal: Fraction | None = None) -> NamedTensors:
    """Yield every tensor by RegMean++: RegMean on the features of the merge so far.

    Tensors after the last block stay the base's.
    """
    yield from regression_mean(job, off_diagonal, per_expert=False)


def conjugate_gradients(G: Tensor, R: Tensor, start: Tensor, steps: int) -> tuple[Tensor, int]:
    """Solve X G = R, G (d, d) ≥ 0, R (o, d), by conjugate gradients. Returns: X and step count."""
    X, residual = start.clone(), R - start @ G
    direction, square = residual.clone(), residual.square().sum()
    for done in range(steps):
        if square.sqrt() <= TOLERANCE * R.square().sum().sqrt():
            return X, done
        product = direction @ G
        length = square / (direction * product).sum()
        X += length * direction
        residual -= length * product
        before, square = square, residual.square().sum()
        direction = residual + square / before * direction
    return X, steps


@method(source="Tam et al., 2024", needs=("batches",))
def mats(
    job: MergeJob, steps: NonNegativeInt = 100, scale: float = 0.3, off_diagonal: Fraction = 1.0
) -> NamedTensors:
    """Yield every tensor by MaTS, other tensors than linears of the blocks by their mean.

    A linear minimises Σ ‖(W − Wᵢ) Gᵢ^½‖² from W₀ + s Σ τᵢ.

    steps:        of conjugate gradients, taken together by linears with one input, such as q, k, v.
    scale:        s of the task arithmetic they start from.
    off_diagonal: as for regmean; 1 leaves the Gram matrices as they are.
    """
    step_counts: dict[str, int] = {}

    def solve(label: str, grams: Sequence[Gram], W0: Tensor, vectors: list[Tensor]) -> Tensor:
        G = [gram.mean(off_diagonal) for gram in grams]
        R = tensor_sum([(W0 + tau) @ G_task for G_task, tau in zip(G, vectors, strict=True)])
        start = W0 + scale * tensor_sum(vectors)
        W, step_counts[label] = conjugate_gradients(tensor_sum(G), R, start, steps)
        return W

    merge = ForwardOrder(job, solve, per_expert=True)
    job.record["steps"] = step_counts
    yield from merge.tensors()


def lot_matrix(grams: list[Tensor], vectors: list[Tensor], rtol: float | None = None) -> Tensor:
    """Return τ* = (Σ τᵢ Gᵢ)(Σ Gᵢ)⁺, (o, d), with Gᵢ = XᵢᵀXᵢ (d, d): Eq. 9; 0 without features."""
    right = tensor_sum([vector @ G for G, vector in zip(grams, vectors, strict=True)])  # (o, d)
    return right @ torch.linalg.pinv(tensor_sum(grams), hermitian=True, rtol=rtol)


def lot_scale(squares: list[Tensor], vectors: list[Tensor]) -> Tensor:
    """Return τ* = Σ ‖x̂ᵢ‖² τᵢ / Σ ‖x̂ᵢ‖² per dimension (Eq. 12), (d,); 0 without any features."""
    weight = torch.stack(squares)
    total = weight.sum(0)
    return (weight * torch.stack(vectors)).sum(0) / total.masked_fill(total == 0, 1)


@method(
    source="Sun et al., 2025 (arXiv 2505.23859)",
    needs=("batches",),
    note="from the published formula: its authors' code could not be consulted",
)
def lot(job: MergeJob, rtol: PositiveFloat | None = None) -> NamedTensors:
    """Yield every tensor by LOT.

    rtol: eigenvalues below this share of the largest are 0. Default: d times float64's rounding;
          with fewer tokens than a linear's d inputs, of the model's dtype, at least float32.
    """

    def solve(_: str, grams: Sequence[Gram], W0: Tensor, vectors: list[Tensor]) -> Tensor:
        few = rtol is None and sum(gram.tokens for gram in grams) < W0.shape[1]
        least = W0.shape[1] * grams[0].rounding if few else rtol  # else it inverts rounding
        return W0 + lot_matrix([gram.total for gram in grams], vectors, least)

    yield from ForwardOrder(job, solve, per_expert=True, norms=True).tensors()
