"""The study of the paper's propositions. Knows nothing of torch, models or
where results go.
"""

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Calibration, require
from reproduction.experiments.rivals import Study
from reproduction.experiments.runs import Counts, Setting


class TheoryStudy(Study):
    """Propositions 1 to 8 and both corollaries, checked on one merged model, its experts and
    FeatCal with these settings.

    images: of each task.   traced: of those, the images that are followed along their segments and
    matched token by token.
    nodes: numbers of quadrature nodes at which path-averaged Jacobians are tried.
    """

    section = "theory"
    setting: Setting
    featcal: Calibration
    samples: PositiveInt
    batch: PositiveInt
    seed: NonNegativeInt
    images: PositiveInt
    traced: PositiveInt
    nodes: Counts

    def check(self) -> None:
        require(
            self.traced <= self.images,
            "theory.traced",
            self.traced,
            f"must be at most theory.images, {self.images}",
        )
