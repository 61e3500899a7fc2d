"""The mean shift: a constant vector per task by hand, what it keeps, and as a folder."""

import pytest
import torch
from adapter_features import pair, pairs
from tiny import experiment, seeded

import featcal
from featcal.baselines.adapters import unit
from featcal.baselines.features import Pair
from featcal.baselines.settings import MeanShift
from featcal.baselines.training import adapters_from
from featcal.errors import BadBatches, BadSetting


def test_the_vector_of_two_samples_by_hand():
    # differences (3, 1) − (1, 0) = (2, 1) and (0, 0) − (0, 3) = (0, −3): their mean is (1, −1)
    merged, expert = torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([[3.0, 1.0], [0.0, 0.0]])
    adapters = adapters_from(MeanShift(), {"a": Pair(merged, expert, torch.ones(2))}, 42)
    assert adapters.weights["a"]["shift"].tolist() == [[1.0, -1.0]]
    assert adapters.apply("a", torch.tensor([[5.0, 5.0], [0.0, 1.0]])).tolist() == [
        [6.0, 4.0],
        [1.0, 0.0],
    ]
    assert adapters.apply("a", torch.tensor([5.0, 5.0])).tolist() == [6.0, 4.0]


def test_at_unit_length_both_sides_are_divided_by_their_norm_first():
    # unit lengths: (1, 0) and (0, 1) of the merged model, (0, 1) twice of the expert: their means
    # differ by (−0.5, 0.5)
    merged, expert = torch.tensor([[2.0, 0.0], [0.0, 5.0]]), torch.tensor([[0.0, 3.0], [0.0, 0.1]])
    adapters = adapters_from(
        MeanShift(features="unit"), {"a": Pair(merged, expert, torch.ones(2))}, 42
    )
    assert adapters.weights["a"]["shift"].tolist() == [[-0.5, 0.5]]
    assert adapters.apply("a", torch.tensor([[4.0, 0.0]])).tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("features", ["raw", "unit"])
def test_the_mean_of_corrected_features_is_the_experts_on_the_samples_it_was_made_from(features):
    given = pairs()
    adapters = adapters_from(MeanShift(features=features), given, 42)
    for task, own in given.items():
        expert = unit(own.expert) if features == "unit" else own.expert
        torch.testing.assert_close(
            adapters.apply(task, own.merged).mean(0), expert.mean(0), rtol=0, atol=1e-14
        )
        assert (
            float((own.merged.mean(0) - own.expert.mean(0)).abs().max()) > 1e-3
        )  # there is something to move


def test_public_function_takes_models_and_batches():
    given = experiment()
    head = torch.randn(24, 32, generator=seeded(0)).double()
    adapters = featcal.mean_shift(given["merged"], given["experts"], given["batches"], head=head)
    assert adapters.tasks == sorted(given["experts"]) and adapters.losses == {}
    for task, expert in given["experts"].items():
        pixels = torch.cat([batch["pixel_values"] for batch in given["batches"][task]])
        with torch.no_grad():
            merged, theirs = (
                m(pixel_values=pixels).pooler_output @ head.T for m in (given["merged"], expert)
            )
        torch.testing.assert_close(
            adapters.weights[task]["shift"][0], (theirs - merged).mean(0), rtol=0, atol=1e-12
        )


def test_features_that_are_no_numbers_and_settings_that_cannot_be_are_refused_by_name():
    broken = pair(0, 5)
    broken.expert[2, 3] = float("nan")
    with pytest.raises(BadBatches, match=r"batches\['a'\]: gives features that are not finite"):
        adapters_from(MeanShift(), {"a": broken}, 42)
    with pytest.raises(
        BadSetting, match="mean_shift.features: 'cosine' cannot be used; it must be 'unit' or 'raw'"
    ):
        featcal.mean_shift(torch.nn.Identity(), {}, {}, features="cosine")
