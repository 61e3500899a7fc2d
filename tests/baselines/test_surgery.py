"""Representation Surgery: the published loop as oracle, tasks that do not touch each other, and
what it is trained on.
"""

from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
import torch
from adapter_features import difference, pair, pairs
from tiny import experiment, same_bits, shifted
from torch.nn import functional

import featcal
from featcal.baselines.adapters import Adapters, unit
from featcal.baselines.corrections import LowRank
from featcal.baselines.features import Pair, batch_order, kept_steps
from featcal.baselines.settings import Surgery
from featcal.baselines.training import first_weights, stacked, train
from featcal.core.draws import generator
from featcal.errors import BadSetting, Diverged, UnknownKey

SETTINGS = Surgery(rank=3, batch=8, steps=60, features="raw")


def trained(features, settings=SETTINGS, seed=42):
    return train(settings, islice(kept_steps(features, settings, seed), settings.steps), seed)


def at_the_start(features, settings=SETTINGS, seed=42):
    """Adapters that have made no step."""
    weights = first_weights(LowRank(settings), features, seed)
    own = {
        task: {name: stack[i].detach() for name, stack in weights.items()}
        for i, task in enumerate(features)
    }
    return Adapters(settings, seed, own)


def published(features, settings, task, seed=42):
    """One task by torch's own layers, loss and optimiser, with the same first weights and order of
    samples.
    """
    width = features.merged.shape[1]
    down = torch.nn.Linear(width, settings.rank, bias=False)
    up = torch.nn.Linear(settings.rank, width, bias=False)
    torch.nn.init.kaiming_uniform_(
        down.weight, a=5**0.5, generator=generator(task, "initialisation", seed)
    )
    torch.nn.init.zeros_(up.weight)
    down, up = down.double(), up.double()
    optimiser = torch.optim.Adam([*down.parameters(), *up.parameters()], lr=settings.lr)
    for samples in islice(batch_order(task, len(features.merged), settings, seed), settings.steps):
        merged, expert = features.merged[samples], features.expert[samples]
        if settings.features == "unit":
            merged, expert = (
                functional.normalize(merged, dim=-1),
                functional.normalize(expert, dim=-1),
            )
        loss = functional.l1_loss(merged - up(torch.relu(down(merged))), expert)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {"down": down.weight.detach(), "up": up.weight.detach()}


@pytest.mark.parametrize("kind", ["raw", "unit"])
def test_adapters_equal_the_published_loop_of_each_task(kind):
    settings, features = Surgery(rank=3, batch=8, steps=60, features=kind), pairs()
    adapters = trained(features, settings)
    for task, feature in features.items():
        for name, want in published(feature, settings, task).items():
            torch.testing.assert_close(adapters.weights[task][name], want, rtol=0, atol=1e-12)


def test_one_step_by_hand():
    # f = (1, 2), D = I, U = 0: h = f, f' = f, sign(f' − e) = (1, −1), so dL/dU = ½ (−1, 1)ᵀ h and
    # Adam's first step is −lr · sign
    both = {
        "a": Pair(
            torch.tensor([[1.0, 2.0]]).double(), torch.tensor([[0.0, 4.0]]).double(), torch.ones(1)
        )
    }
    settings = Surgery(rank=2, steps=1, lr=0.1, features="raw")
    weights = {
        "down": torch.eye(2)[None].double(),
        "up": torch.zeros(1, 2, 2).double().requires_grad_(),
    }
    loss = LowRank(settings).loss(weights, stacked(both, settings), None)
    loss.sum().backward()
    assert loss.tolist() == [1.5]
    assert weights["up"].grad[0].tolist() == [[-0.5, -1.0], [0.5, 1.0]]
    adapter = Adapters(
        settings,
        42,
        {"a": {"down": torch.eye(2).double(), "up": 0.1 * -weights["up"].grad[0].sign()}},
    )
    torch.testing.assert_close(
        adapter.apply("a", both["a"].merged), torch.tensor([[0.7, 2.3]]).double()
    )


def test_before_the_first_step_nothing_is_changed():
    features = pairs()
    for task, feature in features.items():
        assert torch.equal(at_the_start(features).apply(task, feature.merged), feature.merged)
        of_unit_length = at_the_start(features, Surgery(rank=3)).apply(task, feature.merged)
        assert torch.equal(
            of_unit_length, unit(feature.merged)
        )  # the direction, which alone decides the answer


def test_an_expert_that_is_the_merged_model_needs_no_correction():
    same = pair(0, 20)
    adapters = trained({"mnist": Pair(same.merged, same.merged, same.sizes)})
    assert set(adapters.losses["mnist"]) == {0.0}
    assert torch.equal(adapters.apply("mnist", same.merged), same.merged)


def test_a_seed_gives_the_same_adapters_whatever_else_is_drawn():
    features = pairs()
    first = trained(features)
    state = torch.get_rng_state()
    torch.rand(7)
    assert difference(first, trained(features)) == 0
    torch.set_rng_state(state)
    trained(features)
    assert torch.equal(torch.get_rng_state(), state)
    assert difference(first, trained(features, seed=43)) > 1e-3


def test_every_shuffle_shows_every_sample_once_and_official_rounds_only_two_batches():
    order = batch_order("mnist", 20, SETTINGS, 42)
    assert [sorted(torch.cat(list(islice(order, 3))).tolist()) for _ in range(4)] == [
        list(range(20))
    ] * 4
    official = batch_order("mnist", 40, Surgery(batch=8, reshuffle=2), 42)
    draws = generator("mnist", "batches", 42)
    for _ in range(4):
        assert torch.equal(
            torch.cat(list(islice(official, 2))), torch.randperm(40, generator=draws)[:16]
        )


@pytest.mark.parametrize("encode", ["once", "each_step"])
def test_public_function_equals_training_on_features_of_the_projected_pool(encode):
    given = experiment(count=10)
    head = torch.randn(24, 32, generator=generator("head", "test", 0)).double()
    adapters = featcal.surgery(
        given["merged"],
        given["experts"],
        given["batches"],
        head=head,
        rank=3,
        steps=30,
        batch=4,
        encode=encode,
    )
    features = {}
    for task, expert in sorted(given["experts"].items()):
        pixels = torch.cat([batch["pixel_values"] for batch in given["batches"][task]])
        with torch.no_grad():
            merged, theirs = (
                m(pixel_values=pixels).pooler_output @ head.T for m in (given["merged"], expert)
            )
        features[task] = Pair(merged, theirs, torch.ones(10))
    assert difference(adapters, trained(features, Surgery(rank=3, steps=30, batch=4))) < 1e-9


def test_models_given_stay_as_they_are():
    given = experiment()
    given["merged"].train()
    before = shifted(given["merged"], 0, 0.0)
    featcal.surgery(given["merged"], given["experts"], given["batches"], rank=2, steps=3)
    assert given["merged"].training and same_bits(before, given["merged"])
    assert all(p.grad is None for p in given["merged"].parameters())


def test_a_loss_that_is_no_number_names_task_and_step():
    features = pairs()
    steps = list(islice(kept_steps(features, SETTINGS, 42), 6))
    broken = steps[4]["dtd"]
    steps[4]["dtd"] = Pair(
        torch.full_like(broken.merged, float("nan")), broken.expert, broken.sizes
    )
    with pytest.raises(Diverged, match="surgery 'dtd': the loss is not finite at step 4"):
        train(SETTINGS, steps, 42)


def test_weights_that_the_last_step_broke_are_noticed():
    with pytest.raises(Diverged, match="step 0"):
        trained(
            {"a": pair(0, 9, dtype=torch.float32)},
            Surgery(rank=2, steps=1, lr=1e39, features="raw"),
        )


def test_settings_that_cannot_be_are_refused_by_name():
    given = experiment()
    call = (given["merged"], given["experts"], given["batches"])
    with pytest.raises(BadSetting, match="surgery.rank: 33 cannot be used; it must be at most 32"):
        featcal.surgery(*call, rank=33, steps=1)
    with pytest.raises(TypeError, match="fetures"):
        featcal.surgery(*call, fetures="raw")
    for key, value in (
        ("rank", 0),
        ("steps", 2.5),
        ("batch", True),
        ("lr", 0.0),
        ("features", "L2"),
        ("reshuffle", 0),
        ("encode", 1),
    ):
        with pytest.raises(BadSetting, match=f"surgery.{key}"):
            featcal.surgery(*call, **{key: value})
    with pytest.raises(BadSetting, match="surgery.seed"):
        featcal.surgery(*call, seed=-1)
    with pytest.raises(
        BadSetting, match=r"head: \(8, 31\) cannot be used; it must have shape \(p, 32\)"
    ):
        featcal.surgery(*call, head=torch.zeros(8, 31))


def test_adapters_after_some_steps_are_those_of_a_shorter_training():
    features, kept = pairs(), {}
    audit = {step: partial(kept.__setitem__, step) for step in (10, 25)}
    whole = train(
        SETTINGS, islice(kept_steps(features, SETTINGS, 42), SETTINGS.steps), 42, None, audit
    )
    assert same_adapters(whole, trained(features))
    for step, seen in kept.items():
        shorter = trained(features, SETTINGS.but(steps=step))
        assert same_adapters(seen, shorter) and seen.losses == shorter.losses


def same_adapters(a, b):
    return all(
        torch.equal(w, b.weights[task][name])
        for task, named in a.weights.items()
        for name, w in named.items()
    )
