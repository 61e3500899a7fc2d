"""What is told about a calibrated block: how far the student was from the teachers, before and after it was solved.

Nothing of that varies between two runs; what a run cost does, and is a record of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from featcal.core.drift import Drift

DIGITS = 6  # beyond them the rounding of the machine shows


@dataclass(frozen=True)
class BlockRecord:
    """Features that leave one block, against the teachers' (means over tasks of each task's value over its tokens).

    "Before" is the block with the merged weights, "after" with the calibrated ones, both on the same student features; before,
    it is the tokens of every task's first batch alone, the only ones that run through the whole block with those weights.
    """

    name: str
    relative_drift_before: float  # ‖H − H_exp‖_F / ‖H_exp‖_F, first batch of every task
    relative_drift_after: float
    cosine_before: float  # first batch of every task
    cosine_after: float
    tokens: int  # over all tasks, without padding
    conditioning: float  # largest lower bound of a condition number among the block's sites


@dataclass(frozen=True)
class Cost:
    """What one run took; it varies from run to run, so it lies beside results and never among them."""

    seconds: float
    peak_host_bytes: int | None  # of this process, above what it held before; None where the system does not tell
    peak_device_bytes: int  # of torch's own memory on the GPU, of this process; 0 without one
    flops: int | None  # of all processes, without what an interrupted run did before; None where it is not known from shapes


@dataclass(frozen=True)
class Result:
    """What `calibrate` returns."""

    model: nn.Module | None  # the calibrated module; None when a folder was written
    folder: Path | None
    blocks: list[BlockRecord]  # in forward order
    cost: Cost


def rounded(value: float) -> float:
    """The value with the digits that are the same on every machine."""
    return float(f"{value:.{DIGITS}g}")


def mean(values: Sequence[float]) -> float:
    """Mean over tasks."""
    return rounded(sum(values) / len(values))


def block_record(name: str, told: Mapping[str, tuple[Drift, Drift, int]], conditioning: Sequence[float]) -> BlockRecord:
    """The record of one block from the drift before and after, and the tokens, of every task in the order of names."""
    first, second, tokens = zip(*told.values(), strict=True)
    return BlockRecord(
        name=name,
        relative_drift_before=mean([d.relative for d in first]),
        relative_drift_after=mean([d.relative for d in second]),
        cosine_before=mean([d.cosine for d in first]),
        cosine_after=mean([d.cosine for d in second]),
        tokens=sum(tokens),
        conditioning=rounded(max(conditioning, default=1.0)),
    )


def line(record: BlockRecord, tasks: int, seconds: float) -> str:
    """One line of progress."""
    drift = f"drift {record.relative_drift_before:.3f} → {record.relative_drift_after:.3f}"
    return f"{record.name}  {tasks} tasks  {drift}  {seconds:.1f} s"
