"""Stage `merge`: base and experts of a role and pool into one merged checkpoint, tensor by tensor."""

from featcal.stages.context import load_context, pick, recorded
from featcal.stages.workers import console
from featcal.storage.atomic import atomic_folder


def run(key: str) -> None:
    """Write outputs/<suite>/merged/<key>/; an empty folder where the suite does not run this merge."""
    context = load_context()
    merge = pick("merge", context.experiments.merge, key)
    layout, out = context.layout, context.layout.merged(key)
    with recorded(context, "merge", key):
        if merge.options is None or context.role(merge.role) is None:
            with atomic_folder(out):
                console.print(f"merge {key}: not run in suite {context.suite.name}")
            return
        import featcal

        experts = {task: layout.expert(merge.role, merge.pool, task) for task in context.suite.pool(merge.pool)}
        featcal.merge(merge.method, layout.base(merge.role, merge.pool), experts, out=out, **merge.options)
        console.print(f"merge {key}: {len(experts)} experts")
