"""Open the models of a calibration, and carry every task's features from block to block."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
import transformers
from torch import Tensor, nn

from featcal.calibration.scratch import Digest, RunFolder, Spool, SpooledList
from featcal.core.moments import Drift
from featcal.core.precision import FLOATS
from featcal.errors import LOG, BadBatches, list_of
from featcal.models import batch as of_batches
from featcal.models import load
from featcal.models.batch import Batch, Batches, Model, TaskBatches, check_batch, naming
from featcal.models.blocks import check_replay, first_inputs, stack_output, step
from featcal.models.checkpoint import is_adapter
from featcal.models.lora import copied, dense_model, without_adapters
from featcal.models.modules import check_blocks, is_solvable_norm, solved_modules
from featcal.models.plan import BlockPlan, Stack, plan_for
from featcal.models.streamed import InMemoryModel, ModelHandle, StreamedModel, require_same_tensors
from featcal.settings import Calibration, require

NO_SAMPLES = "is empty; calibration needs at least one batch with at least one sample"
CODE = ("core", "models", "calibration")  # subpackages that weights depend on
SAMPLES, SAMPLE = 64, 4096  # pieces of a weight file that are read, bytes of each


@dataclass(frozen=True)
class Models:
    """The student (first the merged model, in the end the calibrated one), base and experts."""

    student: ModelHandle
    merged: ModelHandle  # as it was given; the student itself where both are streamed
    base: ModelHandle
    experts: Mapping[str, ModelHandle]  # by task, sorted; those of this process
    plan: BlockPlan
    device: torch.device
    dtype: torch.dtype
    settings: Calibration  # as given; for "auto" the paper's, without norms that cannot be solved

    def student_copy(self, solved: RunFolder | None = None) -> ModelHandle:
        """Return another student that starts from the merged model, or from `solved` blocks."""
        if isinstance(self.student, InMemoryModel):
            return InMemoryModel(copy.deepcopy(self.student.module))
        paths = [stack.blocks for stack in self.plan.stacks]
        override = {"override": solved.solved_values(self.plan)} if solved else {}
        return StreamedModel(self.student.folder, paths, self.dtype, self.device, **override)

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Put all models into evaluation mode without gradients; the student stays in it."""
        self.student.module.eval()
        with load.evaluation_mode([model.module for model in (self.base, *self.experts.values())]):
            yield


def opened(
    model: Model, dtype: torch.dtype, device: torch.device, like: type | None, paths: Sequence[str]
) -> ModelHandle:
    """Open a module or a folder, to be streamed; with `like` only its tower if its head differs."""
    if not isinstance(model, nn.Module):
        return StreamedModel(model, paths, dtype, device, like=like)
    plain = without_adapters(model)
    return InMemoryModel(next((m for m in plain.children() if type(m) is like), plain))


def open_models(
    merged: Model,
    base: Model,
    experts: Mapping[str, Model],
    plan: BlockPlan | None,
    settings: Calibration | Literal["auto"],
    *,
    whole: bool = False,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Models:
    """Open models and check that they match; folders are streamed, or the merged one `whole`."""
    parameters = merged.parameters() if isinstance(merged, nn.Module) else iter(())
    first = next(parameters, torch.empty(0, dtype=torch.float32))
    target, dtype = load.torch_device(device or first.device), dtype or first.dtype
    expected = "must be a floating-point type, such as torch.float32"
    require(dtype in FLOATS, "calibrate.dtype", str(dtype), expected)
    require(isinstance(plan, BlockPlan | None), "plan", plan, "must be a featcal.BlockPlan")
    experts = {
        task: dense_model(base, expert).to(target, dtype) if is_adapter(expert) else expert
        for task, expert in sorted(experts.items())
    }
    paths = [stack.blocks for stack in plan.stacks] if plan else []
    original = student = opened(merged, dtype, target, None, paths)
    if isinstance(merged, nn.Module):
        student = InMemoryModel(copied(original.module))
    elif whole:
        student = InMemoryModel(load.load_as_calibrated(merged, dtype).to(target))
    plan, kind = plan_for(student.module, plan), type(student.module)
    paths = [stack.blocks for stack in plan.stacks]
    others = [opened(model, dtype, target, kind, paths) for model in (base, *experts.values())]
    roles = {"merged": merged, "base": base} | {f"expert {t!r}": e for t, e in experts.items()}
    names = [n if isinstance(m, nn.Module) else f"{n} ({m})" for n, m in roles.items()]
    handles = dict(zip(names, (student, *others), strict=True))
    # outside of blocks the number of rows (of a vocabulary, of a head's classes) may differ
    require_same_tensors(handles, paths)
    run = {n: next(h.module.parameters()).dtype for n, h in handles.items() if h is not others[0]}
    float64 = [name for name, dtype in run.items() if dtype == torch.float64]
    expected = "must be the merged model and all experts, or none of them"
    require(len(float64) in (0, len(run)), "models in float64", float64, expected)
    for name, handle in handles.items():
        handle.check_finite(name)
        if isinstance(handle, StreamedModel) and handle.own_class and handle.ignored:
            kind_name = type(handle.module).__name__
            LOG.warning(f"{name}: {kind_name} has no {list_of(handle.ignored)}: not used")
    used = Calibration() if settings == "auto" else settings
    for stack in plan.stacks if used.norm else ():
        with student.block(f"{stack.blocks}.0") as block:  # blocks of one stack are of one class
            norms = map(block.get_submodule, solved_modules(block)[1])
            if other := next((norm for norm in norms if not is_solvable_norm(norm)), None):
                name = type(other).__name__
                expected = f"must be off for models with {name}, neither LayerNorm nor RMSNorm"
                require(settings == "auto", "calibrate.norm", True, expected)
                used = used.but(norm=False)
    check_blocks(student.module, plan, used.norm, used.modules)
    expert_handles = dict(zip(experts, others[1:], strict=True))
    return Models(student, original, others[0], expert_handles, plan, target, dtype, used)


def check_plan(plan: BlockPlan, task: str, batch: Batch, handles: Sequence[ModelHandle]) -> Batch:
    """Check that all models replay on two samples; return these. Raises: BadBatches, BadPlan."""
    check_batch(task, 0, batch, handles[0].module)
    samples = of_batches.some_samples(batch, slice(of_batches.PROVING))
    for handle in handles:
        with naming(task, 0), handle.running() as model:
            check_replay(model, plan, samples)
    return samples


def fingerprint(
    models: Models, batches: Mapping[str, str], settings: Calibration, block_drift: bool
) -> str:
    """Return a digest of models, batches, settings, plan, this code and its libraries."""
    digest = Digest(settings.model_dump(), sorted(batches.items()), models.device.type)
    digest.add(models.dtype, block_drift, torch.__version__, transformers.__version__)
    for stack in models.plan.stacks:
        rule = models.plan.rule(stack)
        code = getattr(rule, "__code__", None)
        cells = [cell.cell_contents for cell in getattr(rule, "__closure__", None) or ()]
        named = getattr(rule, "__qualname__", rule), getattr(rule, "__defaults__", None)
        digest.add(replace(stack, token_rule=None), *named, *cells)
        digest.add(*(code.co_code, code.co_consts, code.co_names) if code else ())
    roles = {"merged": models.merged, "base": models.base}
    roles |= {f"expert {task}": expert for task, expert in models.experts.items()}
    for role, handle in roles.items():
        digest.add(role)
        if isinstance(handle, InMemoryModel):
            values = chain(handle.module.named_parameters(), handle.module.named_buffers())
            digest.add(getattr(handle.module, "config", ""), *chain.from_iterable(values))
            continue
        for file in sorted([handle.folder / "config.json", *handle.folder.glob("*.safetensors")]):
            state = file.stat()  # the weights may be too large to read whole
            digest.add(file.name, state.st_size, state.st_mtime_ns)
            with file.open("rb") as stream:
                for start in range(0, state.st_size, max(SAMPLE, state.st_size // SAMPLES)):
                    stream.seek(start)
                    digest.add(stream.read(SAMPLE))
    root = Path(__file__).parents[1]
    for file in sorted(file for part in CODE for file in (root / part).glob("*.py")):
        digest.add(file.name, file.read_bytes())
    return str(digest)


@dataclass
class StudentTeacherFeatures:
    """Features of one task before the current block; after a stack, what it feeds to the next."""

    students: list[SpooledList]  # in each model that is being calibrated
    teacher: SpooledList  # in the task's expert
    masks: list[Tensor | None] = field(default_factory=list)  # (batch, tokens), 0 at padding
    encoder_masks: list[Tensor | None] = field(default_factory=list)  # of the stack that feeds it
    tokens: int = 0  # without padding
    samples: int = 0

    @property
    def tracks(self) -> list[SpooledList]:
        """Return the features of every model, the teacher's last."""
        return [*self.students, self.teacher]


TaskFeatures = Mapping[str, StudentTeacherFeatures]  # by task


def first_features(
    task: str,
    students: Sequence[nn.Module],
    teacher: nn.Module,
    stack: Stack,
    batches: Batches,
    spool: Spool,
    source: Stack | None,
    encoder: StudentTeacherFeatures | None,  # of `source`, which feeds this stack; consumed
) -> StudentTeacherFeatures:
    """Return the inputs of a stack's first block in every student and in the teacher."""
    features = StudentTeacherFeatures([SpooledList(spool) for _ in students], SpooledList(spool))
    models = [*students, teacher]
    for number, batch in enumerate(batches):
        check_batch(task, number, batch, models[0])
        with naming(task, number):
            for index, model in enumerate(models):
                fed = encoder.tracks[index][number] if encoder else None
                inputs = first_inputs(model, stack, batch, source, fed)
                features.tracks[index].append(inputs)
        hidden = inputs[0]
        mask = of_batches.padding_mask(batch, hidden, stack.mask, models[0])
        features.masks.append(mask)
        features.encoder_masks.append(encoder.masks[number] if encoder else None)
        features.tokens += hidden.shape[:-1].numel() if mask is None else int(mask.sum())
        features.samples += len(hidden)
    if encoder:
        for track in encoder.tracks:
            track.clear()
    if features.tokens == 0:
        raise BadBatches(task, NO_SAMPLES)
    return features


def running(
    models: Models, students: Sequence[ModelHandle]
) -> Iterator[tuple[str, list[nn.Module]]]:
    """Yield every task with its students and expert, which can run until the next task."""
    with ExitStack() as opened:
        modules = [opened.enter_context(student.running()) for student in students]
        for task, expert in models.experts.items():
            with expert.running() as teacher:
                yield task, [*modules, teacher]


def features_by_task(
    models: Models,
    students: Sequence[ModelHandle],
    stack: Stack,
    batches: TaskBatches,
    spool: Spool,
    source: Stack | None,
    encoder: TaskFeatures,
) -> dict[str, StudentTeacherFeatures]:
    """Return the features of every task before the first block of a stack, which `source` feeds."""
    features = {}
    for task, (*modules, teacher) in running(models, students):
        inputs = batches[task], spool, source, encoder.get(task)
        features[task] = first_features(task, modules, teacher, stack, *inputs)
    return features


def advance(block: nn.Module, stack: Stack, track: SpooledList) -> None:
    """Move the features of one model past a block."""
    for number in range(len(track)):
        track[number] = step(block, stack, *track[number])


def advance_student(
    block: nn.Module, stack: Stack, features: StudentTeacherFeatures, student: int
) -> Drift:
    """Move one student's features past a solved block and return their drift from the teacher's."""
    drift, track = Drift(), features.students[student]
    for number, mask in enumerate(features.masks):
        output = step(block, stack, *track[number])
        drift.add(output[0], features.teacher[number][0], mask)
        track[number] = output
    return drift


def leave_stack(model: nn.Module, stack: Stack, track: SpooledList) -> None:
    """Replace the features of one model after a stack's last block by what it feeds to the next."""
    for number in range(len(track)):
        track[number] = stack_output(model, stack, track[number][0])


def encoder_outputs(
    models: Models, students: Sequence[ModelHandle], stack: Stack, features: TaskFeatures
) -> TaskFeatures:
    """Return what calibrated stacks and the experts' stacks feed to the next stack, by task."""
    if not stack.feeds:
        return {}
    for task, modules in running(models, students):
        for model, track in zip(modules, features[task].tracks, strict=True):
            leave_stack(model, stack, track)
    return features
