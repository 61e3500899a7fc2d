"""The whole method on pico models, against the plain numpy version and against what must hold
exactly.
"""

import copy
from dataclasses import replace

import numpy as np
import plain
import pytest
import torch
from tiny import PAPER, TASKS, clip, difference, experiment, images, same_bits, shifted

from featcal import BlockPlan, Stack, calibrate
from featcal.core.moments import every_token
from featcal.models.families import plan_for
from reproduction.engine.drift import features_by_stack, model_drift

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def plain_result(given, settings):
    hidden = {}
    for task, batches in given["batches"].items():
        models = given["merged"], given["experts"][task]
        pair = [
            torch.cat([features_by_stack(m, b, plan_for(m))["embeddings"][1] for b in batches])
            .detach()
            .numpy()
            for m in models
        ]
        hidden[task] = pair
    return plain.calibrate(given["merged"], given["base"], given["experts"], hidden, settings)


VARIANTS = {
    "paper": PAPER,
    "small ridge": PAPER.but(ridge=1e-3, anchor_blend=0.5, interpolation=0.9),
    "stale": PAPER.but(order="stale"),
    "uniform": PAPER.but(task_weights="uniform"),
    "no bias": PAPER.but(bias=False),
    "no norm": PAPER.but(norm=False),
    "residual": PAPER.but(residual=(0.5, 1.0)),
    "sites": PAPER.but(order="sites"),
    "joint": PAPER.but(affine="joint"),
    "prior": PAPER.but(prior=0.2),
    "all of them": PAPER.but(
        residual=0.7, order="sites", affine="joint", prior=0.2, ridge=1e-3, interpolation=0.9
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_calibrated_model_equals_the_plain_version(variant):
    given, settings = experiment(), VARIANTS[variant]
    expected = plain_result(given, settings)
    for name, p in calibrate(**given, settings=settings).model.named_parameters():
        np.testing.assert_allclose(p.detach().numpy(), expected[name], err_msg=name, **CLOSE)


def test_one_expert_and_vanishing_ridge_return_the_expert():
    base = clip()
    expert, merged = shifted(base, 1), shifted(base, 2)
    batches = {"mnist": images(1, count=400, batch=100)}
    settings = PAPER.but(ridge=1e-14, interpolation=0.0, anchor_blend=1.0)
    given = {"base": base, "experts": {"mnist": expert}, "batches": batches}
    result = calibrate(merged, **given, settings=settings, token_weights=every_token)
    assert difference(merged.encoder, expert.encoder) > 0.1
    assert difference(result.model.encoder, expert.encoder) < 1e-9


def test_order_of_tasks_changes_no_bit():
    given = experiment(torch.float32)
    turned = given | {part: dict(reversed(given[part].items())) for part in ("experts", "batches")}
    first, second = calibrate(**given, settings=PAPER), calibrate(**turned, settings=PAPER)
    assert same_bits(first.model, second.model) and first.blocks == second.blocks


def test_batches_from_generators_give_the_same_model():
    given = experiment()
    streams = {task: (batch for batch in batches) for task, batches in given["batches"].items()}
    assert same_bits(
        calibrate(**given, settings=PAPER).model,
        calibrate(**given | {"batches": streams}, settings=PAPER).model,
    )


def test_given_models_are_not_modified():
    given = experiment()
    models = [given["merged"], given["base"], *given["experts"].values()]
    for model in models:
        model.train()
    before = copy.deepcopy(models)
    result = calibrate(**given, settings=PAPER)
    assert all(same_bits(a, b) for a, b in zip(models, before, strict=True))
    assert all(module.training for model in models for module in model.modules())
    assert not result.model.training and result.folder is None


def test_weights_outside_the_blocks_stay_merged():
    given = experiment()
    model, merged = calibrate(**given, settings=PAPER).model, given["merged"]
    for part in ("embeddings", "pre_layrnorm", "post_layernorm"):
        assert same_bits(model.get_submodule(part), merged.get_submodule(part))


def test_calibration_reduces_drift_on_unseen_samples():
    base = clip()
    trained = copy.deepcopy(base)
    trained.encoder = shifted(
        base.encoder, 1
    )  # what all experts learnt alike and the model to calibrate lacks
    experts = {task: copy.deepcopy(trained) for task in TASKS}
    for i, expert in enumerate(experts.values()):
        expert.encoder = shifted(trained.encoder, 10 + i, 0.02)
    batches = {task: images(100 + i, 60, 20) for i, task in enumerate(TASKS)}
    model = calibrate(base, base=base, experts=experts, batches=batches, settings=PAPER).model
    for task in TASKS:
        before, after = (
            model_drift(m, experts[task], images(500, 30, 10))[-1] for m in (base, model)
        )
        assert after["relative_drift"] < 0.8 * before["relative_drift"]
        assert after["l2"] < 0.8 * before["l2"] and after["cosine"] > before["cosine"]


def test_records_hold_the_drift_after_each_block():
    given, lines = experiment(), []
    result = calibrate(**given, settings=PAPER, progress=lines.append)
    assert [record.name for record in result.blocks] == ["vision.00", "vision.01"]
    assert all(record.tokens == 3 * 6 * 5 and record.conditioning >= 1 for record in result.blocks)
    after = [model_drift(result.model, given["experts"][t], given["batches"][t]) for t in TASKS]
    for index, record in enumerate(result.blocks):
        expected = np.mean([a[1 + index]["relative_drift"] for a in after])
        assert record.relative_drift == pytest.approx(expected, rel=1e-5)
    assert len(lines) == 2 and lines[0].startswith("vision.00  3 tasks  drift")


def test_block_drift_can_be_switched_off(tmp_path):
    given, lines = experiment(), []
    measured = calibrate(**given, settings=PAPER, held_out={})
    without = calibrate(
        **given, settings=PAPER, held_out={}, block_drift=False, progress=lines.append
    )
    assert same_bits(measured.model, without.model) and measured.drift == without.drift
    assert [(block.relative_drift, block.cosine) for block in without.blocks] == [(None, None)] * 2
    assert len(lines) == 2 and not any("drift" in line for line in lines)
    folder = calibrate(
        **given, settings=PAPER, out=tmp_path / "calibrated", block_drift=False
    ).folder
    assert "## Drift from the experts" not in (folder / "README.md").read_text()


def test_held_out_drift_equals_that_of_both_models():
    given = experiment()
    held = {task: images(900 + i, 4, 2) for i, task in enumerate(TASKS[:2])}
    result = calibrate(**given, settings=PAPER, held_out=held)
    assert [record.expert for record in result.drift] == sorted(TASKS) and not calibrate(
        **given, settings=PAPER
    ).drift
    for record in result.drift:
        own = held.get(record.expert, given["batches"][record.expert])
        assert (record.held_out, record.samples) == (
            record.expert in held,
            sum(len(b["pixel_values"]) for b in own),
        )
        for model, measured in (
            (given["merged"], record.merged),
            (result.model, record.calibrated),
        ):
            (*_, last) = model_drift(model, given["experts"][record.expert], own)
            assert measured == pytest.approx(last["relative_drift"], rel=1e-5)


def test_model_drift_equals_numpy():
    given = experiment()
    model, expert, batches = given["merged"], given["experts"]["dtd"], given["batches"]["dtd"]
    records = model_drift(model, expert, batches)
    assert [r["block"] for r in records] == ["embeddings", "00", "01"]
    with torch.no_grad():
        h, h_exp = (
            torch.cat([m(**b).last_hidden_state for b in batches]).numpy() for m in (model, expert)
        )
    cls, cls_exp = h[:, 0], h_exp[:, 0]
    cosine = (cls * cls_exp).sum(1) / np.linalg.norm(cls, axis=1) / np.linalg.norm(cls_exp, axis=1)
    assert records[-1]["relative_drift"] == pytest.approx(
        np.linalg.norm(h - h_exp) / np.linalg.norm(h_exp), rel=1e-12
    )
    assert records[-1]["l2"] == pytest.approx(
        np.linalg.norm(cls - cls_exp, axis=1).mean(), rel=1e-12
    )
    assert records[-1]["cosine"] == pytest.approx(cosine.mean(), rel=1e-12)
    assert records[-1]["count"] == 6


def test_plan_and_token_weights_can_be_given():
    given = experiment()
    plan = BlockPlan(Stack("tower", "encoder.layers"))
    by_plan = calibrate(**given, settings=PAPER, plan=plan)
    by_rule = calibrate(**given, settings=PAPER, token_weights=every_token)
    assert by_plan.blocks[0].name == "tower.00"
    assert same_bits(by_plan.model, by_rule.model)
    assert difference(by_rule.model, calibrate(**given, settings=PAPER).model) > 1e-4
