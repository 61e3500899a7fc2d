"""Stage `adapt_pool`: Surgery and ProbSurgery behind the four merged models of a larger pool, next to each other."""

from typing import Any

from featcal.stages.adapt import adapt_one
from featcal.stages.context import load_context, pick, recorded
from featcal.stages.workers import console, fan_out
from featcal.storage.atomic import atomic_folder


def run(key: str) -> None:
    """Write outputs/<suite>/adapted/<key>-<merger>-<method>/<setting>/seed<NN>/; empty folders where it is not run."""
    context = load_context()
    pool = pick("larger_pools", context.experiments.larger_pools, key)
    with recorded(context, "adapt_pool", key):
        jobs: dict[str, tuple[Any, ...]] = {}
        for name, run in pool.adapt.items():
            if run.settings is None or not context.plays(pool.role, pool.pool):
                with atomic_folder(context.layout.adapted(name)):
                    console.print(f"adapt_pool {name}: not run in suite {context.suite.name}")
                continue
            for setting, chosen in run.settings.items():
                jobs |= {f"{name}, {setting}, seed {seed}": (context, name, setting, seed) for seed in chosen.seeds}
        for _ in fan_out(f"adapt_pool {key}", adapt_one, jobs, context.suite.workers):
            pass
