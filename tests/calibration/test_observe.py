"""Linears that share their input share one Gram matrix, and nothing changes by that."""

from contextlib import contextmanager

import families
import pytest
import torch
from families import FAMILIES
from tiny import PAPER, clip, difference, experiment, same_bits

import featcal.calibration.observe as observe
from featcal import calibrate
from featcal.calibration.observe import shared_sites
from featcal.core.moments import class_token_last, every_token
from featcal.models.blocks import module_inputs
from featcal.models.modules import solved_modules

Q, K, V = (f"self_attn.{n}_proj" for n in "qkv")


def sites_of_clip(rule, last):
    block = clip().encoder.layers[0]
    linears, _ = solved_modules(block)
    with torch.no_grad(), module_inputs(block, linears) as inputs:
        block(torch.randn(2, 5, 32, dtype=torch.float64), attention_mask=None)
    return set(shared_sites(inputs, linears, lambda name, x: rule(name, last, x.shape[:2])))


def one_site_each(inputs, linears, weigh):
    return {(name,): weigh(name, inputs[name]) for name in linears}


def test_six_linears_of_clip_read_at_four_sites_and_token_weights_split_queries_off():
    sites = [set(site) for site in sites_of_clip(every_token, last=True)]
    assert len(sites) == 4 and {Q, K, V} in sites
    sites = [set(site) for site in sites_of_clip(class_token_last, last=True)]
    assert len(sites) == 5 and {Q} in sites and {K, V} in sites


def test_equal_values_in_different_memory_are_no_shared_site():
    x = torch.ones(1, 2, 3)
    inputs = {"a": x, "b": x.clone(), "c": x}
    sites = shared_sites(inputs, tuple(inputs), lambda name, x: torch.ones(1, 2))
    assert set(sites) == {("a", "c"), ("b",)}


def test_shared_sites_give_the_weights_of_one_gram_per_linear(monkeypatch):
    shared = calibrate(**experiment(), settings=PAPER).model
    monkeypatch.setattr(observe, "shared_sites", one_site_each)
    assert difference(shared, calibrate(**experiment(), settings=PAPER).model) < 1e-12


@pytest.mark.parametrize("more", [{}, {"residual": 1.0}, {"ridge": "auto"}, {"affine": "joint"}])
def test_products_with_each_token_in_place_of_the_sums_change_nothing(more, monkeypatch):
    given, results = experiment(), []
    for few in (0, 1000):
        monkeypatch.setattr(observe, "FEW_TOKENS", few)
        results.append(calibrate(**given, settings=PAPER.but(**more)).model)
    assert 0 < difference(*results) < 1e-11


@pytest.mark.parametrize(
    "more",
    [{}, {"order": "sites"}, {"order": "sites", "residual": 1.0}, {"residual": 1.0}],
    ids=str,
)
def test_passes_that_end_where_all_is_seen_give_the_bits_of_whole_passes(more, monkeypatch):
    given, own, asked = experiment(torch.float32, batch=2), observe.capture, []
    given["settings"] = PAPER.but(**more)
    left = calibrate(**given)

    def whole_passes(*arguments):
        asked.append(arguments[-1])
        return own(*arguments[:-1], True)

    monkeypatch.setattr(observe, "capture", whole_passes)
    result = calibrate(**given)
    assert not all(asked)
    assert same_bits(left.model, result.model) and left.blocks == result.blocks


@contextmanager
def nothing(block, names, enough):
    yield {}


@pytest.mark.parametrize("name", ["clip_text", "llama", "gpt2"])
def test_experts_own_outputs_give_the_result_of_outputs_computed_anew(name, monkeypatch):
    """With a bias, without one, and with GPT-2's transposed weights."""
    monkeypatch.setattr(observe, "FEW_TOKENS", 0)
    monkeypatch.setattr(observe, "FOLDED_SHARE", 10.0)
    given = families.experiment(FAMILIES[name])
    kept = calibrate(**given, settings=PAPER).model
    monkeypatch.setattr(observe, "module_outputs", nothing)
    anew = calibrate(**given, settings=PAPER).model
    monkeypatch.setattr(observe, "FOLDED_SHARE", 0.0)
    unfolded = calibrate(**given, settings=PAPER).model
    assert difference(kept, anew) < 1e-12 and difference(kept, unfolded) < 1e-12
    assert not same_bits(kept, unfolded)
