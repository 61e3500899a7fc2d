"""Stage `merge`: base and experts of a role and pool into merged checkpoints, tensor by tensor, from the weights alone."""

from featcal.stages.context import Context
from featcal.stages.mergers import merge_all, of_section


def run(key: str) -> None:
    """Write outputs/<suite>/merged/<key>-<name>/ for every entry of `merge`; empty folders where the suite does not run it."""
    merge_all("merge", key, lambda context: of_section(context, key, with_data=False), merge_one)


def merge_one(context: Context, name: str) -> None:
    """One merged model."""
    import featcal

    layout, merge = context.layout, context.experiments.merge[name]
    assert merge.options is not None
    experts = {task: layout.expert(merge.role, merge.pool, task) for task in context.suite.pool(merge.pool)}
    featcal.merge(merge.method, layout.base(merge.role, merge.pool), experts, out=layout.merged(name), **merge.options)
