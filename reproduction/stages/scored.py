"""Every model of a role and pool that is scored: where it lies, and how the results call it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reproduction.experiments.runs import ANCHOR, DOMAIN_POOL, TEXT_POOLS, Pool
from reproduction.stages.context import Context


@dataclass(frozen=True)
class Scored:
    """One row of a table: a model, or adapters behind one.

    name:  unique among the models of the pool.   folder: of the model, or of its adapters; None for
           each task's own expert.
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
        words = {
            "upstream": self.upstream,
            "method": self.method,
            "setting": self.setting,
            "seed": self.seed,
        }
        object.__setattr__(self, "words", words)


def scored(context: Context, role: str, pool: Pool) -> list[Scored]:
    """In the order of the results file: base, experts, multi-task model, merged, calibrated,
    adapted.
    """
    return [*references(context, role, pool), *made(context, role, pool)]


def references(context: Context, role: str, pool: Pool) -> Iterator[Scored]:
    """Base, experts and multi-task model. Experts are one row, of domains every expert on all
    tests, called by its domain.
    """
    layout = context.layout
    yield Scored("base", layout.base(role, pool), "base")
    if pool == DOMAIN_POOL:
        for domain in context.suite.tasks_of(role, pool):
            yield Scored(
                f"expert/{domain}", layout.expert(role, pool, domain), "expert", setting=domain
            )
    else:
        yield Scored("expert", None, "expert")
    if context.experiments.multitask.get(f"{role}-{pool}"):
        yield Scored("multitask", layout.multitask(f"{role}-{pool}"), "multitask")


def made(context: Context, role: str, pool: Pool) -> Iterator[Scored]:
    """Merged models and what is made from them; of language models the anchor of every setting."""
    layout, experiments = context.layout, context.experiments
    calibrated = experiments.calibrated_in(role, pool)
    for key, merge in experiments.merged_in(role, pool).items():
        yield Scored(key, layout.merged(key), "merged", merge.upstream)
    for key, run in calibrated.items():
        for seed in run.seeds:
            yield Scored(
                f"{key}/{seed}",
                layout.calibrated(key, seed),
                "featcal",
                run.upstream,
                run.setting,
                seed,
            )
    for key, adapt in experiments.adapted_in(role, pool).items():
        for setting, chosen in (adapt.settings or {}).items():
            for seed in chosen.seeds:
                words = (adapt.method, adapt.upstream, setting, seed, adapt.merged)
                yield Scored(f"{key}/{setting}/{seed}", layout.adapted(key, setting, seed), *words)
    for key, run in calibrated.items() if pool in TEXT_POOLS else ():
        yield Scored(
            f"{key}/{ANCHOR}", layout.ablated(key, ANCHOR), ANCHOR, run.upstream, run.setting
        )
