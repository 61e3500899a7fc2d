"""Stage `merge_with_data`: merged checkpoints whose method looks at images of every task."""

from featcal.stages.context import Context, load_context, pick, recorded
from featcal.stages.workers import console, fan_out
from featcal.storage.atomic import atomic_folder


def run(key: str) -> None:
    """Write outputs/<suite>/merged/<key>/; an empty folder where the suite does not run this merge."""
    context = load_context()
    merge = pick("merge_with_data", context.experiments.merge, key)
    with recorded(context, "merge", key):
        if merge.options is None or not context.plays(merge.role, merge.pool):
            with atomic_folder(context.layout.merged(key)):
                console.print(f"merge_with_data {key}: not run in suite {context.suite.name}")
            return
        for _ in fan_out("merge_with_data", merge_one, {key: (context, key)}, min(context.suite.workers, 1)):
            pass


def merge_one(context: Context, key: str) -> None:
    """One merged model, in the process that limits its threads."""
    import featcal
    from featcal.merging.methods import method_named
    from featcal.models.device import torch_device
    from featcal.stages.streams import streams

    merge = context.experiments.merge[key]
    assert merge.options is not None and merge.draw is not None
    layout, role, pool = context.layout, merge.role, merge.pool
    featcal.merge(
        merge.method,
        layout.base(role, pool),
        {task: layout.expert(role, pool, task) for task in context.suite.pool(pool)},
        batches=streams(context, role, pool, merge.draw),
        head=layout.heads(role, pool) if method_named(merge.method).head else None,
        device=torch_device(context.suite.device),
        out=layout.merged(key),
        progress=lambda line: console.print(f"  {line}", soft_wrap=True),
        **merge.options,
    )
