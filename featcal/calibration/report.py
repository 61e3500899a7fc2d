"""Measure how far models are from their experts, for records and the model card of a run.

Relative drift is ‖H − H_exp‖_F / ‖H_exp‖_F of features H (Figures 1, 2, 6 and 7). Two equal runs
give equal records.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor, nn

from featcal import __version__
from featcal.calibration.features import on_device
from featcal.calibration.models import Models
from featcal.card import SENTENCE_CLASS, front_matter, name_of, render_card
from featcal.core.moments import Drift
from featcal.models.batch import Batch, TaskBatches, check_batch, naming, pad_token, padding_mask
from featcal.models.blocks import StopForward, model_call, output_hooks
from featcal.models.checkpoint import modules_of
from featcal.models.load import evaluation_mode
from featcal.models.plan import BlockPlan, blocks_of
from featcal.models.streamed import ModelHandle
from featcal.settings import Calibration

DIGITS = 6  # later digits differ between machines
SYMBOLS = {"ridge": "λ", "anchor_blend": "ρ", "interpolation": "α", "residual": "β"}
RECIPE = "mergekit_config.yml"
DRIFT_COLUMNS = ["expert", "merged", "calibrated", "cosine merged", "cosine calibrated", "samples"]


@dataclass(frozen=True)
class BlockRecord:
    """One calibrated block: its features against the teachers', means over tasks."""

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
    """Two models against one expert: features after a stack's last block, on the same samples."""

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
    """A choice by answers; `divergence` is by model and task, empty with too few samples."""

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
        means = {name: sum(own.values()) / len(own) for name, own in self.divergence.items()}
        return [[name, f"{mean:.4f}"] for name, mean in means.items()]


@dataclass(frozen=True)
class Result:
    """The calibrated model and what was measured of it; `calibrate` returns it.

    settings: what it was calibrated with; None if the merged model was kept.   choice: how the
    settings were chosen, if they were.
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
    """Return the record of one block from every task's drift, tokens and tokens of each expert."""
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
    """Capture the output (batch, tokens, d) of each stack's last block, then `stop` the forward."""
    outputs: dict[str, Tensor] = {}
    names = {f"{s.blocks}.{len(blocks_of(model, s)) - 1}": s.name for s in plan.stacks}

    def note(path: str, output: Any) -> None:
        outputs[names[path]] = output if isinstance(output, Tensor) else output[0]
        if stop and len(outputs) == len(names):
            raise StopForward

    with suppress(StopForward), output_hooks(model, names, note):
        yield outputs


def measure_drift(
    models: Models, calibrated: ModelHandle, batches: TaskBatches, held_out: TaskBatches
) -> dict[str, list[DriftRecord]]:
    """Measure how far the merged and the calibrated model are from every expert, by task.

    A task without held-out batches is measured on its calibration batches, unless these are a
    consumed iterator.
    """
    records: dict[str, list[DriftRecord]] = {}
    plan, pair = models.plan, (models.merged, calibrated)

    def features(handle: ModelHandle, batch: Batch) -> dict[str, Tensor]:
        with handle.running() as model, last_outputs(model, plan, stop=True) as outputs:
            model(**model_call(model, batch))
        return outputs

    with evaluation_mode([handle.module for handle in pair]):
        for task, expert in models.experts.items():
            own = held_out.get(task, () if isinstance(batches[task], Iterator) else batches[task])
            drift, samples = {stack.name: (Drift(), Drift()) for stack in plan.stacks}, 0
            for number, given in enumerate(own):
                check_batch(task, number, given, expert.module)
                batch = on_device(given, models.device)
                with naming(task, number):
                    theirs = features(expert, batch)
                    for which, handle in enumerate(pair):
                        ours, pad = features(handle, batch), pad_token(handle.module)
                        for stack in plan.stacks:
                            h, h_exp = ours[stack.name], theirs[stack.name]
                            mask = padding_mask(batch, h, stack.mask, pad)
                            drift[stack.name][which].add(h, h_exp, mask)
                samples += len(h_exp)
            records[task] = []
            for name, (before, after) in drift.items() if samples else ():
                values = before.relative, after.relative, before.cosine, after.cosine
                measured = map(round_digits, values)
                records[task].append(DriftRecord(task, name, *measured, samples, task in held_out))
    return records


def calibration_card(
    merged: object,
    base: object,
    experts: Mapping[str, Any],
    result: Result,
    samples: Mapping[str, object] | None = None,
    datasets: Sequence[str] = (),
) -> str:
    """Return the text of the model card; two equal runs give the same text.

    samples: rows of the section on samples.   datasets: names of data sets on the hub.
    """
    models = {"base": base, "merged model": merged}
    models |= {f"expert {task}": experts[task] for task in sorted(experts)}
    stated = result.settings.stated if result.settings else {}
    names = {key: f"{symbol}, {key}" for key, symbol in SYMBOLS.items()}
    measured = all(block.relative_drift is not None for block in result.blocks)
    return render_card(
        f"{name_of(base)}: {len(experts)} experts merged and calibrated",
        "",
        models,
        [[names.get(key, key), value] for key, value in stated.items()],
        {"datasets": sorted(set(datasets))} if datasets else {},
        calibration=result,
        experts=len(experts),
        merged_by=merge_method(merged),
        version=__version__,
        samples=list((samples or {}).items()),
        drift_columns=DRIFT_COLUMNS,
        drift=drift_rows(result.drift),
        warnings=worse(result.drift),
        blocks=block_rows(result.blocks) if measured else [],
        class_name=class_name(merged),
    )


def drift_rows(drift: Sequence[DriftRecord]) -> list[list[str]]:
    """Return the cells of `DRIFT_COLUMNS`, one row per expert and stack."""
    several = len({one.stack for one in drift}) > 1
    rows = []
    for one in drift:
        values = (one.merged, one.calibrated, one.cosine_merged, one.cosine_calibrated)
        name = f"{one.expert}, {one.stack}" if several else one.expert
        samples = f"{one.samples}{', held out' * one.held_out}"
        rows.append([name, *(f"{value:.3f}" for value in values), samples])
    return rows


def worse(drift: Sequence[DriftRecord]) -> list[str]:
    """Return a sentence naming the experts whose drift calibration increased, or []."""
    names = ", ".join(dict.fromkeys(one.expert for one in drift if one.worse))
    advice = "featcal compare shows whether their answers are worse too."
    return [f"Calibration increased the drift from these experts: {names}. {advice}"] * bool(names)


def block_rows(blocks: Sequence[BlockRecord]) -> list[list[str]]:
    """Return a row of drift, cosine and tokens for each block, and their means."""
    rows = [
        [block.name, f"{block.relative_drift:.3f}", f"{block.cosine:.3f}", f"{block.tokens:,}"]
        for block in blocks
    ]
    if len(blocks) > 1:
        pairs = [(block.relative_drift or 0.0, block.cosine or 0.0) for block in blocks]
        means = [f"{sum(values) / len(blocks):.3f}" for values in zip(*pairs, strict=True)]
        rows.append(["mean", *means, ""])
    return rows


def merge_method(merged: object) -> str | None:
    """Return the merge method that a folder's mergekit recipe or card states, or None."""
    if not isinstance(merged, str | Path):
        return None
    recipe = None
    with suppress(OSError, UnicodeDecodeError, yaml.YAMLError):  # the folder states no method
        recipe = yaml.safe_load((Path(merged) / RECIPE).read_text("utf-8"))
    if isinstance(recipe, dict) and isinstance(recipe.get("merge_method"), str):
        return f"mergekit's {recipe['merge_method']}"
    method = front_matter(Path(merged)).get("merge_method")
    return f"featcal's {method}" if isinstance(method, str) else None


def class_name(merged: object) -> str:
    """Return the class that loads the result."""
    if not isinstance(merged, str | Path):
        return type(merged).__name__
    if modules_of(Path(merged)):
        return SENTENCE_CLASS
    return str(json.loads((Path(merged) / "config.json").read_text("utf-8"))["architectures"][0])
