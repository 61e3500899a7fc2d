"""Settings of the library: a mistake is one message that names the field and what it may be."""

import math

import pytest

from featcal.errors import BadSetting, UnknownKey
from featcal.merging.registry import settings_of
from featcal.settings import Calibration


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ridge": 0}, "calibrate.ridge: 0 cannot be used; it must be greater than 0"),
        ({"ridge": "1e-5"}, "YAML wants a dot: 1.0e-5, not 1e-5"),
        *[({"ridge": wrong}, "calibrate.ridge") for wrong in (True, None, math.nan, math.inf)],
        *[({"interpolation": x}, s) for x, s in {1.5: "equal to 1.", "x": "valid number."}.items()],
        ({"bias": 1}, "calibrate.bias"),
        ({"order": "backward"}, "'forward', 'stale' or 'sites'"),
        ({"residual": [0.1, 0.2, 0.3]}, "calibrate.residual"),
        *[({"modules": wrong}, "calibrate.modules") for wrong in ("q", [], ["q", "q"], [""], [1])],
        ({"affine": "joint", "bias": False}, "calibrate.affine"),
        ({"ridge": "auto", "task_weights": "uniform"}, "calibrate.task_weights"),
    ],
)
def test_a_value_that_cannot_be_is_named(given, said):
    for make in (lambda: Calibration(**given), lambda: Calibration().but(**given)):
        with pytest.raises(BadSetting) as refused:
            make()
        assert said in str(refused.value)


def test_an_unknown_name_gives_the_nearest_one():
    for make in (Calibration, Calibration().but):
        with pytest.raises(UnknownKey, match="calibrate: 'rigde' .* did you mean 'ridge'"):
            make(rigde=1)
    with pytest.raises(UnknownKey, match="did you mean 'density'"):
        settings_of("ties", {"densty": 0.2}, "merge")


def test_lists_and_whole_numbers_are_taken():
    assert Calibration(ridge=1, modules=["q"]) == Calibration(ridge=1.0, modules=("q",))
