"""Open models to go through their blocks as a calibration does."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from featcal.calibration.calibrate import budgets
from featcal.calibration.features import Models, open_models
from featcal.calibration.scratch import Spool
from featcal.core.precision import exact_products
from featcal.models.batch import Model
from featcal.settings import Calibration


@contextmanager
def opened(
    merged: Model,
    base: Model,
    experts: Mapping[str, Model],
    settings: Calibration,
    device: Any,
) -> Iterator[tuple[Models, Spool]]:
    """Give the models in evaluation mode, the student in memory, and a spool for features."""
    arguments = (merged, base, experts, None, settings)
    models = open_models(*arguments, whole=True, device=device, dtype=None)
    spool = Spool(*budgets(models.device, None), tempfile.gettempdir())
    with models.evaluated(), exact_products(), spool:
        yield models, spool
