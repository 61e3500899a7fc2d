"""Block-by-block merging in forward order: carry every task's features to a block, merge its
linears, go on.

One module runs everything: it takes the tensors of the model to run, so at most one block of the
experts is in memory at a time. A site is a group of linears that read the same tensor (q, k, v).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from featcal.core.moments import add_gram, mirror
from featcal.core.precision import SUM_DTYPE, exact_products
from featcal.errors import BadBatches, BadFile
from featcal.merging.registry import Job, Named
from featcal.merging.sources import Source
from featcal.merging.tensors import average_tensor
from featcal.models.batch import check_batch, check_tasks, naming, pad_token, padding_mask
from featcal.models.capture import Features, feeding, first_inputs, hooked, module_inputs
from featcal.models.families import plan_for
from featcal.models.modules import normalised, solved_modules
from featcal.models.plan import Stack, blocks_of
from featcal.models.replay import stack_output, step

Site = tuple[str, ...]  # names of linears within their block


@dataclass
class Track:
    """One task's batches just before the current block."""

    features: list[Features] = field(default_factory=list)
    masks: list[Tensor | None] = field(default_factory=list)  # (batch, tokens), 0 at padding
    fed_masks: list[Tensor | None] = field(default_factory=list)  # of tokens another stack feeds
    fed: str = ""  # by which keyword blocks receive them


@dataclass
class Seen:
    """Sums of one task in one block."""

    grams: dict[Site, Tensor] = field(default_factory=dict)  # (d, d)  Σ x xᵀ
    tokens: dict[Site, int] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)  # of norms (d,)  Σ x̂², before scale


# (inputs of modules, hidden states and their mask, states fed by another stack and their mask)
Watch = Callable[[dict[str, Tensor], Tensor, Tensor | None, Any, Tensor | None], None]


def watched(
    block: nn.Module, stack: Stack, track: Track, also: Watch | None = None
) -> tuple[Seen, list[Features]]:
    """Return the sums of one block over a task's batches, and the block's outputs.

    Products have the data's precision, sums float64. Raises: BadCapture.
    """
    seen, out = Seen(), []
    linears, norms = solved_modules(block)
    for (hidden, arguments), mask, fed_mask in zip(
        track.features, track.masks, track.fed_masks, strict=True
    ):
        with module_inputs(block, [*linears, *norms]) as inputs:
            out.append(step(block, stack, hidden, arguments))
        fed = arguments[0].get(track.fed)
        for site in sites(inputs, linears):
            x = inputs[site[0]]
            rows = counted(
                x, fed_mask if isinstance(fed, Tensor) and memory(x) == memory(fed) else mask
            )  # (n, d)
            if site not in seen.grams:
                seen.grams[site] = rows.new_zeros(rows.shape[1], rows.shape[1], dtype=SUM_DTYPE)
            add_gram(seen.grams[site], rows)
            seen.tokens[site] = seen.tokens.get(site, 0) + len(rows)
        for name in norms:
            z = counted(normalised(block.get_submodule(name), inputs[name]), mask)
            seen.squares[name] = seen.squares.get(name, 0) + z.square().sum(0, dtype=SUM_DTYPE)
        if also is not None:
            also(inputs, hidden, mask, fed, fed_mask)
    for G in seen.grams.values():
        mirror(G)
    return seen, out


def sites(inputs: dict[str, Tensor], linears: Sequence[str]) -> list[Site]:
    """Group linears by the tensor they read."""
    groups: dict[object, list[str]] = {}
    for name in linears:
        groups.setdefault(memory(inputs[name]), []).append(name)
    return [tuple(names) for names in groups.values()]


def memory(x: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for two live tensors with the same view of the same memory."""
    return x.data_ptr(), x.shape, x.stride()


def counted(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return rows (n, d) of an input (batch, tokens, d) or (batch · tokens, d) without padding.

    Half precision becomes float32.
    """
    if mask is not None and x.shape[: mask.dim()] == mask.shape:
        x = x[mask.bool()]
    elif mask is not None and x.shape[:-1] == (mask.numel(),):
        x = x[mask.flatten().bool()]
    x = x.reshape(-1, x.shape[-1])
    return x if x.dtype == torch.float64 else x.float()


# Weights of one site


def weights_of_site(
    job: Job, path: str, site: Site, block: nn.Module
) -> tuple[Tensor, list[Tensor], list[tuple[str, int, bool]]]:
    """Return W₀ and every τᵢ of a site's linears stacked, (Σo, d) in float64, and for each linear
    its name, its rows, and whether it is stored as (d, o) like GPT-2's.
    """
    parts = []
    bases, experts = [], [[] for _ in job.experts]  # type: ignore[var-annotated]
    for linear in site:
        name = f"{path}{linear}.weight"
        turned = not isinstance(block.get_submodule(linear), nn.Linear)
        base, theirs = job.read(name)
        upright = [(t.T if turned else t).to(SUM_DTYPE) for t in (base, *theirs)]
        bases.append(upright[0])
        for expert, weight in zip(experts, upright[1:], strict=True):
            expert.append(weight - upright[0])
        parts.append((name, upright[0].shape[0], turned))
    return torch.cat(bases), [torch.cat(vectors) for vectors in experts], parts


def split(weight: Tensor, parts: list[tuple[str, int, bool]]) -> Iterator[Named]:
    """Yield the weight of each linear from a site's stacked weight (Σo, d)."""
    rows = torch.split(weight, [rows for _, rows, _ in parts])
    for (name, _, turned), part in zip(parts, rows, strict=True):
        yield name, (part.T if turned else part).contiguous()


def shrunk(G: Tensor, factor: float) -> Tensor:
    """Return G (d, d) with everything off its diagonal multiplied by the factor."""
    return factor * G + (1 - factor) * torch.diag(G.diagonal())


def mean_gram(sums: Seen, site: Site, factor: float) -> Tensor:
    """Return a task's Gram matrix of a site divided by its tokens, off-diagonal entries shrunk."""
    return shrunk(sums.grams[site] / sums.tokens[site], factor)


# The walk through the blocks

# (path of a block, the base's block, the sums of each task) -> merged tensors
Solve = Callable[[str, nn.Module, dict[str, Seen]], Iterator[Named]]


@dataclass
class ForwardOrder:
    """One merge in forward order.

    solve: yields merged tensors of a block; the others become the mean over experts.
    own:   carry every expert's own features (True) or those of the merge so far.
    """

    job: Job
    solve: Solve
    own: bool
    tokens: dict[str, int] = field(default_factory=dict)
    before: set[int] = field(default_factory=set)  # addresses of tensors used before the blocks

    def __post_init__(self) -> None:
        check_tasks(self.job.experts, self.job.batches)
        self.worker = self.job.structure().to(self.job.device).eval()
        require_own_names(self.job, self.worker)
        self.plan = plan_for(self.worker)
        several = len(self.plan.stacks) > 1  # then batches are read once per stack
        self.batches = {
            task: list(self.job.batches[task]) if several else self.job.batches[task]
            for task in self.job.experts
        }
        self.job.record["tokens"] = self.tokens

    @torch.no_grad()
    def tensors(self) -> Iterator[Named]:
        """Yield every tensor of the job."""
        done: set[str] = set()
        if not self.own:
            self._average_outside()
        tracks: dict[str, Track] = {}
        for source, stack in self.plan.in_order:
            fed = (
                {task: self._handed_on(task, source, track) for task, track in tracks.items()}
                if source
                else {}
            )
            tracks = {
                task: self._start(task, source, stack, fed.get(task)) for task in self.job.experts
            }
            paths = [f"{stack.blocks}.{i}." for i in range(len(blocks_of(self.worker, stack)))]
            for path, block in zip(paths, blocks_of(self.worker, stack), strict=True):
                with exact_products():
                    merged = self._block(path, block, stack, tracks)
                done |= merged.keys()
                yield from merged.items()
                self.job.progress(f"{path[:-1]}  {len(tracks)} tasks")
        state = self.worker.state_dict()
        for name in sorted(set(self.job.names) - done):
            base, experts = self.job.read(name)
            yield (
                name,
                average_tensor(base, experts)
                if self.own or state[name].data_ptr() in self.before
                else base,
            )

    def _block(
        self, path: str, block: nn.Module, stack: Stack, tracks: dict[str, Track]
    ) -> dict[str, Tensor]:
        """Sum over one block, merge it, and move every track past it."""
        seen: dict[str, Seen] = {}
        for task, expert in self.job.experts.items():
            become(self.worker, expert, path)
            seen[task], out = watched(block, stack, tracks[task])
            if self.own:
                tracks[task].features = out
        become(self.worker, self.job.base, path)
        merged = {
            name: tensor.to(self.job.base.dtype(name))
            for name, tensor in self.solve(path, block, seen)
        }
        for name in self.job.names:
            if name.startswith(path) and name not in merged:
                merged[name] = average_tensor(*self.job.read(name))
        if not self.own:
            state = self.worker.state_dict()
            for name, tensor in merged.items():
                state[name].copy_(tensor)
            for track in tracks.values():
                track.features = [
                    step(block, stack, hidden, arguments) for hidden, arguments in track.features
                ]
        return merged

    def _average_outside(self) -> None:
        """Set everything outside the blocks to the mean over experts."""
        state, blocks = (
            self.worker.state_dict(),
            tuple(f"{stack.blocks}." for stack in self.plan.stacks),
        )
        for name in self.job.names:
            if not name.startswith(blocks):
                state[name].copy_(average_tensor(*self.job.read(name)))

    def _start(
        self, task: str, source: Stack | None, stack: Stack, fed: tuple[list[Tensor], Track] | None
    ) -> Track:
        """Return a task's track before the first block of a stack."""
        if self.own:
            become(self.worker, self.job.experts[task])
        entered: set[str] = set()
        track = Track(fed=source.feeds if source else "")
        for number, batch in enumerate(self.batches[task]):
            check_batch(task, number, batch, self.worker)
            handed = feeding(self.worker, source, stack, fed[0][number] if fed else None)
            with naming(task, number), handed, entering(self.worker, entered):
                track.features.append(
                    first_inputs(self.worker, blocks_of(self.worker, stack), batch, stack.mixed)
                )
            hidden = track.features[-1][0]
            track.masks.append(padding_mask(batch, hidden, stack.mask, pad_token(self.worker)))
            track.fed_masks.append(fed[1].masks[number] if fed else None)
            mask = track.masks[-1]
            self.tokens[task] = self.tokens.get(task, 0) + (
                int(mask.sum()) if mask is not None else hidden.shape[:-1].numel()
            )
        self.before |= self._tensors_of(entered, stack)
        if not track.features:
            raise BadBatches(
                task, "is empty; at least one batch with at least one sample is needed"
            )
        return track

    def _tensors_of(self, entered: set[str], stack: Stack) -> set[int]:
        """Return addresses of the parameters of the modules that ran.

        Before a later stack only its own part counts, as the others ran after blocks.
        """
        part = "" if stack is self.plan.stacks[0] else stack.blocks.partition(".")[0]
        modules = [self.worker.get_submodule(path) for path in entered if path.startswith(part)]
        return {
            p.data_ptr() for module in modules for p in module.parameters(recurse=False)
        }  # tied ones under one address

    def _handed_on(self, task: str, source: Stack, track: Track) -> tuple[list[Tensor], Track]:
        """Return what a finished stack feeds to the next one, for each batch."""
        become(
            self.worker, self.job.experts[task] if self.own else self.job.base, f"{source.exit}."
        )
        return [stack_output(self.worker, source, hidden) for hidden, _ in track.features], track


def require_own_names(job: Job, worker: nn.Module) -> None:
    """Raise BadFile for a folder whose tensors transformers joins on loading (experts of an MoE)."""
    other = sorted(set(job.names) - worker.state_dict().keys())
    if other:
        way_out = "write all models again, joined: model.save_pretrained(folder, save_original_format=False)"
        raise BadFile(
            job.base.file_of(other[0]),
            f"{other[0]} is stored separately, but this method runs blocks that hold it joined",
            way_out,
        )


@torch.no_grad()
def become(module: nn.Module, model: Source, path: str = "") -> None:
    """Copy a model's tensors into a module, or only those below a path."""
    state = module.state_dict()
    for name in model.names:
        if name.startswith(path):
            state[name].copy_(model.finite_tensor(name))


@contextmanager
def entering(module: nn.Module, entered: set[str]) -> Iterator[None]:
    """Collect the paths of all modules that run inside the context."""

    def note(path: str) -> Callable[..., None]:
        return lambda *_: entered.add(path)

    handles = [
        inner.register_forward_pre_hook(note(path)) for path, inner in module.named_modules()
    ]
    with hooked(handles):
        yield
