"""Run one calibration on several processes: each takes some tasks, and solves some sites for all.

Before tensors, processes exchange objects: a failed one reports its error there, and none waits.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from featcal.calibration.observe import Site, Systems
from featcal.core.precision import SUM_DTYPE
from featcal.core.ridge import Solution
from featcal.errors import BadCapture, RankLostError, RemoteRankError, SingularGram
from featcal.settings import require

T = TypeVar("T")

# for one tensor that all processes are ready for, and for finding each other
TRANSFER_TIMEOUT = timedelta(seconds=60)
# for a slow process; gloo notices at once when the connection to a dead one breaks
MEETING_TIMEOUT = timedelta(days=1)
PROCESSES = "torchrun --nproc-per-node"


class Ranks:
    """One of several processes, which call the same methods in the same order; or a single one."""

    tensor_group: dist.ProcessGroup | None = None

    def __init__(self, object_group: dist.ProcessGroup | None = None):
        several = dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        self.first = self.rank == 0  # writes files and reports progress
        self.object_group = object_group
        self.device = torch.device("cpu")  # that of the sums, once there are any
        self.over = False  # a failure is known to all, and nothing more is exchanged

    def mine(self, tasks: Collection[str]) -> list[str]:
        """Return the tasks of this process, dealt in sorted order. Raises: BadSetting."""
        expected = f"must be at most {len(tasks)}, the number of tasks; to use more, run several "
        expected += "experiments side by side, each on its own GPUs (CUDA_VISIBLE_DEVICES)"
        require(self.world <= len(tasks), PROCESSES, self.world, expected)
        return sorted(tasks)[self.rank :: self.world]

    def summed(self, systems: Systems) -> Systems:
        """Return sums over all tasks of the sites solved by this process. Raises: BadCapture."""
        if self.world == 1:
            return systems
        widths = {site: len(parts[0].left) for site, parts in systems.sites.items()}
        if any(others != widths for others in self.all_gather_checked(widths)):
            linears = sorted({name for site in widths for name in site})
            raise BadCapture(linears, "they share inputs differently from task to task")
        for site, owner in owners(widths, self.world).items():
            parts = systems.sites[site] if owner == self.rank else systems.sites.pop(site)
            for system in parts:
                self.device = system.left.device
                for name, sums in vars(system).items():
                    setattr(system, name, self.transfer(dist.reduce, sums, owner))
        for _, norms in sorted(systems.norms.items()):
            norms[:] = [self.transfer(dist.all_reduce, norm) for norm in norms]
        return systems

    def shared(
        self, solutions: dict[Site, Solution], unsolved: SingularGram | None
    ) -> dict[Site, Solution]:
        """Return all processes' solutions. unsolved: an error of this one, raised in all of them."""
        shapes = {site: (s.weight.shape, s.conditioning) for site, s in solutions.items()}
        gathered, errors = zip(*self.all_gather_checked((shapes, unsolved)), strict=True)
        for error in filter(None, errors):
            raise error
        if self.world == 1:
            return solutions
        owner_of = {site: rank for rank, rank_shapes in enumerate(gathered) for site in rank_shapes}
        everywhere = {}
        for site, owner in sorted(owner_of.items()):
            (o, d), conditioning = gathered[owner][site]
            if owner == self.rank:
                W, b = solutions[site].weight, solutions[site].bias  # (o, d), (o,)
            else:
                W, b = (torch.empty(s, dtype=SUM_DTYPE, device=self.device) for s in ((o, d), (o,)))
            W, b = (self.transfer(dist.broadcast, tensor, owner) for tensor in (W, b))
            everywhere[site] = Solution(W, b, conditioning)
        return everywhere

    def gathered(self, records: Mapping[str, T]) -> dict[str, T]:
        """Return the records of all tasks, sorted by name; they hold no tensors."""
        by_rank = self.all_gather_checked(dict(records))
        return dict(sorted(record for part in by_rank for record in part.items()))

    def together(self) -> None:
        """Wait for every process, and raise if one failed."""
        self.all_gather_checked(None)

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """Wait for every process at the end, and raise if another failed or is gone."""
        try:
            yield
            self.together()
        except Exception as mistake:
            if not self.over:
                self.all_gather_checked(None, mistake)
            raise

    def all_gather_checked(self, value: T, mistake: Exception | None = None) -> list[T]:
        """Return one object from every process. Raises: RemoteRankError if another failed first."""
        if self.world == 1:
            return [value]
        gathered: list[Any] = [None] * self.world
        message = None if mistake is None else str(mistake) or type(mistake).__name__
        with self.reaching_others():
            dist.all_gather_object(gathered, (message, value), group=self.object_group)
        mistakes = {rank: text for rank, (text, _) in enumerate(gathered) if text}
        self.over = bool(mistakes)
        if mistakes and self.rank != min(mistakes):
            raise RemoteRankError(mistakes[min(mistakes)])
        return [value for _, value in gathered]

    def transfer(self, collective: Callable[..., object], tensor: Tensor, *root: int) -> Tensor:
        """Return the tensor after a collective operation, contiguous, as gloo copies raw memory."""
        tensor = tensor.contiguous()
        with self.reaching_others():
            collective(tensor, *root, group=self.tensor_group)
        return tensor

    @contextmanager
    def reaching_others(self) -> Iterator[None]:
        """Raise RankLostError for torch's errors of broken connections and timeouts."""
        try:
            yield
        except RuntimeError as error:
            self.over = True
            raise RankLostError(error) from error


def owners(widths: Mapping[Site, int], world: int) -> dict[Site, int]:
    """Return the rank that solves each site, heaviest (d³) first, each to the least busy rank."""
    load, owner = [0] * world, {}
    for site in sorted(widths, key=lambda site: (-widths[site], site)):
        owner[site] = load.index(min(load))
        load[owner[site]] += widths[site] ** 3
    return owner


RANKS: ContextVar[Ranks | None] = ContextVar("ranks", default=None)


def current() -> Ranks:
    """Return the ranks of `process_group`, or else those of torch's default process group."""
    return RANKS.get() or Ranks()


@contextmanager
def process_group() -> Iterator[None]:
    """Join the processes that torchrun started, if any; inside, `current()` is this one."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield
        return
    way_out = "start several processes with torchrun, or unset WORLD_SIZE"
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        require(name in os.environ, name, None, f"must be set where WORLD_SIZE is; {way_out}")
    try:
        dist.init_process_group("gloo", timeout=TRANSFER_TIMEOUT)
        ranks = Ranks(dist.new_group(backend="gloo", timeout=MEETING_TIMEOUT))
    except RuntimeError as error:  # torch's errors of connections are among these
        raise RankLostError(error) from error
    token = RANKS.set(ranks)
    try:
        with ranks.fail_together():
            yield
    except RemoteRankError:
        # torchrun ends all when the first process ends: wait until the failed one has reported
        with suppress(RankLostError):
            ranks.together()
        raise
    finally:
        RANKS.reset(token)
    # not after an error: a broken connection tells the others that this process has ended
    dist.destroy_process_group()


def process_device(device: torch.device) -> torch.device:
    """Return this process's device; on GPUs each has its own, and tensors move through NCCL."""
    if device.type != "cuda" or os.environ.get("WORLD_SIZE", "1") == "1":
        return device
    ranks, local, count = current(), int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    expected = f"must be at most {count}, the number of GPUs here; or use the CPU"
    require(local < count, PROCESSES, os.environ.get("LOCAL_WORLD_SIZE", local + 1), expected)
    ranks.together()  # learn of a process without a GPU before waiting for it
    torch.cuda.set_device(local)
    ranks.tensor_group = dist.new_group(backend="nccl", timeout=TRANSFER_TIMEOUT)
    return torch.device("cuda", local)
