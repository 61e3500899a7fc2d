"""Stage `adapt`: Surgery, ProbSurgery and a mean shift behind one merged model, at every setting and seed of params.yaml."""

from featcal.errors import UnknownKey
from featcal.runs import AdaptRun
from featcal.stages.context import Context, load_context, recorded
from featcal.stages.streams import images_of
from featcal.stages.trainings import train_all


def run(key: str) -> None:
    """For `clip_b32-8-wudi`: the adapters of `adapt` that stand behind this merged model, as train_all writes them."""
    context = load_context()
    with recorded(context, "adapt", key):
        train_all(context, f"adapt {key}", behind(context, key), images_of)


def behind(context: Context, key: str) -> dict[str, AdaptRun]:
    """The runs behind one merged model. Raises: UnknownKey with the nearest merged model that has any."""
    found: dict[str, dict[str, AdaptRun]] = {}
    for name, run in context.experiments.adapt.items():
        found.setdefault(run.merged, {})[name] = run
    if key not in found:
        raise UnknownKey("adapters behind", key, list(found))
    return found[key]
