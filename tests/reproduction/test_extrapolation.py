"""ρ on a part of the weights, against calibrations of the library and the parts' own equations."""

from pathlib import Path

import pytest
import tiny
import torch

import featcal
from featcal.calibration.block import Student
from featcal.settings import Calibration
from reproduction.engine.context import load_setup
from reproduction.field.walk import opened
from reproduction.stages.prepare import recipes_of
from reproduction.studies.extrapolation import calibrate_by_spectrum

RHO = 4.0
SETTINGS = Calibration(ridge=0.05, anchor_blend=RHO, interpolation=0.3)
VARIANTS = ("nowhere", "below", "above", "weights", "everything")


@pytest.fixture(scope="module")
def solved():
    """Every variant's model, the experiment, and the shares below λ."""
    case = tiny.experiment()
    models = (case["merged"], case["base"], case["experts"])
    with opened(*models, SETTINGS, None) as (loaded, spool), torch.no_grad():
        students = [Student(loaded.student_copy(), SETTINGS) for _ in VARIANTS]
        shares = calibrate_by_spectrum(loaded, students, VARIANTS, case["batches"], spool)
    by_variant = {name: s.handle.module for name, s in zip(VARIANTS, students, strict=True)}
    return by_variant, case, shares


@pytest.mark.parametrize(("variant", "rho"), [("nowhere", 1.0), ("everything", RHO)])
def test_rho_nowhere_and_everywhere_are_the_library_s_calibrations(solved, variant, rho):
    models, case, _ = solved
    expected = featcal.calibrate(**case, settings=SETTINGS.but(anchor_blend=rho)).model
    assert tiny.difference(models[variant], expected) < 1e-9


def first_weights(model):
    """Weights of the first block's linears, whose inputs no variant has changed yet."""
    modules = model.encoder.layers[0].named_modules()
    return {n: m.weight.detach() for n, m in modules if isinstance(m, torch.nn.Linear)}


def test_steps_below_and_above_add_up_to_the_step_of_all_weights_and_share_no_direction(solved):
    models, _, shares = solved
    weights = {name: first_weights(model) for name, model in models.items()}
    assert all(0 < share < 1 for share in shares["0.05"].values())
    moved = 0.0
    for linear, W in weights["nowhere"].items():
        # all (o, d)
        below, above, total = (weights[n][linear] - W for n in ("below", "above", "weights"))
        torch.testing.assert_close(below + above, total, rtol=0, atol=1e-9)
        assert float((below @ above.T).norm()) < 1e-9 * float(total.norm()) ** 2 + 1e-12
        moved = max(moved, float(below.norm()), float(above.norm()))
    assert moved > 1e-3


def test_the_second_encoder_is_trained_as_said_and_has_cells_and_anchors_alone():
    setup = load_setup("mpnet-8")
    study = setup.context.experiments.studies["extrapolation"]["mpnet-8"]
    choices = [model.columns["choice"] for model in study.first(Path())]
    assert set(choices) == {"cell", "anchor"} and choices.count("anchor") == len(study.blends)
    assert {recipe.steps for recipe in recipes_of(setup, setup.tasks).values()} == {80}
