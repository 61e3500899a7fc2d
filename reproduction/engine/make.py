"""How a study makes all models of its specifications."""

from collections.abc import Sequence

from reproduction.engine.adapt import adapt_all
from reproduction.engine.calibrate import calibrate_all
from reproduction.engine.context import Setup
from reproduction.engine.merge import merge_all
from reproduction.engine.spec import ModelSpec


def make(label: str, setup: Setup, models: Sequence[ModelSpec]) -> dict[str, float]:
    """Make merged models, then what is calibrated from them, then adapters; return the seconds of
    every calibration by its name.
    """
    merge_all(label, setup, models)
    seconds = calibrate_all(label, setup, models)
    adapt_all(label, setup, models)
    return seconds
