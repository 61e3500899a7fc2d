"""FeatCal, Surgery and ProbSurgery at one number of images and one seed, made and measured in a
process of their own.

They see what `calibrate` and `adapt` see and run the same code, so the same number and seed give
the same bytes.
"""

import ctypes
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from featcal.baselines.training import Training
from reproduction.experiments.comparisons import CostStudy, SamplesStudy
from reproduction.experiments.rivals import Rivals
from reproduction.stages.context import Context
from reproduction.stages.layout import Layout
from reproduction.stages.scored import Scored

METHODS = ("featcal", "surgery", "prob_surgery")
Study = SamplesStudy | CostStudy
Batch = Mapping[str, Any]
Batches = Mapping[str, Sequence[Batch]]  # by task


@dataclass(frozen=True)
class Method:
    """One way to calibrate, at one number of images per task and one seed.

    encode: of adapters, how often the frozen models see an image ("each_step" as published);
    FeatCal sees every one once.
    """

    method: str
    samples: int
    seed: int
    encode: Literal["once", "each_step"] = "once"

    @property
    def name(self) -> str:
        return f"{self.method} {self.encode} n={self.samples} seed={self.seed}"

    def row_keys(self, study: Study) -> dict[str, Any]:
        """How the rows of a study call it."""
        return {
            "upstream": study.upstream, "method": self.method, "setting": study.rivals.setting, "encode": self.encode,
            "seed": self.seed, "samples": self.samples,
        }  # fmt: skip

    def training(self, rivals: Rivals) -> Training:
        """The settings of an adapter."""
        chosen: Training = getattr(rivals, self.method)
        return chosen.but(encode=self.encode)

    def scored(self, study: Study, folder: Path, name: str = "") -> Scored:
        """What `make` left in a folder, as something to evaluate."""
        adapted_model = "" if self.method == "featcal" else "merged"
        return Scored(
            name or self.name,
            folder,
            self.method,
            study.upstream,
            study.rivals.setting,
            self.seed,
            adapted_model,
        )


def merged_model(layout: Layout, study: Study) -> Path:
    """Where all of them start."""
    return layout.merged(f"{study.role}-{study.pool}-{study.upstream}")


def step_folder(out: Path, step: int) -> Path:
    """Where `make` puts adapters after so many steps."""
    return out.with_name(f"{out.name}-step{step}")


def drawn(context: Context, study: Study, rival: Method) -> Batches:
    """The images it sees, ready for a model: those of `calibrate` and `adapt`; all that a task has
    where there are fewer.
    """
    from featcal.data.batches import draw_indices
    from reproduction.prepare.sources import load_task

    draw = study.rivals.draw(rival.method, rival.samples, rival.seed)
    found: dict[str, Sequence[Batch]] = {}
    for task in context.suite.tasks_of(study.role, study.pool):
        images = load_task(
            context.layout.data_of(study.role),
            task,
            draw.split,
            context.layout.base(study.role, study.pool),
        )
        count = len(images.labels)
        found[task] = list(
            images.batches(
                draw_indices(task, count, min(rival.samples, count), rival.seed), draw.batch
            )
        )
    return found


def make(
    context: Context,
    study: Study,
    rival: Method,
    batches: Batches,
    out: Path,
    audit: Sequence[int] = (),
) -> None:
    """From folders of models and images in memory to a folder: a calibrated model, or adapters.

    audit: adapters after so many steps are written too, beside `out`, while they are trained: a few
    small matrices.
    """
    from safetensors.torch import load_file

    import featcal
    from featcal.baselines.training import adapters_for
    from featcal.models.load import torch_device

    layout, device = context.layout, torch_device(context.suite.device)
    base, merged = layout.base(study.role, study.pool), merged_model(layout, study)
    experts = {task: layout.expert(study.role, study.pool, task) for task in batches}
    if rival.method == "featcal":
        models: dict[str, Any] = {
            "base": base,
            "experts": experts,
            "batches": batches,
            "settings": study.rivals.featcal,
        }
        featcal.calibrate(merged, **models, device=device, out=out, resume=False)
        return
    head = load_file(layout.heads(study.role, study.pool)).get("visual_projection")
    kept = {step: partial(_save, step_folder(out, step)) for step in audit}
    _save(
        out,
        adapters_for(
            rival.training(study.rivals),
            merged,
            experts,
            batches,
            head,
            rival.seed,
            device,
            None,
            kept,
        ),
    )


def measure(
    context: Context, study: Study, rival: Method, out: Path, audit: Sequence[int] = ()
) -> dict[str, Any]:
    """`make`, under watch: its seconds, megabytes and watt-hours. The images lie decoded in memory
    before the clock starts.

    Before that, the same is done with one image of each task and one step, so that what a process
    pays once and the method does not (late imports, the first call of every kernel, code read into
    memory) is in neither clock nor memory.
    """
    from featcal.models.load import torch_device
    from reproduction.profiling import profiled

    batches = drawn(context, study, rival)
    first = {
        task: [{name: value[:1] for name, value in those[0].items()}]
        for task, those in batches.items()
    }
    with TemporaryDirectory(dir=out.parent) as folder:
        make(context, _least(study, rival), rival, first, Path(folder) / "warm_up")
    give_back_freed_memory()
    on_gpu = torch_device(context.suite.device).type == "cuda"
    _, profile = profiled(partial(make, context, study, rival, batches, out, audit), on_gpu)
    seen = min(
        sum(len(next(iter(batch.values()))) for batch in those) for those in batches.values()
    )
    return {**rival.row_keys(study), "images": seen, **asdict(profile)}


def give_back_freed_memory() -> None:
    """Hand what glibc keeps for later back to the system; a run that is served from it would seem
    to need no memory.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _least(study: Study, rival: Method) -> Study:
    """The same models with adapters of one step."""
    shortest = {
        name: getattr(study.rivals, name).but(steps=1) for name in ("surgery", "prob_surgery")
    }
    return SamplesStudy(
        role=study.role,
        pool=study.pool,
        upstream=study.upstream,
        rivals=study.rivals.but(**shortest),
        samples=(1,),
        seeds=(rival.seed,),
    )


def _save(folder: Path, adapters: Any) -> None:
    adapters.save(folder)
