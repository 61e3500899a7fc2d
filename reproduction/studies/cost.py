"""Table 5: time, memory and energy of each rival, alone on the machine; adapters as they train.

A thread samples the process tree and the GPU five times a second; a sample takes about a
millisecond of one core. Power is that of torch's first GPU, which torch reads with the package
nvidia-ml-py (extra `gpu`).
"""

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeVar

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Distinct, require
from reproduction.engine.context import Setup
from reproduction.engine.samples import at_most, load_split
from reproduction.engine.spec import ModelSpec, merged_model, rival
from reproduction.engine.study import StudyResult, rows_of
from reproduction.engine.workers import Jobs, fan_out
from reproduction.experiments import TRAINED_ADAPTERS, Rivals, SampleDraw, Study
from reproduction.results import AUDIT

METHODS = ("featcal", *TRAINED_ADAPTERS)
Batches = Mapping[str, Sequence[Mapping[str, Any]]]  # by task
T = TypeVar("T")
MIB = 2**20
INTERVAL = 0.2  # seconds between two samples
JOULES = 3600  # in a watt-hour


class CostStudy(Study):
    """Settings. audit: steps after which adapters as published are scored; none: not trained."""

    section = "cost"
    scores = AUDIT
    described = False
    upstream: str
    rivals: Rivals
    samples: PositiveInt
    seed: NonNegativeInt
    audit: Annotated[tuple[PositiveInt, ...], Distinct]

    def check(self) -> None:
        steps = min(self.rivals.surgery.steps, self.rivals.prob_surgery.steps)
        expected = f"must not go beyond the {steps} steps that are made"
        require(max(self.audit, default=0) <= steps, "cost.audit", self.audit, expected)

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        models = [rival(self, folder, method) for method in METHODS]
        published = []
        for model in models[1:] if self.audit else ():
            name, settings = f"{model.name} each_step", model.settings.but(encode="each_step")
            published.append(model.but(name=name, folder=folder / name, settings=settings))
        jobs: dict[str, tuple[Any, ...]] = {model.name: (setup, model) for model in models}
        jobs |= {model.name: (setup, model, self.audit) for model in published}
        # nothing runs at the same time, so each has the cores that workers share elsewhere
        record = costs(self, jobs, 1, setup.context.suite.workers or None)
        audited = []
        for model, step in product(published, self.audit):
            columns = {"encode": "each_step", "samples": self.samples, "step": step}
            out, name = step_folder(model.folder, step), f"{model.name} {step}"
            audited.append(model.but(name=name, folder=out, columns=columns))
        others = [merged_model(setup, self.upstream)]
        return StudyResult(rows_of(setup, self.label, audited, others), record=record)


def step_folder(out: Path, step: int) -> Path:
    return out.with_name(f"{out.name}-step{step}")


def measure(setup: Setup, model: ModelSpec, audit: Iterable[int] = ()) -> dict[str, Any]:
    """Make one model, its samples in memory, and return its seconds, megabytes and watt-hours.

    A brief run comes first: what a process pays once is not measured. Models get the stages' bytes.
    """
    batches = in_memory(setup, model.draw)
    first = {t: [{n: value[:1] for n, value in own[0].items()}] for t, own in batches.items()}
    with TemporaryDirectory(dir=model.folder.parent) as folder:
        briefly = model.settings.but(steps=1) if model.corrects else model.settings
        make(setup, model.but(settings=briefly, folder=Path(folder, "warm_up")), first)
    give_back_freed_memory()
    on_gpu = setup.context.device.type == "cuda"
    _, profile = profiled(partial(make, setup, model, batches, audit), on_gpu)
    counts = (sum(len(next(iter(b.values()))) for b in own) for own in batches.values())
    words = {**model.words, "samples": model.draw.samples, "images": min(counts)}
    return {**words, "encode": getattr(model.settings, "encode", "once"), **asdict(profile)}


def costs(study: Study, jobs: Jobs, at_once: int, threads: int | None) -> dict[str, Any]:
    """Return the costs of jobs of `measure` for the run record; those with most samples start first."""
    longest_first = dict(sorted(jobs.items(), key=lambda job: -job[1][1].draw.samples))
    found = dict(fan_out(study.label, measure, longest_first, at_once, threads, fresh=True))
    record = {"cost": [found[name] for name in jobs], "at_once": at_once, "threads": threads}
    return record | {"settings": study.model_dump()}


def in_memory(setup: Setup, draw: SampleDraw) -> Batches:
    """Return the batches of a draw; all samples of a task that has fewer."""
    found = {}
    for task in setup.tasks:
        samples = load_split(setup, task, draw.split)
        drawn = at_most(draw.samples, task, len(samples.labels), draw.seed)
        found[task] = list(samples.batches(drawn, draw.batch))
    return found


def make(setup: Setup, model: ModelSpec, batches: Batches, audit: Iterable[int] = ()) -> None:
    import featcal
    from featcal.baselines.adapters import Adapters
    from featcal.baselines.training import adapters_for

    merged, device, out = setup.merged(model.upstream), setup.context.device, model.folder
    if not model.corrects:
        given: dict[str, Any] = {"settings": model.settings, "device": device, "out": out}
        given |= {"base": setup.base, "experts": setup.experts, "batches": batches}
        featcal.calibrate(merged, **given, resume=False)
        return
    start = (model.settings, merged, setup.experts, batches, setup.projection())
    kept = {step: partial(Adapters.save, folder=step_folder(out, step)) for step in audit}
    adapters_for(*start, model.seed, device, None, kept).save(out)


def give_back_freed_memory() -> None:
    """Make glibc return freed memory; a run that is served from it would seem to need none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


@dataclass(frozen=True)
class Profile:
    """The cost of a piece of work. energy_wh: None if not measured."""

    seconds: float
    memory_mib: float
    energy_wh: float | None


@dataclass
class Watch:
    """The largest memory of the process tree, and the power of a GPU over time."""

    gpu: bool
    largest: int = 0  # bytes
    power: list[tuple[float, float]] = field(default_factory=list)  # seconds of the clock, watts
    end: threading.Event = field(default_factory=threading.Event)

    def sample(self) -> None:
        """Sample memory and power once."""
        self.largest = max(self.largest, tree_bytes())
        if self.gpu and (watts := power_draw()) is not None:
            self.power.append((time.perf_counter(), watts))

    def keep_sampling(self) -> None:
        """Sample until the end is set."""
        while not self.end.wait(INTERVAL):
            self.sample()


def profiled(work: Callable[[], T], gpu: bool = False) -> tuple[T, Profile]:
    """Return the result of `work()` and its cost.

    work: on a GPU it must end with its results on the host or on disk, so that the clock does not
    stop before the GPU does.
    gpu: measure energy as well; work on the CPU is not charged for an idle GPU.
    """
    import psutil

    watch = Watch(gpu)
    sampling = threading.Thread(target=watch.keep_sampling, daemon=True)
    with suppress(OSError):  # not Linux, or not allowed: the peak since the process started
        Path("/proc/self/clear_refs").write_text("5")
    before, own_before = tree_bytes(), psutil.Process().memory_info().rss
    watch.sample()
    sampling.start()
    start = time.perf_counter()
    try:
        result = work()
        seconds = time.perf_counter() - start
    finally:
        watch.end.set()
        sampling.join()
    watch.sample()
    grown = max(0, watch.largest - before, own_peak_bytes() - own_before)
    return result, Profile(round(seconds, 3), round(grown / MIB, 1), energy(watch.power))


def tree_bytes() -> int:
    """Return the resident memory of this process and its descendants."""
    import psutil

    own = psutil.Process()
    size = own.memory_info().rss
    for child in own.children(recursive=True):
        with suppress(psutil.Error):  # ended in the meantime
            size += child.memory_info().rss
    return int(size)


def own_peak_bytes() -> int:
    """Return the peak resident memory of this process as the kernel counts it; 0 if unknown.

    The kernel misses no peak between two samples. psutil does not read this counter.
    """
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def power_draw() -> float | None:
    """Return the watts of torch's first GPU; None without package, driver, GPU or sensor."""
    import torch

    try:
        return torch.cuda.power_draw(0) / 1000  # NVML counts milliwatts
    except Exception:  # NVML's errors are of a package that may be missing
        return None


def energy(power: list[tuple[float, float]]) -> float | None:
    """Return the watt-hours under a curve of (seconds, watts) by trapezoids; None for no curve."""
    if len(power) < 2:
        return None
    pairs = zip(power, power[1:], strict=False)
    joules = sum((later - sooner) * (a + b) / 2 for (sooner, a), (later, b) in pairs)
    return round(joules / JOULES, 4)
