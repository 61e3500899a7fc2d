"""Merging block by block in forward order: every task's features are carried to a block, its
linears are solved, and on.

RegMean and LOT carry each expert's own features, RegMean++ those of the merge so far. One module
does all the running: it takes the tensors of whoever is to be run, so that of the experts no more
than one block is in memory at a time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from featcal.blocks.batches import check_batch, check_tasks, naming, pad_token, padding_mask
from featcal.blocks.capture import feeding, first_inputs, hooked
from featcal.blocks.plan import Stack, blocks_of
from featcal.blocks.plans import plan_for
from featcal.blocks.replay import handed_on, step
from featcal.core.precision import exact_products
from featcal.errors import BadBatches, BadFile
from featcal.merging.arithmetic import average_tensor
from featcal.merging.features import Seen, Track, watched
from featcal.merging.job import Job, Named
from featcal.merging.sources import Source

Solve = Callable[
    [str, nn.Module, dict[str, Seen]], Iterator[Named]
]  # path of a block, the base's block, what each task saw


@dataclass
class ForwardOrder:
    """One merge in forward order.

    solve: yields the merged tensors of a block it has a rule for; the others are the mean over
    experts.
    own:   carry every expert's own features (True) or those of the merge so far.
    """

    job: Job
    solve: Solve
    own: bool
    tokens: dict[str, int] = field(default_factory=dict)
    before: set[int] = field(
        default_factory=set
    )  # addresses of tensors that work before the first block of a stack

    def __post_init__(self) -> None:
        check_tasks(self.job.experts, self.job.batches)
        self.worker = self.job.structure().to(self.job.device).eval()
        require_own_names(self.job, self.worker)
        self.plan = plan_for(self.worker)
        held = {task: self.job.batches[task] for task in self.job.experts}
        several = len(self.plan.stacks) > 1  # then batches are read once per stack
        self.batches = {
            task: list(batches) if several else batches for task, batches in held.items()
        }
        self.job.record["tokens"] = self.tokens

    @torch.no_grad()
    def tensors(self) -> Iterator[Named]:
        """Every tensor of the job."""
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
        """One block: watch every task, solve, and move on every track."""
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
        """Before any block runs the merge is the mean over experts; what runs behind the last one
        is the base's.
        """
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
        """A task's track before the first block of a stack."""
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
        """What the modules that ran hold themselves; before a later stack only its own part, as
        others ran behind blocks.
        """
        part = "" if stack is self.plan.stacks[0] else stack.blocks.partition(".")[0]
        modules = [self.worker.get_submodule(path) for path in entered if path.startswith(part)]
        return {
            p.data_ptr() for module in modules for p in module.parameters(recurse=False)
        }  # tied ones under one address

    def _handed_on(self, task: str, source: Stack, track: Track) -> tuple[list[Tensor], Track]:
        """What the stack that has just been carried through feeds to the next one."""
        become(
            self.worker, self.job.experts[task] if self.own else self.job.base, f"{source.exit}."
        )
        return [handed_on(self.worker, source, hidden) for hidden, _ in track.features], track


def require_own_names(job: Job, worker: nn.Module) -> None:
    """Raise BadFile for a folder whose tensors transformers joins when it loads them, as it does
    with a mixture's experts.
    """
    other = sorted(set(job.names) - worker.state_dict().keys())
    if other:
        way_out = "write all models again, joined: model.save_pretrained(folder, save_original_format=False)"
        raise BadFile(
            job.base.file_of(other[0]),
            f"{other[0]} is stored apart, and this method runs blocks that hold it joined",
            way_out,
        )


@torch.no_grad()
def become(module: nn.Module, model: Source, path: str = "") -> None:
    """Gives a module the tensors of a model, or those below a path only."""
    state = module.state_dict()
    for name in model.names:
        if name.startswith(path):
            state[name].copy_(model.finite_tensor(name))


@contextmanager
def entering(module: nn.Module, entered: set[str]) -> Iterator[None]:
    """Inside, the paths of all modules that run are added."""

    def note(path: str) -> Callable[..., None]:
        return lambda *_: entered.add(path)

    handles = [
        inner.register_forward_pre_hook(note(path)) for path, inner in module.named_modules()
    ]
    with hooked(handles):
        yield
