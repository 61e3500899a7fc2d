"""Every model of a role and pool that is scored: where it lies, and how the results call it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reproduction.experiments.runs import ANCHOR, DOMAIN_POOL, RESCALED, TEXT_POOLS, Pool
from reproduction.stages.context import Context


@dataclass(frozen=True)
class Scored:
    """One row of a table: a model, or adapters behind one.

    name:  unique among the models of the pool.   folder: of the model, or of its adapters; None for each task's own expert.
    adapted_model: name of the model that adapters correct.
    """

    name: str
    folder: Path | None
    method: str
    upstream: str = ""
    setting: str = ""
    seed: int | str = ""
    adapted_model: str = ""
    words: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        words = {"upstream": self.upstream, "method": self.method, "setting": self.setting, "seed": self.seed}
        object.__setattr__(self, "words", words)


def scored(context: Context, role: str, pool: Pool) -> list[Scored]:
    """In the order of the results file: base, experts, multi-task model, merged, calibrated, adapted, controls."""
    base = Scored("base", context.layout.base(role, pool), "base")
    parts = (_experts, _multitask, _merged, _calibrated, _adapted, _ablated, _anchors)
    return [base, *(row for part in parts for row in part(context, role, pool))]


def _experts(context: Context, role: str, pool: Pool) -> Iterator[Scored]:
    """Each task's own, as one row; of domains every expert on all tests, called by its domain as a setting."""
    if pool != DOMAIN_POOL:
        yield Scored("expert", None, "expert")
        return
    for domain in context.suite.tasks_of(role, pool):
        yield Scored(f"expert/{domain}", context.layout.expert(role, pool, domain), "expert", setting=domain)


def _multitask(context: Context, role: str, pool: Pool) -> Iterator[Scored]:
    key = f"{role}-{pool}"
    if context.experiments.multitask.get(key):
        yield Scored("multitask", context.layout.multitask(key), "multitask")


def _merged(context: Context, role: str, pool: Pool) -> Iterator[Scored]:
    for key, run in context.experiments.merged_in(role, pool).items():
        yield Scored(key, context.layout.merged(key), "merged", run.upstream)


def _calibrated(context: Context, role: str, pool: Pool) -> Iterator[Scored]:
    for key, run in context.experiments.calibrated_in(role, pool).items():
        for seed in run.seeds:
            folder = context.layout.calibrated(key, seed)
            yield Scored(f"{key}/{seed}", folder, "featcal", run.upstream, run.setting, seed)


def _adapted(context: Context, role: str, pool: Pool) -> Iterator[Scored]:
    for key, run in context.experiments.adapted_in(role, pool).items():
        adapted_model = f"{role}-{pool}-{run.upstream}"
        for setting, chosen in (run.settings or {}).items():
            for seed in chosen.seeds:
                folder = context.layout.adapted(key, setting, seed)
                yield Scored(f"{key}/{setting}/{seed}", folder, run.method, run.upstream, setting, seed, adapted_model)


def _ablated(context: Context, role: str, pool: Pool) -> Iterator[Scored]:
    for key, run in context.experiments.ablated_in(role, pool).items():
        for method in (ANCHOR, RESCALED):
            yield Scored(f"{key}/{method}", context.layout.ablated(key, method), method, run.whole.upstream)
        for name in run.without:
            words = ("featcal", run.whole.upstream, name, run.whole.seeds[0])
            yield Scored(f"{key}/{name}", context.layout.ablated(key, name), *words)


def _anchors(context: Context, role: str, pool: Pool) -> Iterator[Scored]:
    """Of language models the anchor of every setting."""
    for key, run in context.experiments.calibrated_in(role, pool).items() if pool in TEXT_POOLS else ():
        yield Scored(f"{key}/{ANCHOR}", context.layout.ablated(key, ANCHOR), ANCHOR, run.upstream, run.setting)
