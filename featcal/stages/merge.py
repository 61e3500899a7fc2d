"""Stage `merge`: base and experts of a role and pool into one merged checkpoint, tensor by tensor."""

from featcal.stages.context import Context, load_context, pick, recorded
from featcal.stages.workers import console
from featcal.storage.atomic import atomic_folder


def run(key: str) -> None:
    """Write outputs/<suite>/merged/<key>/; an empty folder where the suite does not run this merge."""
    context = load_context()
    merge = pick("merge", context.experiments.merge, key)
    with recorded(context, "merge", key):
        if merge.options is None or not context.plays(merge.role, merge.pool):
            with atomic_folder(context.layout.merged(key)):
                console.print(f"merge {key}: not run in suite {context.suite.name}")
            return
        merge_one(context, key)
        console.print(f"merge {key}: {len(context.suite.pool(merge.pool))} experts")


def merge_one(context: Context, key: str) -> None:
    """One merged model."""
    import featcal

    layout, merge = context.layout, context.experiments.merge[key]
    assert merge.options is not None
    experts = {task: layout.expert(merge.role, merge.pool, task) for task in context.suite.pool(merge.pool)}
    featcal.merge(merge.method, layout.base(merge.role, merge.pool), experts, out=layout.merged(key), **merge.options)
