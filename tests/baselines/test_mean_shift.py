"""The mean shift: its vector by hand, what it keeps, and what it refuses."""

import pytest
import torch
from adapter_features import pair, pairs, projected_pairs
from tiny import experiment, seeded

import featcal
from featcal.baselines.adapters import Pair, unit
from featcal.baselines.mean_shift import MeanShift
from featcal.errors import BadBatches, BadSetting


def test_the_vector_of_two_samples_by_hand():
    # differences (3, 1) − (1, 0) = (2, 1) and (0, 0) − (0, 3) = (0, −3): their mean is (1, −1)
    merged, expert = torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([[3.0, 1.0], [0.0, 0.0]])
    adapters = MeanShift().fit({"a": Pair(merged, expert, torch.ones(2))}, 42)
    assert adapters.weights["a"]["shift"].tolist() == [[1.0, -1.0]]
    rows = torch.tensor([[5.0, 5.0], [0.0, 1.0]])
    assert adapters.apply("a", rows).tolist() == [[6.0, 4.0], [1.0, 0.0]]
    assert adapters.apply("a", rows[0]).tolist() == [6.0, 4.0]


def test_unit_features_are_divided_by_their_norm_first():
    # (1, 0) and (0, 1) of the merged model, twice (0, 1) of the expert: (−0.5, 0.5)
    merged, expert = torch.tensor([[2.0, 0.0], [0.0, 5.0]]), torch.tensor([[0.0, 3.0], [0.0, 0.1]])
    features = {"a": Pair(merged, expert, torch.ones(2))}
    adapters = MeanShift(features="unit").fit(features, 42)
    assert adapters.weights["a"]["shift"].tolist() == [[-0.5, 0.5]]
    assert adapters.apply("a", torch.tensor([[4.0, 0.0]])).tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("features", ["raw", "unit"])
def test_the_mean_of_corrected_features_is_the_experts(features):
    given = pairs()
    adapters = MeanShift(features=features).fit(given, 42)
    for task, own in given.items():
        expert = (unit(own.expert) if features == "unit" else own.expert).mean(0)
        ours = adapters.apply(task, own.merged).mean(0)
        torch.testing.assert_close(ours, expert, rtol=0, atol=1e-14)
        assert float((own.merged.mean(0) - own.expert.mean(0)).abs().max()) > 1e-3


def test_public_function_takes_models_and_batches():
    given = experiment()
    head = torch.randn(24, 32, generator=seeded(0)).double()
    adapters = featcal.mean_shift(given["merged"], given["experts"], given["batches"], head=head)
    assert adapters.tasks == sorted(given["experts"]) and adapters.losses == {}
    for task, own in projected_pairs(given, head).items():
        want = (own.expert - own.merged).mean(0)
        torch.testing.assert_close(adapters.weights[task]["shift"][0], want, rtol=0, atol=1e-12)


def test_nan_features_and_unknown_settings_are_refused():
    broken = pair(0, 5)
    broken.expert[2, 3] = float("nan")
    with pytest.raises(BadBatches, match=r"batches\['a'\]: gives features that are not finite"):
        MeanShift().fit({"a": broken}, 42)
    with pytest.raises(BadSetting, match="mean_shift.features: 'cosine' cannot be used"):
        featcal.mean_shift(torch.nn.Identity(), {}, {}, features="cosine")
