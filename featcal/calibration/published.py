"""Moments of a task that its owner publishes in the place of samples, and what calibration makes of
them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import nn

from featcal.calibration.observe import Observation
from featcal.calibration.sites import Modules
from featcal.errors import BadBatches
from featcal.settings import Calibration, require


class Published(ABC):
    """Moments of an expert's own features; given in `batches` in the place of its task's samples.

    What the merged model makes of these samples nobody can tell, so the expert's features x stand
    for it. With x_cal = x_exp = x
    Eq. 13 has G = C = Σ w x xᵀ / n, the target of Eq. 10 is x whatever α is, and the task's share
    of Eq. 17 is RegMean's term,
        W (… + ωG) = … + ω W_t G,   ω = 1/‖G‖_F (Eq. 14);
    of Eq. 55 it is ω (W_t μ + b_t − W μ), of Eq. 58 that of the expert's normalised features. Exact
    where the merged model's features of the task are its expert's, else a prior that draws the
    weights to what the expert does on its own features.
    """

    @abstractmethod
    def observation(self, path: str, teacher: nn.Module, modules: Modules) -> Observation:
        """The moments of the solved modules of the expert's block at a path. Raises: BadFile for
        those of another model.
        """

    @property
    @abstractmethod
    def digest(self) -> str:
        """A text that differs for other moments."""


def check_published(
    published: Mapping[str, Published],
    batches: Mapping[str, Any],
    settings: Calibration,
    alone: bool,
) -> None:
    """Raise BadBatches or BadSetting for what cannot be done where tasks have moments in the place
    of samples.

    alone: whether one process calibrates all tasks, by the family's own weights of tokens.
    """
    tasks = ", ".join(sorted(published))
    if not published:
        return
    if len(published) == len(batches):
        raise BadBatches(
            tasks,
            'has moments only; one task at least needs samples, else this is merge("regmean") of the moments',
        )
    if not alone:
        raise BadBatches(
            tasks,
            "has moments, which one process takes, summed by the family's own token weights; give no others",
        )
    features = (
        f"needs the samples of every task, which the published moments of {tasks} do not tell"
    )
    apart = f"holds samples out, and {tasks} has none"
    for key, off, why in (
        ("order", settings.order != "sites", features),
        ("residual", not settings.aims_at_the_stream, features),
        ("weights", settings.weights == "rule", features),
        ("shrinkage", settings.shrinkage == "fixed", features),
        ("interpolation", settings.interpolation != "auto", apart),
        ("no_harm", not settings.no_harm, apart),
    ):
        require(off, f"calibrate.{key}", getattr(settings, key), why)
