"""Measure how far models are from their experts, after every block or after the last one.

Relative drift is ‖H − H_exp‖_F / ‖H_exp‖_F of features H (Figures 1, 2, 6 and 7). Two equal runs
give equal records.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from featcal.calibration.features import on_device
from featcal.calibration.models import Models
from featcal.core.drift import Drift
from featcal.models.batch import (
    Batch,
    TaskBatches,
    check_batch,
    naming,
    pad_token,
    padding_mask,
)
from featcal.models.blocks import StopForward, hooked, model_call
from featcal.models.load import evaluation_mode
from featcal.models.plan import BlockPlan, blocks_of
from featcal.models.streamed import ModelHandle
from featcal.settings import Calibration

DIGITS = 6  # later digits differ between machines


@dataclass(frozen=True)
class BlockRecord:
    """One calibrated block: its features against the teachers', on the calibration samples.

    Drift and cosine are means over tasks of each task's value over its tokens.
    """

    name: str
    relative_drift: float | None  # None where it was not measured
    cosine: float | None
    tokens: int  # over all tasks, without padding
    conditioning: float  # largest lower bound of a condition number among the block's sites
    experts: dict[str, int] = field(default_factory=dict)  # of a mixture: tokens of each

    @property
    def stated(self) -> dict[str, Any]:
        """Return the record by name, without `experts` where the block has none."""
        return {name: value for name, value in asdict(self).items() if name != "experts" or value}


@dataclass(frozen=True)
class DriftRecord:
    """Two models against one expert: features after the last block of a stack, on the same
    samples.
    """

    expert: str
    stack: str
    merged: float  # relative drift of the merged model
    calibrated: float
    cosine_merged: float  # mean over tokens
    cosine_calibrated: float
    samples: int
    held_out: bool  # not the samples that the model was calibrated on

    @property
    def worse(self) -> bool:
        """Return whether the calibrated model is farther from this expert than the merged one."""
        return self.calibrated > self.merged


@dataclass(frozen=True)
class Choice:
    """The result of a choice by answers.

    divergence: by model and task, the mean over held-out samples; smaller is better. Empty where
        there were too few samples to choose.
    """

    chosen: str  # name of the candidate, or "merged"
    sentence: str  # the same in words
    settings: Calibration | None  # of the candidate; None for the merged model
    divergence: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def stated(self) -> dict[str, Any]:
        """Return the choice for a JSON file."""
        divergence = {name: dict(tasks) for name, tasks in self.divergence.items()}
        return {"chosen": self.chosen, "sentence": self.sentence, "divergence": divergence}

    @property
    def rows(self) -> list[list[str]]:
        """Return, for each model, its name and the mean over tasks of its divergence."""
        return [
            [name, f"{sum(tasks.values()) / len(tasks):.4f}"]
            for name, tasks in self.divergence.items()
        ]


@dataclass(frozen=True)
class Result:
    """The calibrated model and what was measured of it; `calibrate` returns it.

    settings: what it was calibrated with; None if the merged model was kept.
    choice: how the settings were chosen; None where they were given.
    """

    model: nn.Module | None  # the calibrated module; None when a folder was written
    folder: Path | None
    blocks: list[BlockRecord]  # in forward order
    drift: list[DriftRecord] = field(default_factory=list)  # by expert and stack, if measured
    settings: Calibration | None = None
    choice: Choice | None = None

    @property
    def stated(self) -> dict[str, Any]:
        """Return settings, blocks, drift and choice for a JSON file, without what there is not."""
        drift = [asdict(one) for one in self.drift]
        return {
            "settings": self.settings.stated if self.settings else None,
            "blocks": [block.stated for block in self.blocks],
            **({"drift": drift} if drift else {}),
            **({"choice": self.choice.stated} if self.choice else {}),
        }


def round_digits(value: float) -> float:
    """Return the value with the digits that are the same on every machine."""
    return float(f"{value:.{DIGITS}g}")


def block_record(
    name: str,
    tasks: Mapping[str, tuple[Drift | None, int, Mapping[str, int]]],
    conditioning: Sequence[float],
) -> BlockRecord:
    """Return the record of one block from every task's drift, tokens and tokens of each expert of a
    mixture; tasks are sorted by name.
    """
    drifts, tokens, counts = zip(*tasks.values(), strict=True)
    relative = cosine = None
    if None not in drifts:
        relative = round_digits(sum(drift.relative for drift in drifts) / len(drifts))
        cosine = round_digits(sum(drift.cosine for drift in drifts) / len(drifts))
    names = sorted(set().union(*counts))
    experts = {expert: sum(own.get(expert, 0) for own in counts) for expert in names}
    bound = round_digits(max(conditioning, default=1.0))
    return BlockRecord(name, relative, cosine, sum(tokens), bound, experts)


def progress_line(records: Sequence[BlockRecord], tasks: int, seconds: float, resumed: bool) -> str:
    """Return one line of progress for a block of one student, or of several candidates."""
    record = records[0]
    parts = [record.name, f"{tasks} tasks"]
    if len(records) > 1:
        parts.append(f"{len(records)} candidates")
    elif record.relative_drift is not None:
        parts.append(f"drift {record.relative_drift:.3f}")
    if record.experts:
        fewest = min(record.experts.values())
        parts.append(f"{len(record.experts)} experts, {fewest:,} tokens or more")
    parts.append(f"{seconds:.1f} s")
    return "  ".join(parts + ["(solved before)"] * resumed)


@contextmanager
def last_outputs(
    model: nn.Module, plan: BlockPlan, stop: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Capture the output (batch, tokens, d) of every stack's last block during the next forward.

    stop: end the forward after the last of them.
    """
    outputs: dict[str, Tensor] = {}

    def note(name: str, output: Any) -> None:
        outputs[name] = output if isinstance(output, Tensor) else output[0]
        if stop and len(outputs) == len(plan.stacks):
            raise StopForward

    lasts = {stack.name: blocks_of(model, stack)[-1] for stack in plan.stacks}
    handles = [
        block.register_forward_hook(lambda _, _args, output, name=name: note(name, output))
        for name, block in lasts.items()
    ]
    with suppress(StopForward), hooked(handles):
        yield outputs


def measure_drift(
    models: Models, calibrated: ModelHandle, batches: TaskBatches, held_out: TaskBatches
) -> dict[str, list[DriftRecord]]:
    """Measure how far the merged and the calibrated model are from every expert, by task.

    A task without held-out batches is measured on its calibration batches, unless these are a
    consumed iterator. One block of a streamed model is in memory at a time. Raises: BadBatches.
    """
    records: dict[str, list[DriftRecord]] = {}
    stacks, pair = models.plan.stacks, (models.merged, calibrated)
    with evaluation_mode([handle.module for handle in pair]):
        for task, expert in models.experts.items():
            own = held_out.get(task, () if isinstance(batches[task], Iterator) else batches[task])
            drift, samples = {stack.name: (Drift(), Drift()) for stack in stacks}, 0
            for number, given in enumerate(own):
                check_batch(task, number, given, expert.module)
                batch = on_device(given, models.device)
                with naming(task, number):
                    theirs = last_features(expert, batch, models.plan)
                    for which, handle in enumerate(pair):
                        ours, pad = (
                            last_features(handle, batch, models.plan),
                            pad_token(handle.module),
                        )
                        for stack in stacks:
                            h, h_exp = ours[stack.name], theirs[stack.name]
                            mask = padding_mask(batch, h, stack.mask, pad)
                            drift[stack.name][which].add(h, h_exp, mask)
                samples += len(theirs[stacks[0].name])
            records[task] = []
            for stack_name, (before, after) in drift.items() if samples else ():
                values = (before.relative, after.relative, before.cosine, after.cosine)
                measured = map(round_digits, values)
                records[task].append(
                    DriftRecord(task, stack_name, *measured, samples, task in held_out)
                )
    return records


def last_features(handle: ModelHandle, batch: Batch, plan: BlockPlan) -> dict[str, Tensor]:
    """Return the output of every stack's last block on one batch."""
    with handle.running() as model, last_outputs(model, plan, stop=True) as outputs:
        model(**model_call(model, batch))
    return outputs
