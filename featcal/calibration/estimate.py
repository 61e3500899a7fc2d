"""Estimate memory, disk and operations of a calibration from shapes, before a weight is read.

One batch runs through the model on torch's meta device; the rest is arithmetic, for models given as
folders. Tests compare with real runs: operations are within 20 %, memory and disk on CPUs within
25 %; peaks on GPUs are not measured. Experts of a mixture are assumed to get equally many tokens.

Legend: d inputs · o outputs · n rows (tokens of one batch) · work in operations, sizes in bytes.
"""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import accumulate, product
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
Students = list[Calibration]  # settings of the models that are calibrated at once
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
    n: int  # its rows
    width: int  # columns of the cross moment: o where it is folded, else d
    reach: float


@dataclass(frozen=True)
class BlockShape:
    """One block on one batch."""

    stack: str
    sites: tuple[SiteShape, ...]  # in forward order
    stops: tuple[float, ...]  # `reach` of each site and norm
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
    forward: int  # work of one pass, without heads
    weights: int
    largest: int  # weight tensor
    scores: int = 0  # of language heads, while two models' answers are compared


def estimate(shape: ModelShape, job: Job) -> dict[str, dict[str, int]]:
    """Return a process's bytes by use on "device" (GPU), "host" and "disk"; all "operations"."""
    blocks = [block.weights for block in shape.blocks]
    stages = [([PAPER if job.settings == "auto" else job.settings], job)]
    answers, peaks = Counter[str](), list[tuple[dict[str, int], int]]()
    if job.settings == "auto" and job.samples >= choose.FEWEST:
        few, last, held_out = (int(mask.sum()) for mask in choose.parts_of(job.samples))
        stages = [([*choose.CANDIDATES.values()], replace(job, samples=few))]
        stages.append(([choose.STREAM], replace(job, samples=last)))
        # the expert, the merged model and candidates; later the expert and the result. Without a
        # head the expert also sees the samples on which candidates are calibrated
        passes = (len(choose.CANDIDATES) + 2 + 2) * held_out + 2 * few
        answers["answers"] = passes * job.tasks * shape.forward // job.batch
        weights = 2 * (shape.weights - sum(blocks) + max(blocks))  # an expert and a student answer
        scores = shape.scores * min(held_out, job.batch) // job.batch
        peaks.append(({"weights": weights, "scores": scores}, 0))
    peaks += [_peak(shape, *stage) for stage in stages]
    most, on_device = max(waiting for _, waiting in peaks), job.device_memory * job.on_gpu
    budget = on_device + (most if job.host_memory is None else job.host_memory)
    work, waiting = max(peaks, key=lambda peak: sum(peak[0].values()) + min(peak[1], budget))
    kept, in_memory = min(waiting, on_device), min(waiting, budget)
    device, host = (work | {"waiting features": kept}, {}) if job.on_gpu else ({}, work)
    host |= {"waiting features": in_memory - kept, "samples": job.drawn, "libraries": LIBRARIES}
    host["freed but kept"] = 0 if job.on_gpu else sum(host.values()) // 6  # by malloc; measured
    disk = {"waiting features": max(0, most - budget), "calibrated model": shape.weights}
    disk |= {"solved blocks": sum(blocks) * len(stages[0][0]), "while joining": shape.largest}
    operations = sum((_operations(shape, *stage) for stage in stages), Counter[str]()) + answers
    return {"device": device, "host": host, "disk": disk, "operations": dict(operations)}


def _peak(shape: ModelShape, students: Students, job: Job) -> tuple[dict[str, int], int]:
    """Return the bytes of each use of memory at the peak, and of all features that wait."""
    tasks = -(-job.tasks // job.processes)  # of the process that has most
    models, features = len(students) + 1, max(block.features for block in shape.blocks)
    halves = [how for how in students for _ in range(2 if how.ridge == "auto" else 1)]
    outside = shape.weights - sum(block.weights for block in shape.blocks)
    moments = [{"weights": 2 * outside, "batch": 2 * features}]
    for block in (block for block in shape.blocks if block.sites):
        widest = max(block.sites, key=lambda site: site.d)  # site by site this one takes most
        sites = [s for how in halves for s in ([widest] if how.order == "sites" else block.sites)]
        sums = SUM * sum(s.d * (s.d + s.width) for s in sites)
        systems = SUM * sum(s.d * (s.d + s.o) for s in sites)
        W = max(s.d * s.o for s in sites)  # values of the largest weight
        # features that may wait elsewhere are copied; on a GPU a product is added as it is made
        read = 2 * (block.inputs + features * (job.on_gpu or job.host_memory is not None))
        added = (PRODUCT if job.on_gpu else PRODUCT + SUM) * max(s.d * s.width for s in sites)
        adding = (PRODUCT + 2 * SUM) * W  # the expert's weight, twice, and the right side
        batch = max(read + max(2 * block.widest, added), adding)
        # before the last task one block is read ahead; before the second there are no systems
        for earlier, ahead in ((tasks > 2, tasks > 1), (tasks > 1, False)):
            use = {"weights": (models + ahead) * block.weights, "moments": sums}
            moments.append(use | {"systems": systems * earlier, "batch": batch})
        solving = (2 * PRODUCT + 4 * SUM) * W  # weight and anchor; the step, twice
        if len(halves) > len(students):  # a factor of one half
            solving += 2 * SUM * widest.d**2
        moments.append({"weights": models * block.weights, "systems": systems, "solve": solving})
    waiting = models * tasks * features * job.samples // job.batch
    return max(moments, key=lambda uses: sum(uses.values())), waiting


def _operations(shape: ModelShape, students: Students, job: Job) -> Counter[str]:
    """Count operations, 2 for one multiplication and addition."""
    outside = shape.forward - sum(block.forward for block in shape.blocks)
    passes, products, solves = (len(students) + 1.0) * outside, 0.0, 0.0
    by_site = any(how.order == "sites" for how in students)
    for block in shape.blocks:
        reach = [site.reach for site in block.sites]
        # by site: a pass for each norm and site, up to its input
        block_passes, turns = (sum(reach[:-1]) + 1, len(reach)) if by_site else (1, 1)
        for how in students:
            seen = sum(block.stops) if how.order == "sites" else max(block.stops, default=0)
            block_passes += seen + 1 + (how.order == "stale")
        passes += block_passes * block.forward + turns * block.routed
        for s, how in product(block.sites, students):
            gram = sum((b - a) * (s.d - a) for a, b in stripes(s.d, job.on_gpu))
            products += 2 * s.n * (s.d * s.width + gram)
            # right sides; a factor, the anchor and two triangular solves
            solves += job.tasks * 2 * s.d**2 * s.o + s.d**3 // 3 + 4 * s.d**2 * s.o
            if how.ridge == "auto":
                solves += 2 * EVALUATIONS * (s.d**3 // 3 + 4 * s.d**2 * min(s.o, PROJECTIONS))
    count = job.tasks * job.samples / job.batch
    parts = {"forward passes": count * passes, "products": count * products, "solves": solves}
    return Counter({name: round(value) for name, value in parts.items()})


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
    result, shapes = None, list[BlockShape]()
    eager = getattr(getattr(model, "config", None), "_attn_implementation", "eager") == "eager"
    meta, flops = _Meta("attention_mask" in batch, eager), FlopCounterMode(display=False)
    model.requires_grad_(False)  # torch's counter follows gradients of some functions even here
    try:
        with torch.no_grad(), unpacked(model), meta, flops:
            for source, stack in plan.in_order:
                blocks, rule = blocks_of(model, stack), plan.rule(stack)
                features = first_inputs(model, stack, batch, source, result)
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
    return ModelShape(tuple(shapes), flops.get_total_flops(), sum(sizes), max(sizes), scores)


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
    linears, norms = solved_modules(block, how.norm, how.modules)
    outputs = {name: len(weight_of(block.get_submodule(name))) for name in solved_modules(block)[0]}
    captured = module_inputs(block, [*linears, *norms], others=outputs.keys() - {*linears})
    with FlopCounterMode(display=False) as flops, captured as inputs:
        out = step(block, stack, *before)
    work = [x.numel() * outputs.get(name, 0) for name, x in inputs.items()]
    shares = (done / max(sum(work), 1) for done in accumulate([0, *work[:-1]]))
    reach, sites = dict(zip(inputs, shares, strict=True)), list[SiteShape]()
    for names in shared_sites(inputs, linears, lambda n, _: rule(n, last, before[0].shape[:2])):
        n, d = inputs[names[0]].flatten(0, -2).shape
        o, furthest = sum(outputs[name] for name in names), max(reach[name] for name in names)
        sites.append(SiteShape(names, d, o, n, o if o < FOLDED_SHARE * d else d, furthest))
    sites.sort(key=lambda site: site.reach)
    stops = [site.reach for site in sites] + [reach[name] for name in norms]
    sizes = map(nbytes, (list(block.parameters()), out, list(inputs.values())))
    widest = max(map(nbytes, inputs.values()), default=0)
    forward, routed = flops.get_total_flops(), sum(e.work for e in unpacked_experts(block).values())
    return BlockShape(stack.name, tuple(sites), tuple(stops), *sizes, widest, forward, routed), out
