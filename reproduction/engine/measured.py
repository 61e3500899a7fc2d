"""FeatCal, Surgery and ProbSurgery made and measured, each in a process of its own.

They see the samples of the stages `calibrate` and `adapt` and run the same code, so that the same
number of samples and seed give the same bytes.
"""

import ctypes
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from reproduction.engine.context import Setup
from reproduction.engine.samples import load_split
from reproduction.engine.spec import ModelSpec
from reproduction.experiments import Rivals

METHODS = ("featcal", "surgery", "prob_surgery")
Batches = Mapping[str, Sequence[Mapping[str, Any]]]  # by task


@dataclass(frozen=True)
class Method:
    """One way to calibrate after a merger, at one number of samples per task and one seed.

    encode: how often the frozen models of an adapter see a sample; "each_step" as published.
    """

    method: str
    upstream: str
    samples: int
    seed: int
    rivals: Rivals
    encode: Literal["once", "each_step"] = "once"

    @property
    def name(self) -> str:
        return f"{self.method} {self.encode} n={self.samples} seed={self.seed}"

    @property
    def words(self) -> dict[str, Any]:
        """Return the keys of its rows."""
        return {
            "upstream": self.upstream, "method": self.method, "setting": self.rivals.setting, "encode": self.encode,
            "seed": self.seed, "samples": self.samples,
        }  # fmt: skip

    def spec(self, folder: Path, name: str = "", **columns: Any) -> ModelSpec:
        """Return what `make` left in a folder, to be scored."""
        corrects, words = "" if self.method == "featcal" else "merged", self.words
        keys = (words["method"], self.upstream, words["setting"], self.seed)
        return ModelSpec(name or self.name, folder, *keys, corrects=corrects, columns=columns)

    def batches(self, setup: Setup) -> Batches:
        """Return its samples in memory; all that a task has where there are fewer."""
        from featcal.data.batches import draw_indices

        draw = self.rivals.draw(self.method, self.samples, self.seed)
        found: dict[str, Sequence[Mapping[str, Any]]] = {}
        for task in setup.tasks:
            samples = load_split(setup, task, draw.split)
            count = len(samples.labels)
            drawn = draw_indices(task, count, min(self.samples, count), self.seed)
            found[task] = list(samples.batches(drawn, draw.batch))
        return found

    def make(
        self, setup: Setup, batches: Batches, out: Path, audit: Sequence[int] = (), **changes: Any
    ) -> None:
        """Write a calibrated model or adapters. audit: steps after which adapters are kept too.

        changes: of an adapter's settings.
        """
        import featcal
        from featcal.baselines.training import adapters_for

        merged, device = setup.merged(self.upstream), setup.context.device
        if self.method == "featcal":
            given: dict[str, Any] = {"settings": self.rivals.featcal, "device": device, "out": out}
            given |= {"base": setup.base, "experts": setup.experts, "batches": batches}
            featcal.calibrate(merged, **given, resume=False)
            return
        settings = getattr(self.rivals, self.method).but(encode=self.encode, **changes)
        kept = {step: partial(_save, step_folder(out, step)) for step in audit}
        start = (settings, merged, setup.experts, batches, setup.projection())
        adapters_for(*start, self.seed, device, None, kept).save(out)


def merged_model(setup: Setup, upstream: str) -> ModelSpec:
    """Return the merged model that all of them start from."""
    return ModelSpec("merged", setup.merged(upstream), "merged", upstream)


def step_folder(out: Path, step: int) -> Path:
    """Return the folder of adapters after so many steps."""
    return out.with_name(f"{out.name}-step{step}")


def _save(folder: Path, adapters: Any) -> None:
    adapters.save(folder)


def measure(setup: Setup, one: Method, out: Path, audit: Sequence[int] = ()) -> dict[str, Any]:
    """Make one and return its seconds, megabytes and watt-hours, with its samples in memory before.

    First the same is done with one sample of each task and one step, so that what a process pays
    once (late imports, the first call of every kernel) is in neither clock nor memory.
    """
    from reproduction.profiling import profiled

    batches = one.batches(setup)
    first = {t: [{n: value[:1] for n, value in own[0].items()}] for t, own in batches.items()}
    with TemporaryDirectory(dir=out.parent) as folder:
        shortest = {} if one.method == "featcal" else {"steps": 1}
        one.make(setup, first, Path(folder) / "warm_up", **shortest)
    give_back_freed_memory()
    on_gpu = setup.context.device.type == "cuda"
    _, profile = profiled(partial(one.make, setup, batches, out, audit), on_gpu)
    counts = (sum(len(next(iter(b.values()))) for b in own) for own in batches.values())
    return {**one.words, "images": min(counts), **asdict(profile)}


def give_back_freed_memory() -> None:
    """Make glibc return freed memory; a run that is served from it would seem to need none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
