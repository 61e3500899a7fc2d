"""Representation Surgery: the published loop as oracle, and worked steps."""

from itertools import islice

import pytest
import torch
from adapter_features import pair, pairs
from torch.nn import functional

from featcal.baselines.adapters import Adapters, Pair, unit
from featcal.baselines.surgery import Surgery
from featcal.baselines.training import batch_order, first_weights
from featcal.core.draws import generator

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
