"""Several processes as one: tasks are dealt to ranks, sums go to the site's owner, what the owner
solved comes back to all.

Ranks meet (small objects, however long the slowest takes) before tensors move (at once). So a rank
where something went wrong says so at the next meeting and leaves nobody waiting for its tensors.
Knows no models, no files, and not who started it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from featcal.calibration.sites import Site
from featcal.calibration.systems import Systems
from featcal.core.norm import NormSystem
from featcal.core.precision import SUM_DTYPE
from featcal.core.ridge import Solution
from featcal.errors import BadCapture, BadSetting, RankLostError, RemoteRankError

T = TypeVar("T")


class Ranks:
    """One process, for which every method is the identity."""

    rank, world = 0, 1

    @property
    def first(self) -> bool:
        """Whether this process writes files and tells progress."""
        return self.rank == 0

    def mine(self, tasks: Collection[str]) -> list[str]:
        """The tasks of this process, dealt in the order of names. Raises: BadSetting where one
        would get none.
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
        """Sums over all tasks: every norm, and the sites that this process is to solve. What is
        handed in is used up.
        """
        return systems

    def shared(self, solutions: dict[Site, Solution]) -> dict[Site, Solution]:
        """The solutions of all sites, whoever solved them."""
        return solutions

    def gathered(self, records: Mapping[str, T]) -> dict[str, T]:
        """Small records of all tasks, in the order of names."""
        return {task: records[task] for task in sorted(records)}

    def together(self) -> None:
        """Returns when every process is here."""

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """Left when every process is done; what goes wrong in one ends all."""
        yield


class SeveralRanks(Ranks):
    """One of several processes. All call the same methods in the same order, and all end with the
    same bits.
    """

    def __init__(
        self,
        object_group: dist.ProcessGroup | None = None,
        tensor_group: dist.ProcessGroup | None = None,
    ):
        """Where they meet and where tensors move; torch's default group where None."""
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.object_group, self.tensor_group = object_group, tensor_group
        self.device = torch.device("cpu")  # that of the sums, once there are any
        self.over = (
            False  # something went wrong somewhere, and all know: nobody comes to a further meeting
        )

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
                if sums is not None:
                    setattr(system, name, self.moved(dist.reduce, sums, owner))
        for name in sorted(systems.norms):
            systems.norms[name] = self.summed_norm(systems.norms[name])
        return systems

    def summed_norm(self, system: NormSystem) -> NormSystem:
        """The sum on every process, each of which solves it: a norm has a few numbers per
        feature.
        """
        parts = (system.zz, system.z, system.right_gain, system.right_shift)  # (d,) each
        sums = self.moved(
            dist.all_reduce, torch.cat([*parts, system.z.new_tensor([system.tasks])])
        )  # (4d + 1,)
        zz, z, gain, shift = sums[:-1].chunk(len(parts))
        return NormSystem(zz, z, gain, shift, float(sums[-1]))

    def shared(self, solutions: dict[Site, Solution]) -> dict[Site, Solution]:
        """Broadcast by who solved them."""
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
        """Drift, counts: no tensors."""
        everybodys = {
            task: record
            for theirs in self.all_gather_checked(dict(records))
            for task, record in theirs.items()
        }
        return super().gathered(everybodys)

    def together(self) -> None:
        """A meeting at which nothing is said."""
        self.all_gather_checked(None)

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """Raises: RemoteRankError where something went wrong in another process, RankLostError
        where one is gone.
        """
        try:
            yield
            self.together()
        except Exception as mistake:
            if not self.over:
                self.all_gather_checked(None, mistake)
            raise

    def all_gather_checked(self, said: T, mistake: Exception | None = None) -> list[T]:
        """What every process says, in the order of ranks.

        Raises: RemoteRankError where some say that something went wrong, in all but the first of
        these.
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
        """The tensor after a collective operation of torch, all ranks being here.

        Gloo copies raw memory: a column-major weight, as a Cholesky solve returns it, would arrive
        transposed without a word.
        """
        tensor = tensor.contiguous()
        with self.reaching_others():
            transfer(tensor, *root, group=self.tensor_group)
        return tensor

    @contextmanager
    def reaching_others(self) -> Iterator[None]:
        """Turns torch's error of a broken connection or a timeout into RankLostError."""
        try:
            yield
        except RuntimeError as error:
            self.over = True
            raise RankLostError(error) from error


def owners(widths: Mapping[Site, int], world: int) -> dict[Site, int]:
    """Who solves which site: the heaviest first, always to the least loaded rank, so that every
    rank finds the same table.

    A factorisation of d features costs d³.
    """
    load, owner = [0] * world, {}
    for site in sorted(widths, key=lambda site: (-widths[site], site)):
        owner[site] = load.index(min(load))
        load[owner[site]] += widths[site] ** 3
    return owner


started_ranks: ContextVar[Ranks | None] = ContextVar("started_ranks", default=None)


def current() -> Ranks:
    """This process among those of its run: what `torchrun.started` made, or the default group of a
    script that made its own.
    """
    ranks = started_ranks.get()
    if ranks is not None:
        return ranks
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return SeveralRanks() if several else Ranks()
