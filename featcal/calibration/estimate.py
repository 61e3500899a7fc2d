"""Estimate memory, disk and operations of a calibration from shapes, before a weight is read.

One batch runs through the model on torch's meta device; the rest is arithmetic, for models given as
folders. Tests compare with real runs: operations are within 20 %, memory and disk on CPUs within
25 %; peaks on GPUs are not measured. Experts of a mixture are assumed to get equally many tokens.

Legend: d inputs · o outputs · n rows (tokens of one batch) · work in operations, sizes in bytes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from featcal.calibration import choose
from featcal.calibration.observe import FOLDED_SHARE, PAPER, shared_sites
from featcal.core.moments import TokenRule, stripes
from featcal.core.ridge import PROJECTIONS
from featcal.errors import BadPlan, one_line
from featcal.models.batch import Batch, changes_logits, output_embeddings
from featcal.models.blocks import Features, first_inputs, module_inputs, nbytes, stack_output, step
from featcal.models.modules import solved_modules, unpacked, unpacked_experts, weight_of
from featcal.models.plan import BlockPlan, Stack, blocks_of
from featcal.settings import Calibration

SUM, PRODUCT = 8, 4  # bytes of a value in a sum, and in a product (half precision is widened)
LIBRARIES = 42 << 20  # bytes of host memory that torch's code takes on its first use; measured
Students = Sequence[Calibration]  # settings of the models that are calibrated at once
EVALUATIONS = 7  # of one site's error, in the search for its λ


@dataclass(frozen=True)
class Job:
    """The size of a calibration, and the memory it may use."""

    tasks: int
    samples: int  # of each task
    batch: int  # samples in memory at a time
    settings: choose.CalibrationOrAuto = PAPER
    on_gpu: bool = False
    device_memory: int = 0  # bytes of cached features on the GPU
    host_memory: int | None = None  # the same in host memory; the rest goes to disk
    processes: int = 1  # that share the tasks
    drawn: int = 0  # bytes of samples that the caller keeps in host memory


@dataclass(frozen=True)
class SiteShape:
    """Linears that read one tensor; `reach` is the share of the block's work done before them."""

    linears: tuple[str, ...]
    d: int
    o: int  # of all its linears together
    n: int  # rows that count
    width: int  # columns of the cross moment: o where it is folded, else d
    reach: float


@dataclass(frozen=True)
class BlockShape:
    """One block on one batch."""

    stack: str
    sites: tuple[SiteShape, ...]  # in forward order
    norms: tuple[float, ...]  # `reach` of each norm
    weights: int
    features: int  # hidden states and arguments after the block
    inputs: int  # everything that linears and norms read
    widest: int  # largest activation, with attention scores where they are kept
    forward: int  # work of one pass
    routed: int  # the part of it that is in a mixture's experts


@dataclass(frozen=True)
class ModelShape:
    """A model on one batch."""

    blocks: tuple[BlockShape, ...]
    entry: int  # work before the first block, of all stacks
    weights: int
    largest: int  # weight tensor
    scores: int = 0  # of language heads, while two models' answers are compared


def estimate(shape: ModelShape, job: Job) -> dict[str, dict[str, int]]:
    """Return a process's bytes by use on "device" (GPU), "host" and "disk"; all "operations"."""
    passes = 0  # of single samples, for answers
    stages = [((PAPER if job.settings == "auto" else job.settings,), job)]
    if job.settings == "auto" and job.samples >= choose.FEWEST:
        few, last, held_out = (int(mask.sum()) for mask in choose.parts_of(job.samples))
        stages = [(tuple(choose.CANDIDATES.values()), replace(job, samples=few))]
        stages.append(((choose.STREAM,), replace(job, samples=last)))
        # the expert, the merged model and candidates; later the expert and the result. Without a
        # head the expert also sees the samples on which candidates are calibrated
        passes = (len(choose.CANDIDATES) + 2 + 2) * held_out + 2 * few
    memory = [_memory(shape, *stage) for stage in stages]
    operations = sum((Counter(_operations(shape, *stage)) for stage in stages), Counter[str]())
    blocks = [block.weights for block in shape.blocks]
    if passes:  # an expert and a student answer
        forward = shape.entry + sum(block.forward for block in shape.blocks)
        operations["answers"] = passes * job.tasks * forward // job.batch
        weights = 2 * (shape.weights - sum(blocks) + max(blocks))
        work = {"weights": weights, "scores": shape.scores * min(held_out, job.batch) // job.batch}
        fixed = {"samples": job.drawn, "libraries": LIBRARIES}
        on_host = {"device": {}, "host": work | fixed}
        memory.append(memory[0] | ({"device": work, "host": fixed} if job.on_gpu else on_host))
    needs = max(memory, key=lambda use: sum(use["device"].values()) + sum(use["host"].values()))
    solved = sum(blocks) * max(len(students) for students, _ in stages)
    needs["disk"] |= {"solved blocks": solved, "calibrated model": shape.weights}
    needs["disk"]["while joining"] = shape.largest
    return needs | {"operations": dict(operations)}


def _memory(shape: ModelShape, students: Students, job: Job) -> dict[str, dict[str, int]]:
    """Return the bytes of each use of memory at the peak, and of the features on disk."""
    tasks = -(-job.tasks // job.processes)  # of the process that has most
    count, features = len(students), max(block.features for block in shape.blocks)
    halves = Counter[bool]()  # systems of a site: of students that solve it alone, and of others
    for settings in students:
        halves[settings.order == "sites"] += 1 + (settings.ridge == "auto")
    outside = shape.weights - sum(block.weights for block in shape.blocks)
    moments = [{"weights": 2 * outside, "batch": 2 * features}]
    for block in shape.blocks:
        turns = [[(site, halves[True])] for site in block.sites if halves[True]] or [[]]
        turns[-1] += [(site, halves[False]) for site in block.sites if halves[False]]
        for group in filter(None, turns):
            sums = SUM * sum(n * s.d * (s.d + s.width) for s, n in group)
            systems = SUM * sum(n * s.d * (s.d + s.o) for s, n in group)
            W = max(s.d * s.o for s, _ in group)  # values of the largest weight
            added = max(s.d * max(s.d // 16, s.width) for s, _ in group)
            added *= PRODUCT if job.on_gpu else PRODUCT + SUM
            seeing = 2 * block.inputs + max(2 * block.widest, block.features + added)
            adding = (PRODUCT + 2 * SUM) * W  # the expert's weight, twice, and the right side
            for seen in {max(tasks - 2, 0), tasks - 1}:  # tasks before; one block is read ahead
                weights = (count + 1 + (seen + 1 < tasks)) * block.weights
                use = {"systems": systems * bool(seen), "batch": max(seeing, adding)}
                moments.append({"weights": weights, "moments": sums} | use)
            solving = (2 * PRODUCT + 4 * SUM) * W  # weight and anchor; the step, twice
            if halves.total() > count:  # λ by halves: a factor of one half
                solving += 2 * SUM * max(s.d * s.d for s, _ in group)
            use = {"systems": systems, "solve": solving}
            moments.append({"weights": (count + 1) * block.weights} | use)
    work = max(moments, key=lambda parts: sum(parts.values()))
    waiting = (count + 1) * tasks * features * job.samples // job.batch
    device = min(waiting, job.device_memory) if job.on_gpu else 0
    host = min(waiting - device, waiting if job.host_memory is None else job.host_memory)
    if job.on_gpu or device + host < waiting:
        work["batch of features"] = 2 * features
    fixed = {"waiting features": host, "samples": job.drawn, "libraries": LIBRARIES}
    return {
        "device": work | {"waiting features": device} if job.on_gpu else {},
        "host": fixed if job.on_gpu else work | fixed,
        "disk": {"waiting features": waiting - device - host},
    }


def _operations(shape: ModelShape, students: Students, job: Job) -> dict[str, int]:
    """Count operations, 2 for one multiplication and addition."""
    passes = products = solves = 0.0
    by_site = any(settings.order == "sites" for settings in students)
    for block in shape.blocks:
        reach = [site.reach for site in block.sites]
        furthest, separate = max((*reach, *block.norms), default=0.0), sum((*reach, *block.norms))
        # by site: a pass for each norm and site, up to its input
        block_passes, turns = (sum(reach[:-1]) + 1, len(reach)) if by_site else (1, 1)
        for settings in students:
            reached = separate if settings.order == "sites" else furthest
            block_passes += reached + 1 + (settings.order == "stale")
        passes += block_passes * block.forward + turns * block.routed
        for s, settings in product(block.sites, students):
            gram = sum((b - a) * (s.d - a) for a, b in stripes(s.d, job.on_gpu))
            products += 2 * s.n * (s.d * s.width + gram)
            # right sides; a factor, the anchor and two triangular solves
            solves += job.tasks * 2 * s.d**2 * s.o + s.d**3 // 3 + 4 * s.d**2 * s.o
            if settings.ridge == "auto":
                solves += 2 * EVALUATIONS * (s.d**3 // 3 + 4 * s.d**2 * min(s.o, PROJECTIONS))
    count = job.tasks * job.samples / job.batch
    passes = count * ((len(students) + 1) * shape.entry + passes)
    parts = {"forward passes": passes, "products": count * products, "solves": solves}
    return {name: round(value) for name, value in parts.items()}


class _Meta(TorchDispatchMode):
    """Answer a model's test for padding; note the largest tensor if attention keeps its scores."""

    def __init__(self, padded: bool, eager: bool):
        super().__init__()
        self.padded, self.eager, self.widest = padded, eager, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return not self.padded
        out = func(*args, **(kwargs or {}))
        self.widest = max(self.widest, nbytes(out) * self.eager)
        return out


def model_shape(
    model: nn.Module, plan: BlockPlan, batch: Batch, method: choose.CalibrationOrAuto = PAPER
) -> ModelShape:
    """Return the shapes of one batch's pass through a model, both on meta. Raises: BadPlan."""
    settings = PAPER if method == "auto" else method
    entry, result, shapes = 0, None, list[BlockShape]()
    eager = getattr(getattr(model, "config", None), "_attn_implementation", "eager") == "eager"
    model.requires_grad_(False)  # torch's counter follows gradients of some functions even here
    try:
        with torch.no_grad(), unpacked(model), _Meta("attention_mask" in batch, eager) as meta:
            for source, stack in plan.in_order:
                blocks, rule = blocks_of(model, stack), plan.rule(stack)
                with FlopCounterMode(display=False) as flops:
                    features = first_inputs(model, stack, batch, source, result)
                entry += flops.get_total_flops()
                for block in blocks:
                    meta.widest, last = 0, block is blocks[-1]
                    shape, features = _block(block, stack, features, settings, rule, last)
                    shapes.append(replace(shape, widest=max(shape.widest, meta.widest)))
                result = stack_output(model, stack, features[0]) if stack.feeds else None
        scores = _scores(model, features[0])
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        problem = f"its forward depends on values, or on other inputs ({one_line(error)})"
        way_out = "calibrate it on few samples and measure what that run takes"
        raise BadPlan(type(model).__name__, problem, way_out) from error
    sizes = [nbytes(p) for p in model.parameters()]
    return ModelShape(tuple(shapes), entry, sum(sizes), max(sizes), scores)


def _scores(model: nn.Module, hidden: torch.Tensor) -> int:
    """Return the most bytes of scores of a batch's tokens in `choose.divergences`."""
    if (head := output_embeddings(model)) is None:
        return 0
    values = hidden.shape[:-1].numel() * len(head.get_parameter("weight"))
    # of both models: some rows' scores and their logarithms; if the model changes its logits, also
    # all of them: the expert's, and the student's as returned and without padding
    pieces = 4 * PRODUCT * min(values, choose.SCORES_AT_ONCE)
    return pieces + 3 * changes_logits(model) * values * hidden.element_size()


def _block(
    block: nn.Module, stack: Stack, before: Features, how: Calibration, rule: TokenRule, last: bool
) -> tuple[BlockShape, Features]:
    """Return the shape of one block, and the features after it."""
    tokens, all_linears = tuple(before[0].shape[:2]), solved_modules(block)[0]
    linears, norms = solved_modules(block, how.norm, how.modules)
    captured = module_inputs(block, [*linears, *norms], others={*all_linears} - {*linears})
    with FlopCounterMode(display=False) as flops, captured as inputs:
        out = step(block, stack, *before)
    outputs = {name: len(weight_of(block.get_submodule(name))) for name in all_linears}
    sites = list[SiteShape]()
    work_before = dict[str, int]()  # by module: work of the linears that run before it
    work = widest = 0
    for name, x in inputs.items():
        work_before[name], o = work, outputs.get(name, 0)
        work += x.numel() * o
        widest = max(widest, nbytes(x), nbytes(x) * o // x.shape[-1])
    for names, w in shared_sites(inputs, linears, lambda name, _: rule(name, last, tokens)).items():
        x, o = inputs[names[0]], sum(outputs[name] for name in names)
        d, n = x.shape[-1], round(x.shape[:-1].numel() * float((w != 0).double().mean()))
        reach = max(work_before[name] for name in names) / work
        sites.append(SiteShape(names, d, o, n, o if o < FOLDED_SHARE * d else d, reach))
    sites.sort(key=lambda site: site.reach)
    norm_reach = tuple(work_before[name] / max(work, 1) for name in norms)
    sizes = map(nbytes, (list(block.parameters()), out, list(inputs.values())))
    routed = sum(part.work for part in unpacked_experts(block).values())
    measured = *sizes, widest, flops.get_total_flops(), routed
    return BlockShape(stack.name, tuple(sites), norm_reach, *measured), out
