"""Stage `merge_pool`: the four merged models of a larger pool, next to each other."""

from featcal.runs import MergeRun
from featcal.stages import merge, merge_with_data
from featcal.stages.context import Context, load_context, pick, recorded
from featcal.stages.workers import console, fan_out
from featcal.storage.atomic import atomic_folder


def run(key: str) -> None:
    """Write outputs/<suite>/merged/<key>-<method>/ for every merger; empty folders where the suite does not run it."""
    context = load_context()
    pool = pick("larger_pools", context.experiments.larger_pools, key)
    with recorded(context, "merge_pool", key):
        jobs = {}
        for name, run in sorted(pool.merge.items(), key=lambda named: named[1].draw is None):  # the longest first
            if run.options is None or not context.plays(pool.role, pool.pool):
                with atomic_folder(context.layout.merged(name)):
                    console.print(f"merge_pool {name}: not run in suite {context.suite.name}")
            else:
                jobs[name] = (context, name, run)
        for _ in fan_out(f"merge_pool {key}", merge_one, jobs, context.suite.workers):
            pass


def merge_one(context: Context, name: str, run: MergeRun) -> None:
    """One merged model, with images or without."""
    (merge if run.draw is None else merge_with_data).merge_one(context, name)
