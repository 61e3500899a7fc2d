"""Merged models of one role and pool, next to each other in the workers."""

from collections.abc import Callable, Mapping

from featcal.errors import UnknownKey
from featcal.runs import STREAMS, MergeRun
from featcal.stages.context import Context, load_context, recorded, role_and_pool
from featcal.stages.workers import console, fan_out
from featcal.storage.atomic import atomic_folder


def merge_all(verb: str, key: str, chosen: Callable[[Context], Mapping[str, MergeRun]], one: Callable[..., None]) -> None:
    """Write outputs/<suite>/merged/<name>/ for every chosen merger; empty folders where the suite does not run it.

    one: makes the merged model of a name; mergers that look at images are started first, since they take longest.
    """
    context = load_context()
    with recorded(context, verb, key):
        jobs = {}
        for name, run in sorted(chosen(context).items(), key=lambda named: named[1].draw is None):
            if run.options is None or not context.plays(run.role, run.pool):
                with atomic_folder(context.layout.merged(name)):
                    console.print(f"{verb} {name}: not run in suite {context.suite.name}")
            else:
                jobs[name] = (context, name)
        for _ in fan_out(f"{verb} {key}", one, jobs, context.suite.workers):
            pass


def of_section(context: Context, key: str, with_data: bool) -> dict[str, MergeRun]:
    """The entries of `merge`, or of `merge_with_data`, of one role and pool. Raises: UnknownKey where there are none."""
    role, pool = role_and_pool(key)
    runs = context.experiments.merge
    found = {name: run for name, run in runs.items() if (run.role, run.pool) == (role, pool)}
    if not found:
        raise UnknownKey("merge", key, sorted({f"{run.role}-{run.pool}" for run in runs.values()}))
    return {name: run for name, run in found.items() if (run.method in STREAMS) == with_data}
