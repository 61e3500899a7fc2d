"""What the paper's suite will need of a machine, counted before anything is downloaded: memory,
disk, and hours per table.

Work of calibrations is that of `featcal plan`; of evaluations 2 operations per parameter and token;
of AdaMerging three times that for every image it looks at. Merges without data, adapters and
studies are left out, so that hours are a lower bound.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from reproduction.experiments.params import Experiments
from reproduction.experiments.runs import Pool
from reproduction.prepare.suite import Suite

BATCH_OF_TEXTS = 32


@dataclass(frozen=True)
class Chosen:
    """A project with its experiments in one suite."""

    root: Path
    experiments: Experiments
    suite: Suite


@dataclass(frozen=True)
class RoleNeeds:
    """One role: bytes of the GPU and the host in its largest calibration, and of the models that
    its outputs keep.
    """

    role: str
    gpu: int
    host: int
    disk: int


def played(chosen: Chosen) -> list[tuple[str, Pool]]:
    """Roles and pools that the suite runs."""
    experiments, suite = chosen.experiments, chosen.suite
    pairs = experiments.prepared
    return [
        (role, pool)
        for role, pool in pairs
        if role in suite.every_role and pool in suite.pools_of(role)
    ]


def planned(role: str, tasks: int, samples: int, batch: int) -> dict[str, int]:
    """Estimate one calibration on a GPU whose features are cached in host memory, as totals."""
    from featcal.calibration.estimate import Job
    from featcal.cli.folders import skeleton
    from featcal.cli.plan import estimated
    from reproduction.doctor.paper_sizes import SIZES

    size, job = SIZES[role], Job(tasks, samples, min(batch, samples), on_gpu=True)
    with tempfile.TemporaryDirectory() as folder:
        model = skeleton(size.write(Path(folder)))
    needs = estimated(model, job, size.tokens, size.tokens is not None, None)
    return {name: sum(parts.values()) for name, parts in needs.items()}


def models_kept(chosen: Chosen, role: str, pool: Pool) -> int:
    """Models that outputs hold of a role and pool: merged and calibrated."""
    ex = chosen.experiments
    calibrated = sum(len(run.seeds) for run in ex.calibrated_in(role, pool).values())
    return len(ex.merged_in(role, pool)) + calibrated


def role_needs(chosen: Chosen) -> list[RoleNeeds]:
    """Every role that is run, at its largest pool."""
    from reproduction.doctor.paper_sizes import SIZES

    found = []
    pairs = played(chosen)
    for role in dict.fromkeys(role for role, _ in pairs):
        pools = [pool for other, pool in pairs if other == role]
        experts = len({task for pool in pools for task in chosen.suite.tasks_of(role, pool)})
        needs = planned(role, experts, *_draw(chosen, role))
        kept = sum(models_kept(chosen, role, pool) for pool in pools) + experts + len(pools)
        found.append(RoleNeeds(role, needs["device"], needs["host"], kept * SIZES[role].bytes))
    return found


def _draw(chosen: Chosen, role: str) -> tuple[int, int]:
    """Samples of each task and samples at a time of the role's calibrations."""
    runs = [
        run
        for run in chosen.experiments.calibrate.values()
        if run.role == role and run.calibration is not None
    ]
    return (
        (max(run.samples for run in runs), max(run.batch for run in runs))
        if runs
        else (256, BATCH_OF_TEXTS)
    )


def hours(chosen: Chosen, rate: float) -> dict[str, float]:
    """Hours at `rate` operations a second for everything a role and pool's results are made of, by
    `role-pool`.
    """
    return {
        f"{role}-{pool}": _work(chosen, role, pool) / rate / 3600 for role, pool in played(chosen)
    }


def _work(chosen: Chosen, role: str, pool: Pool) -> float:
    """Operations of calibrations, evaluations and AdaMerging."""
    from reproduction.doctor.paper_sizes import SIZES, test_samples

    ex, size, tasks = chosen.experiments, SIZES[role], chosen.suite.tasks_of(role, pool)
    sample = 2.0 * size.parameters * size.width
    calibrations = sum(len(run.seeds) for run in ex.calibrated_in(role, pool).values())
    controls = ex.studies["ablate"].get(f"{role}-{pool}")
    calibrations += len(controls.upstreams) * len(controls.without) if controls else 0
    work = 0.0
    if calibrations:
        work += calibrations * planned(role, len(tasks), *_draw(chosen, role))["operations"]
    work += (
        (models_kept(chosen, role, pool) + 2) * test_samples(pool, tasks) * sample
    )  # and base and experts
    for run in ex.merged_in(role, pool).values():
        if run.method == "adamerging" and run.draw is not None:
            work += 3 * sample * (run.options or {}).get("steps", 0) * len(tasks) * run.draw.batch
    return work
