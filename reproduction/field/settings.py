"""Settings of the trained methods that only the study `field` runs."""

from typing import ClassVar, Literal

from pydantic import PositiveInt

from featcal.baselines.surgery import Surgery
from featcal.baselines.training import Training


class SurgeryV2(Surgery):
    """Surgery after every block and of the last feature, trained together.

    rank: the authors take 16 for ViT-B, 4 for ViT-L.
    """

    name: ClassVar[str] = "surgery_v2"
    section = name
    features: Literal["unit", "raw"] = "raw"
    reshuffle: PositiveInt | None = 2


class IntervMerge(Training):
    """Interventions on the first token of every attention's output.

    rank: 1 in the authors' scripts, 4 in their code.
    """

    name: ClassVar[str] = "interv_merge"
    section = name
    reshuffle: PositiveInt | None = 2
    rank: PositiveInt = 1
