"""What is told about a calibration: how far each block is from the teachers', and the whole model
from every expert.

Nothing of that varies between two runs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from featcal.core.drift import Drift

DIGITS = 6  # beyond them the rounding of the machine shows


@dataclass(frozen=True)
class BlockRecord:
    """Features that leave one calibrated block, against the teachers' (means over tasks of each
    task's value over its tokens).
    """

    name: str
    relative_drift: (
        float | None
        # ‖H − H_exp‖_F / ‖H_exp‖_F on the samples that it was calibrated on; None where not asked for
    )
    cosine: float | None
    tokens: int  # over all tasks, without padding
    conditioning: float  # largest lower bound of a condition number among the block's sites
    experts: dict[str, int] = field(
        default_factory=dict
    )  # of a mixture: tokens that each expert is given, over all tasks

    @property
    def told(self) -> dict[str, Any]:
        """What is written of it; of a block without experts nothing about them."""
        return {name: value for name, value in asdict(self).items() if name != "experts" or value}


@dataclass(frozen=True)
class DriftRecord:
    """Features that leave the last block of a stack, of two models against one expert's, on the
    same samples.

    merged: of the model as it was merged, untouched.   calibrated: of the result.   samples: how
    many.
    held_out: whether they are others than those that the model was calibrated on.
    """

    expert: str
    stack: str
    merged: float  # ‖H − H_exp‖_F / ‖H_exp‖_F
    calibrated: float
    cosine_merged: float  # mean over tokens
    cosine_calibrated: float
    samples: int
    held_out: bool

    @property
    def worse(self) -> bool:
        """Whether calibration has led away from this expert."""
        return self.calibrated > self.merged


@dataclass(frozen=True)
class Result:
    """What `calibrate` returns."""

    model: nn.Module | None  # the calibrated module; None when a folder was written
    folder: Path | None
    blocks: list[BlockRecord]  # in forward order
    drift: list[DriftRecord] = field(
        default_factory=list
    )  # by expert and stack; empty unless it was asked for


def rounded(value: float) -> float:
    """The value with the digits that are the same on every machine."""
    return float(f"{value:.{DIGITS}g}")


def mean(values: Sequence[float]) -> float:
    """Mean over tasks."""
    return rounded(sum(values) / len(values))


Told = tuple[
    Drift | None, int, Mapping[str, int]
]  # of one task: drift where it was asked for, tokens, those of each expert


def block_record(name: str, told: Mapping[str, Told], conditioning: Sequence[float]) -> BlockRecord:
    """The record of one block from what every task, in the order of names, tells of it."""
    drift, tokens, experts = zip(*told.values(), strict=True)
    asked = None not in drift
    return BlockRecord(
        name=name,
        relative_drift=mean([d.relative for d in drift]) if asked else None,
        cosine=mean([d.cosine for d in drift]) if asked else None,
        tokens=sum(tokens),
        conditioning=rounded(max(conditioning, default=1.0)),
        experts={
            name: sum(counts.get(name, 0) for counts in experts)
            for name in sorted({n for c in experts for n in c})
        },
    )


def line(record: BlockRecord, tasks: int, seconds: float) -> str:
    """One line of progress."""
    mixture = (
        f"  {len(record.experts)} experts, {min(record.experts.values()):,} tokens or more"
        if record.experts
        else ""
    )
    drift = "" if record.relative_drift is None else f"  drift {record.relative_drift:.3f}"
    return f"{record.name}  {tasks} tasks{drift}{mixture}  {seconds:.1f} s"
