"""Stage `merge`: base and experts into merged checkpoints, of a role and pool or of one merger of
them.

Mergers look at the weights alone or, tensor by tensor, also at images of every task.
"""

from typing import Any

from reproduction.experiments.runs import MergeRun
from reproduction.stages.context import Context, load_context, not_run, recorded, runs_of
from reproduction.stages.workers import console, fan_out


def run(key: str) -> None:
    """Write outputs/<suite>/merged/<role>-<pool>-<merger>/; empty folders where the suite does not
    run it.

    Mergers that look at images are started first, since they take longest.
    """
    context = load_context()
    runs = runs_of("merge", context.experiments.merge, key)
    with recorded(context, "merge", key):
        jobs = {}
        for name, merge in sorted(runs.items(), key=lambda named: named[1].draw is None):
            if merge.options is None or not context.plays(merge.role, merge.pool):
                not_run(context, f"merge {name}", context.layout.merged(name))
            else:
                jobs[name] = (context, name)
        for _ in fan_out(f"merge {key}", merge_one, jobs, context.suite.workers):
            pass


def merge_one(context: Context, name: str) -> None:
    """One merged model, in the process that limits its threads."""
    import featcal

    layout, merge = context.layout, context.experiments.merge[name]
    assert merge.options is not None
    experts = {
        task: layout.expert(merge.role, merge.pool, task)
        for task in context.suite.tasks_of(merge.role, merge.pool)
    }
    base, out = layout.base(merge.role, merge.pool), layout.merged(name)
    featcal.merge(merge.method, base, experts, out=out, **_images(context, merge), **merge.options)


def _images(context: Context, merge: MergeRun) -> dict[str, Any]:
    """What a merger is given that looks at images; nothing for the others."""
    if merge.draw is None:
        return {}
    from featcal.merging.registry import method_named
    from featcal.models.load import torch_device
    from reproduction.stages.streams import streams

    return {
        "batches": streams(context, merge.role, merge.pool, merge.draw),
        "head": context.layout.heads(merge.role, merge.pool)
        if "head" in method_named(merge.method).needs
        else None,
        "device": torch_device(context.suite.device),
        "n_jobs": context.suite.workers or 1,  # adamerging takes as long as all the others
        "progress": lambda line: console.print(f"  {line}", soft_wrap=True),
    }
