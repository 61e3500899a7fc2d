"""How much a run computes, in floating point operations (2 for one multiplication and addition), from shapes alone.

Matrix products, attention, convolutions and factorisations count; what is linear in the features (norms, weights) does not.
Legend: d inputs · o outputs · n rows of one site.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from featcal.calibration.observe import FOLDED_SHARE
from featcal.calibration.shapes import BlockShape, ModelShape, SiteShape
from featcal.core.moments import STRIPES


@dataclass(frozen=True)
class Work:
    """Floating point operations of a run, by what they are for."""

    check: int = 0  # the first batch through the model, and once more block by block
    forwards: int = 0  # the student's two passes and the teacher's one
    moments: int = 0  # sums over tokens
    systems: int = 0  # each task's normal equations and their solutions

    @property
    def total(self) -> int:
        """All of them."""
        return self.check + self.forwards + self.moments + self.systems


def folded(site: SiteShape) -> bool:
    """Whether the cross moment is kept with the expert's weight multiplied in."""
    return site.o < FOLDED_SHARE * site.d


def gram_work(n: int, d: int) -> int:
    """A Gram matrix of n rows, computed in stripes above the diagonal."""
    edges = [d * i // STRIPES for i in range(STRIPES + 1)]
    return sum(2 * n * end * (end - start) for start, end in zip(edges, edges[1:], strict=False))


def moments_work(site: SiteShape) -> int:
    """One batch: the Gram matrix and the cross moment."""
    n, d, o = site.n, site.d, site.o
    return gram_work(n, d) + (4 * n * d * o if folded(site) else 2 * n * d * d)


def system_work(site: SiteShape) -> int:
    """One task: its moments times its expert's weight."""
    return 2 * site.d * site.d * site.o


def solve_work(site: SiteShape) -> int:
    """All tasks: the right side without the anchor's part, one Cholesky factor, two triangular solutions."""
    d, o = site.d, site.o
    return products_of_solve(site) + d**3 // 3 + 2 * d * d * o


def products_of_solve(site: SiteShape) -> int:
    """What of a solution is a matrix product."""
    return 2 * site.d * site.d * site.o


def forwards_work(shape: ModelShape) -> int:
    """One batch: both models up to the first block, then the student twice and the teacher once through every block."""
    return sum(2 * stack.entry for stack in shape.stacks) + sum(block_passes(block) for block in shape.blocks)


def block_passes(block: BlockShape) -> int:
    """One batch through one block: the student observed and moved on, the teacher both at once."""
    return 3 * block.forward


def check_work(shape: ModelShape) -> int:
    """The model's own forward and the replay of its blocks."""
    return shape.forward + sum(stack.entry for stack in shape.stacks) + sum(block.forward for block in shape.blocks)


def run_work(batches: Mapping[ModelShape, int], first: ModelShape, tasks: int) -> Work:
    """A whole run.

    Args: batches: how many there are of each shape, over all tasks; first: the batch that the plan is checked on.
    """
    sites = [site for block in first.blocks for site in block.sites]
    return Work(
        check=check_work(first),
        forwards=sum(count * forwards_work(shape) for shape, count in batches.items()),
        moments=sum(count * moments_work(s) for shape, count in batches.items() for b in shape.blocks for s in b.sites),
        systems=sum(tasks * system_work(site) + solve_work(site) for site in sites),
    )
