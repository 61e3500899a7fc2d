"""Measure how far the merged and the calibrated model are from every expert, on the same samples."""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from featcal.blocks.plan import BlockPlan
from featcal.calibration.drift import expert_drift
from featcal.calibration.models import Model
from featcal.calibration.record import DriftRecord, rounded
from featcal.calibration.run_folder import RunFolder, Solved, block_name
from featcal.calibration.stacks import Batches, Run
from featcal.models.mode import evaluation_mode
from featcal.models.residency import Held, Resident
from featcal.models.streamed import Streamed


def measured_drift(
    run: Run, merged: Model, batches: Mapping[str, Batches], held_out: Mapping[str, Batches]
) -> list[DriftRecord]:
    """Return a record for every expert and stack, sorted by name, once all blocks are solved.

    Tasks that are not in `held_out` are measured on their calibration samples, unless these are a
    consumed iterator.
    """
    models, found = two_models(run, merged), {}
    with evaluation_mode([held.module for held in models.values()]):
        for task, expert in run.models.experts.items():
            own = held_out.get(task, () if isinstance(batches[task], Iterator) else batches[task])
            drift, samples = expert_drift(
                task, models, expert, run.models.plan, own, run.models.device
            )
            found[task] = [
                DriftRecord(
                    task,
                    stack,
                    *(rounded(of[name].relative) for name in models),
                    *(rounded(of[name].cosine) for name in models),
                    samples,
                    task in held_out,
                )
                for stack, of in drift.items()
                if samples
            ]
    return [record for records in run.ranks.gathered(found).values() for record in records]


def two_models(run: Run, merged: Model) -> dict[str, Held]:
    """Return the merged model as given, and the calibrated model."""
    student, plan = run.models.student, run.models.plan
    if isinstance(merged, nn.Module):
        return {"merged": Resident(merged), "calibrated": student}
    given: dict[str, Any] = {
        "dtype": run.models.dtype,
        "device": run.models.device,
        "ledger": run.models.ledger,
    }
    given |= {"blocks": [stack.blocks for stack in plan.stacks]}
    if isinstance(student, Streamed):
        assert run.folder is not None
        return {
            "merged": student,
            "calibrated": Streamed(merged, **given, instead=solved_values(plan, run.folder)),
        }
    return {"merged": Streamed(merged, **given), "calibrated": student}


def solved_values(plan: BlockPlan, folder: RunFolder) -> Callable[[str], Tensor | None]:
    """Return a function from a parameter's name to its solved value, or None if it is not solved."""

    @lru_cache(maxsize=1)
    def block(name: str) -> Solved | None:
        return folder.solved(name)

    def value(name: str) -> Tensor | None:
        for stack in plan.stacks:
            if name.startswith(f"{stack.blocks}."):
                index, _, inner = name.removeprefix(f"{stack.blocks}.").partition(".")
                solved = block(block_name(stack, int(index)))
                return solved.parameters.get(inner) if solved else None
        return None

    return value
