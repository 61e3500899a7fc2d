"""ρ on a part of the weights, against calibrations of the library and the parts' own equations."""

from contextlib import ExitStack

import pytest
import tiny
import torch

import featcal
from featcal.calibration.block import Student
from featcal.calibration.features import open_models
from featcal.calibration.scratch import Spool
from featcal.settings import Calibration
from reproduction.studies.extrapolation import calibrate_by_spectrum

RHO = 4.0
SETTINGS = Calibration(ridge=0.05, anchor_blend=RHO, interpolation=0.3)
VARIANTS = ("nowhere", "below", "above", "weights", "everything")


@pytest.fixture(scope="module")
def solved(tmp_path_factory):
    """Every variant's model, the experiment, and the shares below λ."""
    given = tiny.experiment()
    with ExitStack() as opened:
        parts = given["merged"], given["base"], given["experts"], None, SETTINGS
        models = open_models(*parts, whole=True, device=None, dtype=None)
        opened.enter_context(models.evaluated())
        opened.enter_context(torch.no_grad())
        spool = opened.enter_context(Spool(0, 2**30, tmp_path_factory.mktemp("spool")))
        students = [Student(models.student_copy(), SETTINGS) for _ in VARIANTS]
        shares = calibrate_by_spectrum(models, students, VARIANTS, given["batches"], spool)
    found = {name: one.handle.module for name, one in zip(VARIANTS, students, strict=True)}
    return found, given, shares


@pytest.mark.parametrize(("variant", "rho"), [("nowhere", 1.0), ("everything", RHO)])
def test_rho_nowhere_and_everywhere_are_the_library_s_calibrations(solved, variant, rho):
    found, given, _ = solved
    expected = featcal.calibrate(**given, settings=SETTINGS.but(anchor_blend=rho)).model
    assert tiny.difference(found[variant], expected) < 1e-9


def first_weights(model):
    """Weights of the first block's linears, whose inputs no variant has changed yet."""
    block = model.encoder.layers[0]
    return {
        n: m.weight.detach() for n, m in block.named_modules() if isinstance(m, torch.nn.Linear)
    }


def test_steps_below_and_above_add_up_to_the_step_of_all_weights_and_share_no_direction(solved):
    found, _, shares = solved
    weights = {name: first_weights(model) for name, model in found.items()}
    assert all(0 < share < 1 for share in shares["0.05"].values())
    moved = 0.0
    for linear, W in weights["nowhere"].items():
        below, above, both = (
            weights[name][linear] - W for name in ("below", "above", "weights")
        )  # (o, d)
        torch.testing.assert_close(below + above, both, rtol=0, atol=1e-9)
        assert float((below @ above.T).norm()) < 1e-9 * float(both.norm()) ** 2 + 1e-12
        moved = max(moved, float(below.norm()), float(above.norm()))
    assert moved > 1e-3
