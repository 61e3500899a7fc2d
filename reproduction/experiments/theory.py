"""The study of the paper's propositions, as a frozen dataclass. Knows nothing of torch, models or
where results go.
"""

from dataclasses import dataclass

from featcal.settings import Calibration, Count, Natural, require
from reproduction.experiments.rivals import Study
from reproduction.experiments.runs import Counts, Setting


@dataclass(frozen=True)
class TheoryStudy(Study):
    """Propositions 1 to 8 and both corollaries, checked on one merged model, its experts and
    FeatCal with these settings.

    images: of each task.   traced: of those, the images that are followed along their segments and
    matched token by token.
    nodes: numbers of quadrature nodes at which path-averaged Jacobians are tried.
    """

    place = "theory"
    setting: Setting
    featcal: Calibration
    samples: Count
    batch: Count
    seed: Natural
    images: Count
    traced: Count
    nodes: Counts

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.traced <= self.images,
            "theory.traced",
            self.traced,
            f"must be at most theory.images, {self.images}",
        )
