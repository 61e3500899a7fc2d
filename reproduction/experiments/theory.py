"""The study of the paper's propositions, as a frozen dataclass. Knows nothing of torch, models or where results go."""

from dataclasses import dataclass

from featcal.settings import Calibration, require, several, whole_number
from reproduction.experiments.rivals import Study
from reproduction.experiments.runs import SETTINGS


@dataclass(frozen=True)
class TheoryStudy(Study):
    """Propositions 1 to 8 and both corollaries, checked on one merged model, its experts and FeatCal with these settings.

    images: of each task.   traced: of those, the images that are followed along their segments and matched token by token.
    nodes: numbers of quadrature nodes at which path-averaged Jacobians are tried.
    """

    setting: str
    featcal: Calibration
    samples: int
    batch: int
    seed: int
    images: int
    traced: int
    nodes: tuple[int, ...]

    def __post_init__(self) -> None:
        require(self.setting in SETTINGS, "theory.setting", self.setting, f"must be one of {', '.join(SETTINGS)}")
        for name in ("samples", "batch", "images", "traced"):
            whole_number(f"theory.{name}", getattr(self, name))
        require(self.traced <= self.images, "theory.traced", self.traced, f"must be at most theory.images, {self.images}")
        whole_number("theory.seed", self.seed, least=0)
        several("theory.nodes", self.nodes)
