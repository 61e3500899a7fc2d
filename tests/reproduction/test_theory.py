"""The paper's propositions on pico models: equations close, bounds hold, wrong formulas fail."""

from dataclasses import replace

import families
import pytest
import torch
from tiny import averaged, clip, images, make, seeded, shifted

import featcal
from featcal.settings import Calibration
from reproduction.theory import drift, sources
from reproduction.theory.tower import Checks, tower

BATCH = images(7, count=4, batch=4)[0]


def draw(seed, *shape):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def pair(base, batch):
    """A merged model and one of its experts on the same samples."""
    experts = [shifted(base, 10 + i, 0.05) for i in range(2)]
    return tower(averaged(experts), batch), tower(experts[0], batch)


@pytest.fixture(scope="module")
def towers():
    return pair(clip(), BATCH)


def value(checks, statement, quantity, **columns):
    columns |= {"statement": statement, "quantity": quantity}
    lines = (line for line in checks.lines if all(line[k] == v for k, v in columns.items()))
    return next(lines)["value"]


def test_drift_is_mismatch_plus_what_is_passed_on(towers):
    for block in drift.decomposed(*towers):
        assert float(drift.residual(block).max()) < 1e-13
        assert torch.allclose(block.propagated, block.before + block.branch, rtol=0, atol=1e-12)


def test_a_mismatch_taken_at_the_merged_models_features_is_seen(towers):
    merged, expert = towers
    block = drift.decomposed(merged, expert)[1]
    with torch.no_grad():
        h = merged.features[1]
        wrong = merged.maps[1](h) - expert.maps[1](h)
    assert float(drift.residual(replace(block, mismatch=wrong)).min()) > 1e-3


def test_the_unrolled_sum_of_mismatches_converges_to_the_final_drift(towers):
    checks = Checks()
    drift.check_propagation([towers], (1, 2, 8), checks)
    errors = [value(checks, "proposition_2", "unrolled_digits", nodes=n) for n in (1, 2, 8)]
    assert errors[0] < errors[1] < errors[2] and errors[2] > 6
    shares = [line["value"] for line in checks.lines if line["quantity"] == "share_of_final"]
    assert len(shares) == 3 and sum(shares) == pytest.approx(100)


def head(classes=5):
    checks = draw(3, classes, 16)
    return drift.ScoreHead(draw(4, 16, 32), checks / checks.norm(dim=1, keepdim=True), 20.0)


def test_scores_losses_and_answers_stay_within_their_bounds(towers):
    checks, moved = Checks(), drift.score_drift(*towers, head())
    drift.check_scores(moved, checks)
    drift.check_loss(moved, torch.tensor([0, 1, 2, 3]), (2, 4), checks)
    drift.check_margins(moved, checks)
    room = {line["statement"]: line["value"] for line in checks.lines if line["quantity"] == "room"}
    assert {"proposition_3", "proposition_6", "proposition_7", "corollary_2"} <= set(room)
    assert min(room.values()) >= 0
    assert value(checks, "proposition_7", "digits") > 6
    assert value(checks, "margin", "lost_though_guaranteed") == 0


def test_a_bound_that_is_too_small_shows_negative_room():
    checks = Checks()
    checks.bounded("x", torch.tensor([2.0, 0.9]), torch.tensor([1.0, 1.0]))
    assert value(checks, "x", "room") == pytest.approx(-10, rel=1e-5)


def test_the_constant_of_cosines_is_taken_where_the_segment_is_nearest_to_the_origin():
    h = drift.ScoreHead(torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64), 1.0)
    start, end = torch.tensor([[[1.0, -1.0]], [[1.0, 1.0]]], dtype=torch.float64)
    far, still, nearest = (float(drift.cosine_constant(h, start, x)) for x in (2 * end, start, end))
    assert far > still and nearest == pytest.approx(1.0)  # the nearest point is (1, 0)


def linear_and_sources():
    tasks = ("mnist", "dtd")
    weights = {t: draw(i, 3, 4) for i, t in enumerate(tasks)}
    x = {t: draw(5 + i, 9, 4) for i, t in enumerate(tasks)}
    linear = sources.Linear(weights, x, draw(9, 3, 4))
    moved = {t: draw(20 + i, 9, 4) for i, t in enumerate(tasks)}
    inputs = [{t: x[t] + s * moved[t] for t in tasks} for s in (0.1, 0.4)]
    return linear, *(linear.source(u, 0.6) for u in inputs)


SETTINGS = Calibration(ridge=0.05, anchor_blend=2.0, interpolation=0.6)


def test_the_minimum_of_the_objective_has_no_slope():
    linear, src, _ = linear_and_sources()
    W = sources.minimum(src, linear, SETTINGS).requires_grad_()
    total = sum(((u @ W.T - src.y[t]) ** 2).sum(1).mean() for t, u in src.u.items())
    (total + SETTINGS.ridge * ((W - linear.anchor) ** 2).sum()).backward()
    assert float(W.grad.abs().max()) < 1e-12


def test_solving_on_another_source_costs_no_more_than_both_parts_of_proposition_8():
    linear, src, dep = linear_and_sources()
    sides = sources.mismatch(src, dep, linear, SETTINGS)
    worse = sources.objective(sources.minimum(src, linear, SETTINGS), dep, linear, SETTINGS.ridge)
    assert sides.gap == pytest.approx(worse - sides.best)
    assert 0 < sides.gap <= sides.largest <= sides.transport
    same = sources.mismatch(src, src, linear, SETTINGS)
    assert same.gap == same.largest == same.transport == 0


def test_in_forward_order_the_first_block_sees_what_it_was_solved_on_and_later_ones_almost_do():
    base = clip()
    experts = {t: shifted(base, 30 + i, 0.05) for i, t in enumerate(("mnist", "dtd"))}
    merged = averaged(list(experts.values()))
    batches = {t: images(50 + i) for i, t in enumerate(experts)}
    orders, arguments = {}, {"base": base, "experts": experts, "batches": batches}
    for order in ("forward", "stale"):
        settings = SETTINGS.but(order=order)
        orders[order] = featcal.calibrate(merged, **arguments, settings=settings).model
    checks, models = Checks(), sources.SourceModels(base, merged, experts, **orders)
    pixels = {t: torch.cat([b["pixel_values"] for b in bs]) for t, bs in batches.items()}
    joint = {task: {"pixel_values": rows} for task, rows in pixels.items()}
    sources.check_sources(models, joint, SETTINGS, checks)
    assert value(checks, "equation_45", "digits") == 16
    for statement in ("proposition_8", "proposition_8_transport"):
        assert value(checks, statement, "room") >= 0
    moved = [value(checks, "proposition_8", f"{order}_moved", block="01") for order in orders]
    assert 0 < moved[0] < moved[1]


def test_equations_hold_on_padded_texts_whose_blocks_end_in_a_norm():
    base = make(families.FAMILIES["bert"].build)
    ids = torch.randint(1, base.config.vocab_size, (4, 7), generator=seeded(3))
    mask = (torch.arange(7) < torch.tensor([[7], [4], [5], [2]])).long()
    batch, checks = {"input_ids": ids * mask, "attention_mask": mask}, Checks()
    merged, expert = pair(base, batch)
    drifts = drift.decomposed(merged, expert)
    drift.check_residual(drifts, checks)
    assert not checks.lines, "a block that ends in a norm does not add its branches"
    assert all(float(drift.residual(block).max()) < 1e-13 for block in drifts)
    drift.check_propagation([(merged, expert)], (2, 8), checks)
    assert value(checks, "proposition_2", "digits") > 9
    by_hand = torch.stack([merged.features[-1][i, : mask[i].sum()].mean(0) for i in range(4)])
    assert torch.allclose(merged.pooled, by_hand, atol=1e-14)
