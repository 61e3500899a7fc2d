"""The mean shift: its vector by hand, what it keeps, and what it refuses."""

import pytest
import torch
from adapter_features import pair, pairs

import featcal
from featcal.baselines.adapters import Pair, unit
from featcal.baselines.mean_shift import MeanShift
from featcal.errors import BadBatches, BadSetting


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


@pytest.mark.parametrize("features", ["raw", "unit"])
def test_the_mean_of_corrected_features_is_the_experts(features):
    given = pairs()
    adapters = MeanShift(features=features).fit(given)
    for task, own in given.items():
        expert = (unit(own.expert) if features == "unit" else own.expert).mean(0)
        ours = adapters.apply(task, own.merged).mean(0)
        torch.testing.assert_close(ours, expert, rtol=0, atol=1e-14)
        assert float((own.merged.mean(0) - own.expert.mean(0)).abs().max()) > 1e-3


def test_nan_features_and_unknown_settings_are_refused():
    broken = pair(0, 5)
    broken.expert[2, 3] = float("nan")
    with pytest.raises(BadBatches, match=r"batches\['a'\]: gives features that are not finite"):
        MeanShift().fit({"a": broken})
    with pytest.raises(BadSetting, match="mean_shift.features: 'cosine' cannot be used"):
        featcal.mean_shift(torch.nn.Identity(), {}, {}, features="cosine")
