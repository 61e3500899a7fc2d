"""ProbSurgery: the published loop as oracle, the divergence, and the effect of its weight."""

from itertools import islice

import pytest
import torch
from adapter_features import pair, pairs
from torch.distributions import Normal, kl_divergence
from torch.nn import functional

from featcal.baselines.prob_surgery import ProbSurgery
from featcal.baselines.training import batch_order
from featcal.core.draws import generator

LOSSES = {"l1": torch.nn.L1Loss(), "mse": torch.nn.MSELoss(), "smooth_l1": torch.nn.SmoothL1Loss()}


def published(features, settings, task, seed=42):
    """Train one task with torch's own layers, distributions, loss and optimiser, and our draws."""
    width, hidden = features.merged.shape[1], settings.hidden
    shapes = {"hidden": (width, hidden), "mean": (hidden, width), "log_variance": (hidden, width)}
    layers = {name: torch.nn.Linear(*shape, bias=False) for name, shape in shapes.items()}
    draws = generator(task, "initialisation", seed)
    torch.nn.init.kaiming_uniform_(layers["hidden"].weight, a=5**0.5, generator=draws)
    for name in ("mean", "log_variance"):
        torch.nn.init.zeros_(layers[name].weight)
    weights = [layer.double().weight for layer in layers.values()]
    optimiser, noise = torch.optim.Adam(weights, lr=settings.lr), generator(task, "noise", seed)
    for samples in islice(batch_order(task, len(features.merged), settings, seed), settings.steps):
        merged, expert = features.merged[samples], features.expert[samples]
        h = torch.relu(layers["hidden"](merged))
        z = Normal(layers["mean"](h), torch.exp(layers["log_variance"](h) / 2))
        drawn = z.loc + z.scale * torch.randn(len(samples), width, generator=noise).double()
        standard = Normal(torch.zeros_like(drawn), torch.ones_like(drawn))
        divergence = kl_divergence(z, standard).sum(1).mean()
        loss = LOSSES[settings.loss](merged - drawn, expert) + settings.kl_weight * divergence
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {name: layer.weight.detach() for name, layer in layers.items()}


@pytest.mark.parametrize("loss", LOSSES)
def test_adapters_equal_the_published_loop_of_each_task(loss):
    settings = ProbSurgery(hidden=5, batch=8, steps=60, kl_weight=0.01, loss=loss)
    features = pairs()
    adapters = settings.fit(features)
    for task, own in features.items():
        for name, want in published(own, settings, task).items():
            torch.testing.assert_close(adapters.weights[task][name], want, rtol=0, atol=1e-12)


def test_one_loss_by_hand():
    # f = (1, 2), A = I: h = (1, 2); M = I: μ = (1, 2); V = 0: σ = 1; ε = (0.5, −0.5): z = (1.5,
    # 1.5), f' = (−0.5, 0.5)
    # L1 to (0, 0): 0.5; KL = ½ Σ (μ² + σ² − 1 − log σ²) = ½ (1 + 4) = 2.5, times 0.1
    identity, zeros = torch.eye(2)[None], torch.zeros(1, 2, 2)
    weights = {"hidden": identity, "mean": identity, "log_variance": zeros}
    merged, noise = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[0.5, -0.5]]])
    settings = ProbSurgery(hidden=2, kl_weight=0.1)
    loss = settings.row_losses(weights, merged, torch.zeros(1, 1, 2), noise)
    assert float(loss) == pytest.approx(0.75)


def test_only_the_mean_corrects_at_test_time():
    features = pairs()
    adapters = ProbSurgery(hidden=5, batch=8, steps=60).fit(features)
    f, w = features["dtd"].merged, adapters.weights["dtd"]
    want = f - functional.linear(torch.relu(functional.linear(f, w["hidden"])), w["mean"])
    torch.testing.assert_close(adapters.apply("dtd", f), want, rtol=0, atol=1e-12)
    assert torch.equal(adapters.apply("dtd", f), adapters.apply("dtd", f))
    assert float(w["log_variance"].abs().max()) > 0


# Adam divides by the size of the gradient, so with a huge weight the mean still moves by steps of
# lr about zero
@pytest.mark.parametrize(
    ("kl_weight", "least", "most"), [(0.0, 0.5, 2), (1e-4, 0.5, 2), (1e6, 0, 0.01)]
)
def test_a_huge_divergence_weight_leaves_almost_no_correction(kl_weight, least, most):
    feature = pair(3, 300)
    settings = ProbSurgery(hidden=12, steps=400, lr=0.01, kl_weight=kl_weight)
    moved = feature.merged - settings.fit({"a": feature}).apply("a", feature.merged)
    assert least <= float(moved.norm() / (feature.merged - feature.expert).norm()) < most
