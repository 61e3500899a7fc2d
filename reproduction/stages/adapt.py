"""Stage `adapt`: Surgery, ProbSurgery and a mean shift behind merged models, at every setting and
seed of params.yaml.
"""

from reproduction.stages.context import load_context, recorded, runs_of
from reproduction.stages.trainings import train_all


def run(key: str) -> None:
    """Write outputs/<suite>/adapted/<merged>-<adapter>/ for a role and pool, or for one merged
    model of them.
    """
    context = load_context()
    with recorded(context, "adapt", key):
        train_all(context, f"adapt {key}", runs_of("adapt", context.experiments.adapt, key))
