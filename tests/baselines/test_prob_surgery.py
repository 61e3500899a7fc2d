"""ProbSurgery: the published loop as oracle, the divergence, and what its weight does."""

from itertools import islice

import pytest
import torch
from adapter_features import difference, pair, pairs
from tiny import experiment, seeded
from torch.distributions import Normal, kl_divergence
from torch.nn import functional

import featcal
from featcal.baselines.corrections import Gaussian, Stacked
from featcal.baselines.features import Pair, batch_order, kept_steps
from featcal.baselines.settings import ProbSurgery
from featcal.baselines.training import train
from featcal.core.draws import generator
from featcal.errors import Diverged

SETTINGS = ProbSurgery(hidden=5, batch=8, steps=60)
LOSSES = {"l1": torch.nn.L1Loss(), "mse": torch.nn.MSELoss(), "smooth_l1": torch.nn.SmoothL1Loss()}


def trained(features, settings=SETTINGS, seed=42):
    return train(settings, islice(kept_steps(features, settings, seed), settings.steps), seed)


def published(features, settings, task, seed=42):
    """One task by torch's own layers, distributions, loss and optimiser, with the same draws."""
    width = features.merged.shape[1]
    shapes = {
        "hidden": (width, settings.hidden),
        "mean": (settings.hidden, width),
        "log_variance": (settings.hidden, width),
    }
    layers = {name: torch.nn.Linear(*shape, bias=False) for name, shape in shapes.items()}
    torch.nn.init.kaiming_uniform_(
        layers["hidden"].weight, a=5**0.5, generator=generator(task, "initialisation", seed)
    )
    for name in ("mean", "log_variance"):
        torch.nn.init.zeros_(layers[name].weight)
    weights = [layer.double().weight for layer in layers.values()]
    optimiser, noise = torch.optim.Adam(weights, lr=settings.lr), generator(task, "noise", seed)
    for samples in islice(batch_order(task, len(features.merged), settings, seed), settings.steps):
        hidden = torch.relu(layers["hidden"](features.merged[samples]))
        correction = Normal(layers["mean"](hidden), torch.exp(layers["log_variance"](hidden) / 2))
        z = (
            correction.loc
            + correction.scale * torch.randn(len(samples), width, generator=noise).double()
        )
        divergence = (
            kl_divergence(correction, Normal(torch.zeros_like(z), torch.ones_like(z))).sum(1).mean()
        )
        loss = (
            LOSSES[settings.loss](features.merged[samples] - z, features.expert[samples])
            + settings.kl_weight * divergence
        )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {name: layer.weight.detach() for name, layer in layers.items()}


@pytest.mark.parametrize("distance", LOSSES)
def test_adapters_equal_the_published_loop_of_each_task(distance):
    settings, features = (
        ProbSurgery(hidden=5, batch=8, steps=60, kl_weight=0.01, loss=distance),
        pairs(),
    )
    adapters = trained(features, settings)
    for task, feature in features.items():
        for name, want in published(feature, settings, task).items():
            torch.testing.assert_close(adapters.weights[task][name], want, rtol=0, atol=1e-12)


def test_one_loss_by_hand():
    # f = (1, 2), A = I: h = (1, 2); M = I: μ = (1, 2); V = 0: σ = 1; ε = (0.5, −0.5): z = (1.5,
    # 1.5), f' = (−0.5, 0.5)
    # L1 to (0, 0): 0.5; KL = ½ Σ (μ² + σ² − 1 − log σ²) = ½ (1 + 4) = 2.5, times 0.1
    weights = {
        "hidden": torch.eye(2)[None],
        "mean": torch.eye(2)[None],
        "log_variance": torch.zeros(1, 2, 2),
    }
    batch = Stacked(torch.tensor([[[1.0, 2.0]]]), torch.zeros(1, 1, 2), torch.tensor([1]))
    method = Gaussian(ProbSurgery(hidden=2, kl_weight=0.1))
    assert float(method.loss(weights, batch, torch.tensor([[[0.5, -0.5]]]))) == pytest.approx(0.75)


def test_only_the_mean_corrects_at_test_time():
    features = pairs()
    adapters = trained(features)
    f, w = features["dtd"].merged, adapters.weights["dtd"]
    want = f - functional.linear(torch.relu(functional.linear(f, w["hidden"])), w["mean"])
    torch.testing.assert_close(adapters.apply("dtd", f), want, rtol=0, atol=1e-12)
    assert torch.equal(adapters.apply("dtd", f), adapters.apply("dtd", f))
    assert float(w["log_variance"].abs().max()) > 0


def correction(settings):
    """How far a trained adapter moves features of its task, as a share of what is wrong with
    them.
    """
    feature = pair(3, 300)
    moved = feature.merged - trained({"a": feature}, settings).apply("a", feature.merged)
    return float(moved.norm() / (feature.merged - feature.expert).norm())


def test_a_huge_divergence_weight_predicts_no_correction():
    shares = {
        kl: correction(ProbSurgery(hidden=12, steps=400, lr=0.01, kl_weight=kl))
        for kl in (0.0, 1e-4, 1e6)
    }
    assert shares[0.0] > 0.5 and shares[1e-4] > 0.5
    # Adam divides by the size of the gradient, so the mean keeps trembling by steps of lr about
    # zero
    assert shares[1e6] < 0.01


def test_public_function_trains_on_raw_features_by_default():
    given = experiment()
    head = torch.randn(24, 32, generator=seeded(0)).double()
    adapters = featcal.prob_surgery(
        given["merged"], given["experts"], given["batches"], head=head, hidden=4, steps=20
    )
    features = {}
    for task, expert in sorted(given["experts"].items()):
        pixels = torch.cat([batch["pixel_values"] for batch in given["batches"][task]])
        with torch.no_grad():
            merged, theirs = (
                m(pixel_values=pixels).pooler_output @ head.T for m in (given["merged"], expert)
            )
        features[task] = Pair(merged, theirs, torch.ones(6))
    assert difference(adapters, trained(features, ProbSurgery(hidden=4, steps=20))) < 1e-9


def test_a_variance_that_overflows_names_task_and_step():
    with pytest.raises(
        Diverged, match=r"prob_surgery 'a': the loss is not finite at step \d+[\s\S]*lr.*\(1e\+06\)"
    ):
        trained({"a": pair(0, 20)}, ProbSurgery(hidden=4, steps=20, lr=1e6))
