"""Stage `merge_pool`: the merged models of a larger pool, with images or without."""

from collections.abc import Mapping

from featcal.runs import MergeRun
from featcal.stages import merge, merge_with_data
from featcal.stages.context import Context, pick
from featcal.stages.mergers import merge_all


def run(key: str) -> None:
    """Write outputs/<suite>/merged/<key>-<method>/ for every merger; empty folders where the suite does not run it."""

    def chosen(context: Context) -> Mapping[str, MergeRun]:
        return pick("pools", context.experiments.pools, key).merge

    merge_all("merge_pool", key, chosen, merge_one)


def merge_one(context: Context, name: str) -> None:
    """One merged model."""
    alone = context.experiments.merge[name].draw is None
    (merge if alone else merge_with_data).merge_one(context, name)
