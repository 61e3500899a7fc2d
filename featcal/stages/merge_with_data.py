"""Stage `merge_with_data`: merged checkpoints whose method looks at images of every task."""

from featcal.stages.context import Context
from featcal.stages.mergers import merge_all, of_section
from featcal.stages.workers import console


def run(key: str) -> None:
    """Write outputs/<suite>/merged/<key>-<name>/ for every entry of `merge_with_data`; empty folders where it is not run."""
    merge_all("merge_with_data", key, lambda context: of_section(context, key, with_data=True), merge_one)


def merge_one(context: Context, name: str) -> None:
    """One merged model, in the process that limits its threads."""
    import featcal
    from featcal.merging.methods import method_named
    from featcal.models.device import torch_device
    from featcal.stages.streams import streams

    merge = context.experiments.merge[name]
    assert merge.options is not None and merge.draw is not None
    layout, role, pool = context.layout, merge.role, merge.pool
    featcal.merge(
        merge.method,
        layout.base(role, pool),
        {task: layout.expert(role, pool, task) for task in context.suite.pool(pool)},
        batches=streams(context, role, pool, merge.draw),
        head=layout.heads(role, pool) if method_named(merge.method).head else None,
        device=torch_device(context.suite.device),
        out=layout.merged(name),
        progress=lambda line: console.print(f"  {line}", soft_wrap=True),
        **merge.options,
    )
