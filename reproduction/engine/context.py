"""Load experiments, suite and paths for a stage, and write the record of its run."""

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from featcal.files import atomic_folder, write_json
from featcal.models.load import load_as_calibrated, torch_device
from featcal.settings import require
from reproduction.engine.workers import Jobs, console, fan_out
from reproduction.experiments import (
    CHAT_POOL,
    HEADLINE_POOL,
    TEXT_POOLS,
    Experiments,
    Pool,
    load_experiments,
    require_known,
    role_and_pool,
)
from reproduction.prepare.suite import ChatRole, LanguageRole, Role, SentenceRole, Suite, load_suite
from reproduction.results import project_root, run_record

T = TypeVar("T")
HEADS = "heads.safetensors"  # of encoders: logit scale, heads, and a projection where there is one


@dataclass(frozen=True)
class Context:
    """Experiments in the chosen suite, and the paths of their files."""

    root: Path
    experiments: Experiments
    suite: Suite
    outputs_folder: Path | None = None  # in place of outputs/<suite>/, for models not kept

    @property
    def outputs(self) -> Path:
        return self.outputs_folder or self.root / "outputs" / self.suite.name

    @property
    def results(self) -> Path:
        return self.root / "results" / self.suite.name

    @property
    def pins(self) -> Path:
        """Return the file of hub names and the commits they were resolved to."""
        return self.root / "suites" / f"{self.suite.name}.pins.json"

    def unfinished(self, fingerprint: str) -> Path:
        """Return a folder for finished parts of an unfinished stage, which DVC does not remove."""
        return self.root / ".featcal" / self.suite.name / fingerprint

    @property
    def device(self) -> torch.device:
        return torch_device(self.suite.device)

    @property
    def gpu(self) -> str:
        """Return the name of the GPU that the suite computes on; empty for a CPU."""
        return torch.cuda.get_device_name() if self.device.type == "cuda" else ""

    def role(self, name: str) -> Role | LanguageRole | SentenceRole | None:
        """Return the suite's model for a role; None if it has none. Raises: UnknownKey."""
        require_known("role", name, self.experiments.roles)
        return self.suite.every_role.get(name)

    def run(self, label: str, function: Any, jobs: Jobs) -> dict[str, Any]:
        """Return the results of jobs in the suite's workers, by name in the order of the jobs."""
        threads = None if self.gpu else 1
        results = dict(fan_out(label, function, jobs, self.suite.workers, threads))
        return {name: results[name] for name in jobs}

    def not_run(self, stage: str, out: Path, reason: str = "") -> None:
        """Print that nothing is made, and write it into the folder: DVC warns of empty ones."""
        line = reason or f"{stage}: not run in suite {self.suite.name}"
        with atomic_folder(out) as folder:
            (folder / "not_run.txt").write_text(f"{line}\n", "utf-8")
        console.print(line)

    @contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """Give a folder on the disk of the outputs, which is gone when the block ends."""
        self.outputs.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{name}-", dir=self.outputs) as folder:
            yield Path(folder)

    @contextmanager
    def recorded(self, verb: str, key: str | None) -> Iterator[dict[str, Any]]:
        """Write a stage's run record if the body succeeds, with the entries that the body adds.

        The entry `earlier` is the seconds of the parts that an interrupted run had finished.
        """
        start, extra = time.perf_counter(), dict[str, Any]()
        yield extra
        name = f"{verb}@{key}" if key else verb
        seconds = time.perf_counter() - start + extra.pop("earlier", 0.0)
        record = run_record({name: seconds}, self.gpu, **extra)
        write_json(self.outputs / "run" / f"{name.replace('@', '-')}.json", record)


@dataclass(frozen=True)
class Setup:
    """One role and pool."""

    context: Context
    role: str
    pool: Pool
    only: tuple[str, ...] = ()  # some of its tasks
    change: Callable[[str, Any], Any] | None = None  # changes a task's samples on reading

    @property
    def key(self) -> str:
        return f"{self.role}-{self.pool}"

    @property
    def in_suite(self) -> bool:
        """Return whether the suite has a model for the role, and the pool. Raises: UnknownKey."""
        role = self.context.role(self.role)
        keys = [f"{name}-{pool}" for name, pool in self.context.experiments.prepared]
        require_known("merge", self.key, keys)
        return role is not None and self.pool in self.context.suite.pools_of(self.role)

    @property
    def available(self) -> bool:
        """Return whether it is in the suite, and a packaged model fetched. Raises: UnknownKey."""
        packaged = isinstance(self.context.role(self.role), SentenceRole | ChatRole)
        return self.in_suite and (not packaged or self.base.is_dir())

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.only or self.context.suite.tasks_of(self.role, self.pool)

    @property
    def of_texts(self) -> bool:
        return self.pool in TEXT_POOLS

    @property
    def data(self) -> Path:
        """Return the folder that `load_task` reads: images, or texts for sentence encoders."""
        root, suite = self.context.root, self.context.suite
        if self.role in suite.sentences.roles:
            return root / suite.sentences.texts
        if self.role in suite.photos.roles:
            return root / "outputs" / suite.name / "photos"
        return self.context.outputs / "data"

    @property
    def texts(self) -> Path:
        """Return the folder of the texts of language models."""
        return (self.prepared if self.pool == CHAT_POOL else self.context.outputs) / "texts"

    @property
    def prepared(self) -> Path:
        return self.context.outputs / "prepared" / self.key

    @property
    def base(self) -> Path:
        return self.prepared / "base"

    @property
    def heads(self) -> Path:
        return self.prepared / HEADS

    def scaled_heads(self) -> dict[str, Tensor]:
        """Return the class vectors of every task times the logit scale, (classes, p)."""
        tensors = load_file(self.heads)
        scale = tensors["logit_scale"].exp()
        return {t: (scale * tensors[f"head/{t}"]).to(self.context.device) for t in self.tasks}

    @property
    def experts(self) -> dict[str, Path]:
        return {task: self.expert(task) for task in self.tasks}

    def expert(self, task: str) -> Path:
        key = f"{self.role}-{self.smallest_pool(task)}"
        return self.context.outputs / "prepared" / key / "experts" / task

    def smallest_pool(self, task: str) -> Pool:
        """Return the smallest pool of the role that has the task, so that no expert is made twice."""
        pools = self.context.suite.pools_of(self.role)
        pools_made = (pool for role, pool in self.context.experiments.prepared if role == self.role)
        return min(pool for pool in pools_made if task in pools.get(pool, ()))

    def folder(self, kind: str, *parts: str) -> Path:
        """Return the folder of one kind of outputs, such as `merged`."""
        return self.context.outputs.joinpath(kind, self.key, *parts)

    def merged(self, upstream: str) -> Path:
        return self.folder("merged", upstream)

    def projection(self) -> Tensor | None:
        """Return the projection after the encoders, where they have one."""
        return None if self.of_texts else load_file(self.heads).get("visual_projection")

    def load(self, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
        return load_as_calibrated(folder, dtype).to(self.context.device)

    @property
    def row_keys(self) -> dict[str, Any]:
        return {"suite": self.context.suite.name, "role": self.role, "pool": self.pool}


def load_context(root: Path | None = None) -> Context:
    """Return experiments, suite and paths. Raises: errors of the settings files."""
    root = project_root(root)
    experiments = load_experiments(root / "params.yaml")
    suite = load_suite(root, experiments.suite)
    if experiments.tasks is not None:
        experiments, suite = _with_tasks(experiments, suite, experiments.tasks)
    name, roles = suite.name, suite.every_role
    for role in roles:  # a misspelt role would quietly be a role that is not run
        require_known(f"suites/{name}.yaml: roles", role, experiments.roles)
    for key, measured in experiments.measure.items():
        if measured is not None and measured.role in roles:
            tasks = suite.tasks_of(measured.role, measured.pool)
            require_known(f"measure.{key}.{name}.task", measured.task, tasks)
    expected = f"is not among the pools of suites/{name}.yaml; write `{name}: null` to leave this merger out"
    for run in experiments.merge.values():
        if run.role in roles and run.options is not None and run.pool != HEADLINE_POOL:
            location = f"merge.{run.key}.{run.upstream}.{name}"
            require(run.pool in suite.pools_of(run.role), location, run.pool, expected)
    return Context(root, experiments, suite)


def load_setup(key: str) -> Setup:
    """Return the setup of a role and pool. Raises: as load_context; UnknownKey."""
    return Setup(load_context(), *role_and_pool(key))


def _with_tasks(
    experiments: Experiments, suite: Suite, tasks: Collection[str]
) -> tuple[Experiments, Suite]:
    """Remove all other tasks from pools that have some of `tasks`. Raises: UnknownKey.

    A larger nested pool keeps the tasks of a smaller one that has none of `tasks`.
    """
    all_pools = [suite.pools_of(role) for role in suite.every_role]
    known = {task for pools in all_pools for names in pools.values() for task in names}
    for task in tasks:
        require_known("tasks", task, known)

    def remaining(pools: Mapping[T, tuple[str, ...]]) -> dict[T, tuple[str, ...]]:
        kept, reduced = {*tasks}, {}
        for pool, names in pools.items():
            kept |= set() if set(tasks) & set(names) else set(names)
            reduced[pool] = tuple(task for task in names if task in kept)
        return reduced

    changes: dict[str, Any] = {"chat": suite.chat.but(tasks=remaining({"": suite.chat.tasks})[""])}
    for name in ("sentences", "photos", "language"):
        group = getattr(suite, name)
        changes[name] = group.but(pools=remaining(group.pools))
    images = remaining(suite.pools)
    steps = {t: n for t, n in suite.expert_steps.items() if t in max(images.values(), key=len)}
    suite = suite.but(pools=images, expert_steps=steps, **changes)
    measure = dict(experiments.measure)
    for key, run in measure.items():
        if run is not None and run.role in suite.every_role:
            role_tasks = suite.tasks_of(run.role, run.pool)
            measure[key] = run if run.task in role_tasks else run.but(task=role_tasks[0])
    return replace(experiments, measure=measure), suite


def pick(location: str, entries: Mapping[str, T], key: str) -> T:
    """Return the entry of that name. Raises: UnknownKey with the nearest one."""
    require_known(location, key, entries)
    return entries[key]


def fingerprint(settings: Any, files: Iterable[Path]) -> str:
    """Return a hash of settings and of the bytes of files."""
    digest = sha256(json.dumps(settings).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
