"""Stage `adapt_pool`: Surgery, ProbSurgery and a mean shift behind the merged models of a larger pool, next to each other."""

from featcal.stages.context import load_context, pick, recorded
from featcal.stages.streams import images_of
from featcal.stages.trainings import train_all


def run(key: str) -> None:
    """The adapters of one entry of `larger_pools`, as train_all writes them."""
    context = load_context()
    pool = pick("pools", context.experiments.pools, key)
    with recorded(context, "adapt_pool", key):
        train_all(context, f"adapt_pool {key}", pool.adapt, images_of)
