"""Representation Surgery, ProbSurgery and the mean shift against the published loops."""

from itertools import islice

import pytest
import torch
from tiny import seeded
from torch.distributions import Normal, kl_divergence
from torch.nn import functional

import featcal
from featcal.baselines.adapters import Pair
from featcal.baselines.corrections import MeanShift, ProbSurgery, Surgery
from featcal.baselines.training import batch_order
from featcal.core import generator
from featcal.errors import BadBatches, BadSetting

COUNTS = {"mnist": 20, "dtd": 7, "svhn": 33}  # no multiples of the batch of 8


def pair(seed, count, width=12, dtype=torch.float64):
    """Features of `count` images; the expert's differ from the merged model's by a bend."""
    g = seeded(seed)
    merged = torch.randn(count, width, generator=g, dtype=torch.float64)
    down, up = (torch.randn(width, 2, generator=g, dtype=torch.float64) for _ in range(2))
    noise = torch.randn(count, width, generator=g, dtype=torch.float64)
    expert = merged - 0.3 * torch.relu(merged @ down) @ up.T + 0.01 * noise
    return Pair(merged.to(dtype), expert.to(dtype), torch.ones(count, dtype=torch.long))


def pairs(**more):
    """One pair per task, each from its own seed."""
    return {task: pair(i, count, **more) for i, (task, count) in enumerate(COUNTS.items())}


def difference(ours, theirs):
    """Largest difference between the weights of two adapters of the same tasks."""
    assert ours.tasks == theirs.tasks
    both = ((own, theirs.weights[task]) for task, own in ours.weights.items())
    return max(float((w - other[n]).abs().max()) for own, other in both for n, w in own.items())


SURGERY = Surgery(rank=3, batch=8, steps=60, features="raw")
PROB_SURGERY = ProbSurgery(hidden=5, batch=8, steps=60, kl_weight=0.01)
LOSSES = {"l1": torch.nn.L1Loss(), "mse": torch.nn.MSELoss(), "smooth_l1": torch.nn.SmoothL1Loss()}
KINDS = [
    *(SURGERY.but(features=kind) for kind in ("raw", "unit")),
    *(PROB_SURGERY.but(loss=loss) for loss in LOSSES),
]


def published(features, settings, task):
    """Train one task with torch's own layers, distributions, loss and optimiser, and our draws."""
    shapes = settings.shapes(features.merged.shape[1])
    layers = {n: torch.nn.Linear(*s[::-1], bias=False).double() for n, s in shapes.items()}
    first, *others = (layer.weight for layer in layers.values())
    drawn, draws = torch.empty(first.shape), generator(task, "initialisation", 42)
    torch.nn.init.kaiming_uniform_(drawn, a=5**0.5, generator=draws)
    with torch.no_grad():
        first.copy_(drawn)
        for weight in others:
            weight.zero_()
    optimiser = torch.optim.Adam([first, *others], lr=settings.lr)
    noise = generator(task, "noise", 42)
    for samples in islice(batch_order(task, len(features.merged), settings, 42), settings.steps):
        merged, expert = features.merged[samples], features.expert[samples]
        if settings.features == "unit":
            merged, expert = (functional.normalize(rows, dim=-1) for rows in (merged, expert))
        if settings.name == "surgery":
            loss = LOSSES["l1"](merged - layers["up"](torch.relu(layers["down"](merged))), expert)
        else:
            h = torch.relu(layers["hidden"](merged))
            z = Normal(layers["mean"](h), torch.exp(layers["log_variance"](h) / 2))
            drawn = z.loc + z.scale * torch.randn(merged.shape, generator=noise).double()
            standard = Normal(torch.zeros_like(drawn), torch.ones_like(drawn))
            divergence = kl_divergence(z, standard).sum(1).mean()
            loss = LOSSES[settings.loss](merged - drawn, expert) + settings.kl_weight * divergence
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {name: layer.weight.detach() for name, layer in layers.items()}


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_adapters_equal_the_published_loop_of_each_task(settings):
    features = pairs()
    adapters = settings.fit(features)
    for task, own in features.items():
        for name, want in published(own, settings, task).items():
            torch.testing.assert_close(adapters.weights[task][name], want, rtol=0, atol=1e-12)


def test_only_the_mean_of_prob_surgery_corrects_at_test_time():
    features = pairs()
    adapters = PROB_SURGERY.fit(features)
    f, w = features["dtd"].merged, adapters.weights["dtd"]
    want = f - functional.linear(torch.relu(functional.linear(f, w["hidden"])), w["mean"])
    torch.testing.assert_close(adapters.apply("dtd", f), want, rtol=0, atol=1e-12)
    assert float(w["log_variance"].abs().max()) > 0


@pytest.mark.parametrize(
    ("features", "merged", "expert", "shift", "row", "corrected"),
    [
        # differences (3, 1) − (1, 0) = (2, 1) and (0, 0) − (0, 3) = (0, −3): their mean is (1, −1)
        ("raw", [[1, 0], [0, 3]], [[3, 1], [0, 0]], [1, -1], [5, 5], [6, 4]),
        # (1, 0) and (0, 1) of the merged model, twice (0, 1) of the expert
        ("unit", [[2, 0], [0, 5]], [[0, 3], [0, 0.1]], [-0.5, 0.5], [4, 0], [0.5, 0.5]),
    ],
)
def test_the_vector_of_two_samples_by_hand(features, merged, expert, shift, row, corrected):
    rows = Pair(torch.tensor(merged).float(), torch.tensor(expert).float(), torch.ones(2))
    adapters = MeanShift(features=features).fit({"a": rows})
    assert adapters.weights["a"]["shift"].tolist() == [shift] and adapters.losses == {}
    for given, want in ((row, corrected), ([row, row], [corrected, corrected])):
        assert adapters.apply("a", torch.tensor(given).float()).tolist() == want


def test_nan_features_and_unknown_settings_are_refused():
    broken = pair(0, 5)
    broken.expert[2, 3] = float("nan")
    with pytest.raises(BadBatches, match=r"batches\['a'\]: gives features that are not finite"):
        MeanShift().fit({"a": broken})
    with pytest.raises(BadSetting, match="mean_shift.features: 'cosine' cannot be used"):
        featcal.mean_shift(torch.nn.Identity(), {}, {}, features="cosine")
