"""Stage `adapt_language`: Surgery and ProbSurgery before the language head of a merged model."""

from featcal.stages.context import load_context, pick, recorded
from featcal.stages.text_streams import texts_of
from featcal.stages.trainings import train_all


def run(key: str) -> None:
    """The adapters of one entry of `language_pools`, as train_all writes them."""
    context = load_context()
    pool = pick("language_pools", context.experiments.pools, key)
    with recorded(context, "adapt_language", key):
        train_all(context, f"adapt_language {key}", pool.adapt, texts_of)
