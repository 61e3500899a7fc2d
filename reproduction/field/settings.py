"""Settings of the methods that only the study `field` runs."""

from typing import ClassVar, Literal

from pydantic import PositiveInt

from featcal.baselines.corrections import Surgery
from featcal.baselines.training import Training

# SVC's smallest coefficient: FusionBench's config/method/singular_value_calibration, by merger
SVC_AFTER = {"tsv_merge": 1.0, "wudi": 1.0, "wudi_closed_form": 1.0, "iso_cts": 0.2}
SVC_LEAST = 0.1  # after the others
WITHOUT_SVC = ("regmean", "regmean_plus_plus", "mats", "lot")  # no source applies it after these


class SurgeryV2(Surgery):
    """Surgery after every block and of the last feature; the authors' rank: 16 of B, 4 of L."""

    name: ClassVar[str] = "surgery_v2"
    section = name
    features: Literal["unit", "raw"] = "raw"
    reshuffle: PositiveInt | None = 2


class IntervMerge(Training):
    """Interventions on the first token of every attention's output.

    rank:   1 in the authors' scripts, 4 in their code.
    repeat: steps of Adam per gradient; their script lists each parameter three times.
    """

    name: ClassVar[str] = "interv_merge"
    section = name
    reshuffle: PositiveInt | None = 2
    rank: PositiveInt = 1
    repeat: PositiveInt = 3
