"""Run one calibration on several processes: tasks are dealt to ranks, each site's sums are reduced to
its owner, and the owner broadcasts the solution.

Ranks exchange small objects before every transfer of tensors. A rank that failed reports it there,
so no other rank waits for its tensors. Knows no models and no files."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from featcal.calibration.observe import Site, Systems
from featcal.core.norm import NormSystem
from featcal.core.precision import SUM_DTYPE
from featcal.core.ridge import Solution
from featcal.errors import BadCapture, BadSetting, RankLostError, RemoteRankError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Ranks:
    """A single process, for which every method is the identity."""

    rank, world = 0, 1

    @property
    def first(self) -> bool:
        """Return whether this process writes files and reports progress."""
        return self.rank == 0

    def mine(self, tasks: Collection[str]) -> list[str]:
        """Return the tasks of this process, dealt in sorted order. Raises: BadSetting for more
        processes than tasks.
        """
        if self.world > len(tasks):
            raise BadSetting(
                "torchrun --nproc-per-node",
                self.world,
                f"must be at most {len(tasks)}, the number of tasks, since every process takes whole ones; "
                "run several experiments side by side, each on its own GPUs (CUDA_VISIBLE_DEVICES), to use more",
            )
        return sorted(tasks)[self.rank :: self.world]

    def summed(self, systems: Systems) -> Systems:
        """Return the sums over all tasks: all norms, and the sites that this process solves. The
        argument is consumed.
        """
        return systems

    def shared(self, solutions: dict[Site, Solution]) -> dict[Site, Solution]:
        """Return the solutions of all sites from all processes."""
        return solutions

    def gathered(self, records: Mapping[str, T]) -> dict[str, T]:
        """Return the records of all tasks, sorted by name."""
        return {task: records[task] for task in sorted(records)}

    def together(self) -> None:
        """Wait for every process."""

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """Wait for every process at the end; a failure in one ends all."""
        yield


class SeveralRanks(Ranks):
    """One of several processes, which call the same methods in the same order and get bit-identical
    results.
    """

    def __init__(
        self,
        object_group: dist.ProcessGroup | None = None,
        tensor_group: dist.ProcessGroup | None = None,
    ):
        """Set the groups for objects and for tensors. Default: torch's default group."""
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.object_group, self.tensor_group = object_group, tensor_group
        self.device = torch.device("cpu")  # that of the sums, once there are any
        self.over = False  # a failure is known to all ranks, which exchange nothing more

    def summed(self, systems: Systems) -> Systems:
        """Raises: BadCapture unless the tasks of all processes have the same sites."""
        widths = {site: len(system.left) for site, system in systems.sites.items()}
        if any(others != widths for others in self.all_gather_checked(widths)):
            raise BadCapture(
                sorted({n for site in widths for n in site}),
                "they share inputs differently from task to task",
            )
        for site, owner in owners(widths, self.world).items():
            system = systems.sites[site] if owner == self.rank else systems.sites.pop(site)
            self.device = system.left.device
            for name, sums in [
                (field.name, getattr(system, field.name)) for field in fields(system)
            ]:
                setattr(system, name, self.moved(dist.reduce, sums, owner))
        for name in sorted(systems.norms):
            systems.norms[name] = self.summed_norm(systems.norms[name])
        return systems

    def summed_norm(self, system: NormSystem) -> NormSystem:
        """Return the sum of a norm's system on every process, all of which solve it."""
        parts = (system.zz, system.z, system.right_gain, system.right_shift)  # (d,) each
        sums = self.moved(
            dist.all_reduce, torch.cat([*parts, system.z.new_tensor([system.tasks])])
        )  # (4d + 1,)
        zz, z, gain, shift = sums[:-1].chunk(len(parts))
        return NormSystem(zz, z, gain, shift, float(sums[-1]))

    def shared(self, solutions: dict[Site, Solution]) -> dict[Site, Solution]:
        """Broadcast each solution from the process that solved it."""
        said = self.all_gather_checked(
            {
                site: (solution.weight.shape, solution.conditioning)
                for site, solution in solutions.items()
            }
        )
        source = {site: owner for owner, theirs in enumerate(said) for site in theirs}
        everywhere = {}
        for site in sorted(source):
            owner = source[site]
            (o, d), conditioning = said[owner][site]
            if owner == self.rank:
                W, b = solutions[site].weight, solutions[site].bias  # (o, d), (o,)
            else:
                W, b = (
                    torch.empty(shape, dtype=SUM_DTYPE, device=self.device)
                    for shape in ((o, d), (o,))
                )
            W, b = self.moved(dist.broadcast, W, owner), self.moved(dist.broadcast, b, owner)
            everywhere[site] = Solution(W, b, conditioning)
        return everywhere

    def gathered(self, records: Mapping[str, T]) -> dict[str, T]:
        """Gather records without tensors, such as drift and counts."""
        everybodys = {
            task: record
            for theirs in self.all_gather_checked(dict(records))
            for task, record in theirs.items()
        }
        return super().gathered(everybodys)

    def together(self) -> None:
        """Wait for every process, and raise if one failed."""
        self.all_gather_checked(None)

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """Raise RemoteRankError where another process failed, RankLostError where one is gone."""
        try:
            yield
            self.together()
        except Exception as mistake:
            if not self.over:
                self.all_gather_checked(None, mistake)
            raise

    def all_gather_checked(self, said: T, mistake: Exception | None = None) -> list[T]:
        """Return one object from every process, ordered by rank.

        Raises: RemoteRankError on every rank but the first failed one.
        """
        heard: list[Any] = [None] * self.world
        told = None if mistake is None else str(mistake) or type(mistake).__name__
        with self.reaching_others():
            dist.all_gather_object(heard, (told, said), group=self.object_group)
        mistakes = {rank: text for rank, (text, _) in enumerate(heard) if text}
        self.over = bool(mistakes)
        if mistakes and self.rank != min(mistakes):
            raise RemoteRankError(mistakes[min(mistakes)])
        return [words for _, words in heard]

    def moved(self, transfer: Callable[..., object], tensor: Tensor, *root: int) -> Tensor:
        """Return the tensor after a collective operation of torch.

        Gloo copies raw memory, so a column-major weight, as a Cholesky solve returns it, would
        silently arrive transposed.
        """
        tensor = tensor.contiguous()
        with self.reaching_others():
            transfer(tensor, *root, group=self.tensor_group)
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
    """Return which rank solves which site: the heaviest site first, always to the least loaded rank.

    A factorisation of d features costs d³.
    """
    load, owner = [0] * world, {}
    for site in sorted(widths, key=lambda site: (-widths[site], site)):
        owner[site] = load.index(min(load))
        load[owner[site]] += widths[site] ** 3
    return owner


started_ranks: ContextVar[Ranks | None] = ContextVar("started_ranks", default=None)


def current() -> Ranks:
    """Return the ranks made by `torchrun.started`, or those of torch's default process group."""
    ranks = started_ranks.get()
    if ranks is not None:
        return ranks
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return SeveralRanks() if several else Ranks()


TRANSFER = timedelta(
    seconds=60
)  # one tensor for which all ranks are there; also their first finding each other
MEETING = timedelta(
    days=1
)  # a slow rank is waited for; of a dead one the connection breaks, which gloo notices at once
TOLD = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)  # by torchrun, to each process


@contextmanager
def started() -> Iterator[None]:
    """Inside, `ranks.current()` is this process among those that torchrun started; what goes wrong
    in one ends all.

    Raises: BadSetting where the environment tells of several processes, but not how they find each
    other; RankLostError where one of them does not come or is gone; RemoteRankError where another
    one ends with an error, which it has told by then.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield
        return
    for name in TOLD:
        if name not in os.environ:
            raise BadSetting(
                name,
                None,
                "must be set beside WORLD_SIZE; start several processes with torchrun, or unset that",
            )
    import torch.distributed as dist

    ranks = joined()
    token = started_ranks.set(ranks)
    try:
        with ranks.fail_together():
            yield
    except RemoteRankError:
        with suppress(
            RankLostError
            # until the other one is gone, after its message: torchrun ends all when the first is gone
        ):
            ranks.together()
        raise
    finally:
        started_ranks.reset(token)
    # not behind an error: to the others a broken connection is the end of this process
    dist.destroy_process_group()


def joined() -> "SeveralRanks":
    """All processes' common group for tensors in the memory of the CPU, and one to meet in."""
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", timeout=TRANSFER)
        return SeveralRanks(object_group=dist.new_group(backend="gloo", timeout=MEETING))
    except RuntimeError as error:  # of which torch's errors of connections are
        raise RankLostError(error) from error


def own_device(device: "torch.device") -> "torch.device":
    """The device of this process: of several on GPUs each has its own, and their tensors move
    through NCCL from now on.

    Raises: BadSetting where there are more processes than GPUs.
    """
    if device.type != "cuda" or os.environ.get("WORLD_SIZE", "1") == "1":
        return device
    import torch
    import torch.distributed as dist

    ranks, local, count = current(), int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    assert isinstance(ranks, SeveralRanks)
    if local >= count:
        way_out = f"must be at most {count}, the number of GPUs here; or add --device cpu"
        raise BadSetting(
            "--nproc-per-node", int(os.environ.get("LOCAL_WORLD_SIZE", local + 1)), way_out
        )
    ranks.together()  # hears of a process without a GPU before it would be waited for
    torch.cuda.set_device(local)
    ranks.tensor_group = dist.new_group(backend="nccl", timeout=TRANSFER)
    return torch.device("cuda", local)
