"""Open the models of a calibration, whole or one block at a time, and check them against each
other.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from featcal.errors import BadPlan
from featcal.files import Ledger
from featcal.models.batch import Model
from featcal.models.families import plan_for
from featcal.models.load import (
    evaluation_mode,
    is_adapter,
    load_as_calibrated,
    model_class,
    same_tower,
    torch_device,
)
from featcal.models.lora import dense_model, without_adapters
from featcal.models.modules import check_blocks, check_norm, solved_modules
from featcal.models.plan import BlockPlan
from featcal.models.streamed import InMemoryModel, ModelHandle, StreamedModel, require_same_tensors
from featcal.settings import Calibration, require


@dataclass(frozen=True)
class Models:
    """The student, the base and the experts of one calibration."""

    student: ModelHandle
    base: ModelHandle
    experts: Mapping[str, ModelHandle]  # by task, in the order of names
    plan: BlockPlan
    device: torch.device
    dtype: torch.dtype
    ledger: Ledger  # bytes of the parameters of folders that are in memory
    given: Mapping[str, nn.Module | Path]  # by the name errors use, as they came

    def round_to_stored_dtype(self, path: str, block: nn.Module) -> None:
        """Round a streamed student's block to the precision it is written in, so that later blocks
        see the written weights.
        """
        if isinstance(self.student, StreamedModel):
            for name, p in block.named_parameters():
                p.copy_(p.to(self.student.parameters.stored_dtype(f"{path}.{name}")))

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Put all models into evaluation mode without gradients; the student, a copy, stays in
        it.
        """
        self.student.module.eval()
        with evaluation_mode([held.module for held in (self.base, *self.experts.values())]):
            yield


def open_models(
    merged: Model,
    base: Model,
    experts: Mapping[str, Model],
    plan: BlockPlan | None,
    settings: Calibration,
    *,
    whole: bool,
    device: str | torch.device | None,
    dtype: torch.dtype | None,
) -> Models:
    """Open and check the models; `whole` loads a merged folder into memory, to be returned.

    Raises: FeatCalError for models that differ in their tensors or hold NaN, or that no plan fits.
    """
    first = next(merged.parameters(), None) if isinstance(merged, nn.Module) else torch.empty(0)
    if first is None:
        raise BadPlan(
            type(merged).__name__, "has no parameters", "give a model with blocks of linears"
        )
    place, dtype = torch_device(device or first.device), dtype or first.dtype
    require(
        dtype.is_floating_point,
        "calibrate.dtype",
        str(dtype),
        "must be a floating-point type, such as torch.float32",
    )
    # of an adapter, whose tensors are none of the base's, the whole model is in memory
    experts = {
        task: dense_model(base, e).to(place, dtype) if is_adapter(e) else e
        for task, e in experts.items()
    }
    given = {label("merged", merged): merged, label("base", base): base}
    given |= {label(f"expert {task!r}", experts[task]): experts[task] for task in sorted(experts)}

    ledger = Ledger()

    def streamed(folder: str | Path, like: type[PreTrainedModel] | None = None) -> ModelHandle:
        paths = [stack.blocks for stack in plan.stacks] if plan else ()
        return StreamedModel(folder, paths, dtype=dtype, device=place, ledger=ledger, like=like)

    if isinstance(merged, nn.Module):
        student: ModelHandle = InMemoryModel(copy.deepcopy(without_adapters(merged)))
    else:
        student = (
            InMemoryModel(load_as_calibrated(merged, dtype).to(place))
            if whole
            else streamed(merged)
        )
    plan = plan_for(student.module, plan)

    def beside(model: Model) -> ModelHandle:
        """Return the base or an expert; only its tower if its head differs from the student's."""
        kind = type(student.module)
        if isinstance(model, nn.Module):
            plain = without_adapters(model)
            tower = getattr(plain, "base_model", plain)
            return InMemoryModel(
                tower if type(plain) is not kind and type(tower) is kind else plain
            )
        own = model_class(model)
        return streamed(model, kind if own is not kind and same_tower(own, kind) else None)

    others = [beside(m) for m in (base, *(experts[task] for task in sorted(experts)))]
    held = dict(zip(given, (student, *others), strict=True))
    # outside of blocks rows may differ, of words or of a head's classes: each model reads and puts
    # out its own
    require_same_tensors(held, [stack.blocks for stack in plan.stacks])
    for name, one in held.items():
        one.check_finite(name)
    check_blocks(student.module, plan, settings.norm, settings.modules)
    for stack in plan.stacks if settings.norm else ():
        with student.block(f"{stack.blocks}.0") as block:  # blocks of one stack are of one class
            for name in solved_modules(block)[1]:
                check_norm(block.get_submodule(name))
    where = {
        name: model if isinstance(model, nn.Module) else Path(model)
        for name, model in given.items()
    }
    return Models(
        student,
        others[0],
        dict(zip(sorted(experts), others[1:], strict=True)),
        plan,
        place,
        dtype,
        ledger,
        where,
    )


def label(role: str, model: Model) -> str:
    """Return the name of a model in errors: its role and its folder if it has one."""
    return role if isinstance(model, nn.Module) else f"{role} ({model})"
