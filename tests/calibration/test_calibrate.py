"""The whole method on pico models, against the plain numpy version and exact properties."""

import copy

import numpy as np
import plain
import pytest
import torch
from tiny import PAPER, TASKS, clip, difference, experiment, images, same_bits, shifted

from featcal import BlockPlan, Stack, calibrate
from featcal.core.moments import every_token
from reproduction.stages.measure import model_drift

VARIANTS = {
    "paper": PAPER,
    "small ridge": PAPER.but(ridge=1e-3, anchor_blend=0.5, interpolation=0.9),
    "stale": PAPER.but(order="stale"),
    "uniform": PAPER.but(task_weights="uniform"),
    "no bias": PAPER.but(bias=False),
    "no norm": PAPER.but(norm=False),
    "residual": PAPER.but(residual=0.5),
    "sites": PAPER.but(order="sites"),
    "joint": PAPER.but(affine="joint"),
    "all of them": PAPER.but(
        residual=0.7, order="sites", affine="joint", ridge=1e-3, interpolation=0.9
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_calibrated_model_equals_the_plain_version(variant):
    given, settings = experiment(), VARIANTS[variant]
    expected = plain.calibrate(**given, settings=settings, paths=["encoder.layers"])
    assert difference(calibrate(**given, settings=settings).model, expected) < 1e-9


def test_order_of_tasks_and_batches_from_generators_change_no_bit():
    given = experiment(torch.float32)
    turned = given | {part: dict(reversed(given[part].items())) for part in ("experts", "batches")}
    streams = {task: (batch for batch in batches) for task, batches in given["batches"].items()}
    first, *others = (
        calibrate(**one, settings=PAPER) for one in (given, turned, given | {"batches": streams})
    )
    for other in others:
        assert same_bits(first.model, other.model) and first.blocks == other.blocks


def test_given_models_and_weights_outside_the_blocks_are_not_modified():
    given = experiment()
    models = [given["merged"], given["base"], *given["experts"].values()]
    for model in models:
        model.train()
    before = copy.deepcopy(models)
    result = calibrate(**given, settings=PAPER)
    assert all(same_bits(a, b) for a, b in zip(models, before, strict=True))
    assert all(module.training for model in models for module in model.modules())
    assert not result.model.training and result.folder is None
    for part in ("embeddings", "pre_layrnorm", "post_layernorm"):
        assert same_bits(result.model.get_submodule(part), given["merged"].get_submodule(part))


def test_calibration_reduces_drift_on_unseen_samples():
    base = clip()
    trained = copy.deepcopy(base)
    # what all experts learnt alike and the model to calibrate lacks
    trained.encoder = shifted(base.encoder, 1)
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
    given |= {"settings": PAPER, "held_out": {}}
    measured = calibrate(**given)
    without = calibrate(**given, block_drift=False, progress=lines.append)
    assert same_bits(measured.model, without.model) and measured.drift == without.drift
    assert [(block.relative_drift, block.cosine) for block in without.blocks] == [(None, None)] * 2
    blocks, (last,) = lines[:2], lines[2:]
    assert not any("drift" in line for line in blocks) and last == "drift from each expert"
    folder = calibrate(**given, out=tmp_path / "calibrated", block_drift=False).folder
    assert "| block |" not in (folder / "README.md").read_text()


def test_held_out_drift_equals_that_of_both_models():
    given = experiment()
    held = {task: images(900 + i, 4, 2) for i, task in enumerate(TASKS[:2])}
    result = calibrate(**given, settings=PAPER, held_out=held)
    assert [record.expert for record in result.drift] == sorted(TASKS)
    assert not calibrate(**given, settings=PAPER).drift
    for record in result.drift:
        own = held.get(record.expert, given["batches"][record.expert])
        assert record.held_out == (record.expert in held)
        assert record.samples == sum(len(b["pixel_values"]) for b in own)
        pairs = (given["merged"], record.merged), (result.model, record.calibrated)
        for model, measured in pairs:
            (*_, last) = model_drift(model, given["experts"][record.expert], own)
            assert measured == pytest.approx(last["relative_drift"], rel=1e-5)


def test_model_drift_equals_numpy():
    given = experiment()
    models, batches = (given["merged"], given["experts"]["dtd"]), given["batches"]["dtd"]
    records = model_drift(*models, batches)
    assert [r["block"] for r in records] == ["embeddings", "00", "01"]
    with torch.no_grad():
        h, h_exp = (torch.cat([m(**b).last_hidden_state for b in batches]).numpy() for m in models)
    norm, cls, cls_exp = np.linalg.norm, h[:, 0], h_exp[:, 0]
    cosine = (cls * cls_exp).sum(1) / norm(cls, axis=1) / norm(cls_exp, axis=1)
    expected = {"relative_drift": norm(h - h_exp) / norm(h_exp), "cosine": cosine.mean()}
    expected |= {"l2": norm(cls - cls_exp, axis=1).mean(), "count": 6}
    for name, value in expected.items():
        assert records[-1][name] == pytest.approx(value, rel=1e-12)


def test_plan_and_token_weights_can_be_given():
    given = experiment()
    plan = BlockPlan(Stack("tower", "encoder.layers"))
    by_plan = calibrate(**given, settings=PAPER, plan=plan)
    by_rule = calibrate(**given, settings=PAPER, token_weights=every_token)
    assert by_plan.blocks[0].name == "tower.00"
    assert same_bits(by_plan.model, by_rule.model)
    assert difference(by_rule.model, calibrate(**given, settings=PAPER).model) > 1e-4
