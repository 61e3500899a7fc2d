"""Stage `merge_language`: base and experts of a language model into the merged model that everything else starts from."""

from collections.abc import Mapping

from featcal.runs import MergeRun
from featcal.stages.context import Context, pick
from featcal.stages.merge import merge_one
from featcal.stages.mergers import merge_all


def run(key: str) -> None:
    """Write outputs/<suite>/merged/<key>-<method>/ for every merger; empty folders where the suite does not run it."""

    def chosen(context: Context) -> Mapping[str, MergeRun]:
        return pick("language_pools", context.experiments.pools, key).merge

    merge_all("merge_language", key, chosen, merge_one)
