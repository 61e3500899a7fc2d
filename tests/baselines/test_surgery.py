"""Representation Surgery: the published loop as oracle, worked steps, and what it refuses."""

from itertools import islice

import pytest
import torch
from adapter_features import difference, pair, pairs, projected_pairs
from tiny import experiment, same_bits, shifted
from torch.nn import functional

import featcal
from featcal.baselines.adapters import Adapters, Pair, unit
from featcal.baselines.surgery import Surgery
from featcal.baselines.training import batch_order, first_weights
from featcal.core.draws import generator
from featcal.errors import BadSetting, Diverged

SETTINGS = Surgery(rank=3, batch=8, steps=60, features="raw")


def published(features, settings, task, seed=42):
    """Train one task with torch's own layers, loss and optimiser, and our draws."""
    width = features.merged.shape[1]
    down = torch.nn.Linear(width, settings.rank, bias=False)
    up = torch.nn.Linear(settings.rank, width, bias=False)
    draws = generator(task, "initialisation", seed)
    torch.nn.init.kaiming_uniform_(down.weight, a=5**0.5, generator=draws)
    torch.nn.init.zeros_(up.weight)
    down, up = down.double(), up.double()
    optimiser = torch.optim.Adam([*down.parameters(), *up.parameters()], lr=settings.lr)
    for samples in islice(batch_order(task, len(features.merged), settings, seed), settings.steps):
        merged, expert = features.merged[samples], features.expert[samples]
        if settings.features == "unit":
            merged, expert = (functional.normalize(rows, dim=-1) for rows in (merged, expert))
        loss = functional.l1_loss(merged - up(torch.relu(down(merged))), expert)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {"down": down.weight.detach(), "up": up.weight.detach()}


@pytest.mark.parametrize("kind", ["raw", "unit"])
def test_adapters_equal_the_published_loop_of_each_task(kind):
    settings, features = SETTINGS.but(features=kind), pairs()
    adapters = settings.fit(features)
    for task, own in features.items():
        for name, want in published(own, settings, task).items():
            torch.testing.assert_close(adapters.weights[task][name], want, rtol=0, atol=1e-12)


def test_one_step_by_hand():
    # f = (1, 2), D = I, U = 0: h = f, f' = f, sign(f' − e) = (1, −1), so dL/dU = ½ (−1, 1)ᵀ h and
    # Adam's first step is −lr · sign
    merged, expert = torch.tensor([[1.0, 2.0]]).double(), torch.tensor([[0.0, 4.0]]).double()
    down, up = torch.eye(2).double(), torch.zeros(1, 2, 2).double().requires_grad_()
    settings = Surgery(rank=2, steps=1, lr=0.1, features="raw")
    loss = settings.row_losses({"down": down[None], "up": up}, merged[None], expert[None], None)
    loss.sum().backward()
    assert loss.tolist() == [[1.5]]
    assert up.grad[0].tolist() == [[-0.5, -1.0], [0.5, 1.0]]
    adapters = Adapters(settings, 42, {"a": {"down": down, "up": -0.1 * up.grad[0].sign()}})
    want = torch.tensor([[0.7, 2.3]]).double()
    torch.testing.assert_close(adapters.apply("a", merged), want)


@pytest.mark.parametrize("kind", ["raw", "unit"])
def test_initial_weights_change_nothing(kind):
    settings, features = SETTINGS.but(features=kind), pairs()
    stacks = first_weights(settings, features, 42)
    for i, (task, own) in enumerate(features.items()):
        weights = {name: stack[i].detach() for name, stack in stacks.items()}
        corrected = Adapters(settings, 42, {task: weights}).apply(task, own.merged)
        assert torch.equal(corrected, unit(own.merged) if kind == "unit" else own.merged)


def test_an_expert_equal_to_the_merged_model_needs_no_correction():
    merged = pair(0, 20).merged
    adapters = SETTINGS.fit({"mnist": Pair(merged, merged, torch.ones(20))})
    assert set(adapters.losses["mnist"]) == {0.0}
    assert torch.equal(adapters.apply("mnist", merged), merged)


def test_a_seed_gives_the_same_adapters_and_leaves_other_draws_alone():
    features = pairs()
    first = SETTINGS.fit(features)
    torch.rand(7)
    state = torch.get_rng_state()
    assert difference(first, SETTINGS.fit(features)) == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert difference(first, SETTINGS.fit(features, seed=43)) > 1e-3


@pytest.mark.parametrize("encode", ["once", "each_step"])
def test_public_function_equals_training_on_projected_features(encode):
    given = experiment(count=10)
    head = torch.randn(24, 32, generator=generator("head", "test", 0)).double()
    call = (given["merged"], given["experts"], given["batches"])
    adapters = featcal.surgery(*call, head=head, rank=3, steps=30, batch=4, encode=encode)
    want = Surgery(rank=3, steps=30, batch=4).fit(projected_pairs(given, head))
    assert difference(adapters, want) < 1e-9


def test_models_are_not_changed():
    given = experiment()
    given["merged"].train()
    before = shifted(given["merged"], 0, 0.0)
    featcal.surgery(given["merged"], given["experts"], given["batches"], rank=2, steps=3)
    assert given["merged"].training and same_bits(before, given["merged"])
    assert all(p.grad is None for p in given["merged"].parameters())


def test_weights_broken_by_the_last_step_are_noticed():
    settings = Surgery(rank=2, steps=1, lr=1e39, features="raw")
    with pytest.raises(Diverged, match="step 0"):
        settings.fit({"a": pair(0, 9, dtype=torch.float32)})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rank", 0),
        ("rank", 33),
        ("steps", 2.5),
        ("batch", True),
        ("lr", 0.0),
        ("features", "L2"),
        ("reshuffle", 0),
        ("encode", 1),
        ("seed", -1),
    ],
)
def test_impossible_settings_are_refused_by_name(key, value):
    given = experiment()
    with pytest.raises(BadSetting, match=f"surgery.{key}"):
        featcal.surgery(given["merged"], given["experts"], given["batches"], **{key: value})


def test_a_head_of_another_width_is_refused():
    given = experiment()
    with pytest.raises(BadSetting, match=r"head: \(8, 31\) .* must have shape \(p, 32\)"):
        call = (given["merged"], given["experts"], given["batches"])
        featcal.surgery(*call, head=torch.zeros(8, 31))
