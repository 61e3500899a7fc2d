"""Stage `adapt`: Surgery, ProbSurgery and a mean shift behind merged models, at every setting and seed of params.yaml."""

from reproduction.experiments.runs import TEXT_POOLS
from reproduction.stages.context import load_context, recorded, runs_of
from reproduction.stages.streams import samples_of
from reproduction.stages.text_streams import texts_of
from reproduction.stages.trainings import train_all


def run(key: str) -> None:
    """Write outputs/<suite>/adapted/<merged>-<adapter>/ for a role and pool, or for one merged model of them."""
    context = load_context()
    runs = runs_of("adapt", context.experiments.adapt, key)
    generate = all(run.pool in TEXT_POOLS for run in runs.values())
    with recorded(context, "adapt", key):
        train_all(context, f"adapt {key}", runs, texts_of if generate else samples_of)
