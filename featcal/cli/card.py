"""The model card of `featcal calibrate`: as the library writes it, with what only the command line
knows: the samples.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from featcal.cli.recipe import Named
from featcal.cli.terminal import note
from featcal.storage.model_card import inherited, write_card

if TYPE_CHECKING:
    from featcal.calibration.record import Result
    from featcal.data.places import Place
    from featcal.settings import Calibration


def tell_card(
    out: Path,
    merged: Path,
    named: Named,
    settings: "Calibration",
    result: "Result",
    places: Mapping[str, "Place"],
    how: Mapping[str, object],
) -> None:
    """Replace the card of a written folder by one with the samples; says so where the licences of
    the inputs differ.
    """
    from featcal.calibration.card import Drawn, calibration_card

    hub = [str(place.source) for place in places.values() if place.on_hub]
    drawn = Drawn({task: place_name(place) for task, place in places.items()}, how, hub)
    write_card(
        out,
        calibration_card(
            merged, named.base, named.experts, settings, result.blocks, drawn, result.drift
        ),
    )
    if inherited({"base": named.base, "merged": merged, **named.experts}).differs:
        note(
            f"{out / 'README.md'}: the inputs have different licences; which terms hold for the result is yours to settle"
        )


def place_name(place: "Place") -> str:
    """How a card calls where samples came from: what the hub calls it, or the last part of a
    path.
    """
    if not place.on_hub:
        return Path(place.source).resolve().name
    return f"{place.source}@{place.revision}" + (f":{place.config}" if place.config else "")
