"""Features that are computed once serve every adapter, and are the same bits as those computed for
one.
"""

from dataclasses import asdict, replace

import pytest
import torch
from adapter_features import difference, pairs
from tiny import experiment, shifted

import featcal
from featcal.baselines.features import pairs_of_several
from featcal.baselines.settings import ProbSurgery, Surgery
from featcal.baselines.training import adapters_from, pool_features
from featcal.errors import BadSetting
from reproduction.stages.pair_file import read_pair, write_pair


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def test_several_merged_models_share_the_experts_features():
    given = experiment(torch.float32)
    merged = {"one": given["merged"], "other": shifted(given["merged"], 7)}
    found = pairs_of_several("dtd", merged, given["experts"]["dtd"], given["batches"]["dtd"], None)
    assert found["one"].expert is found["other"].expert
    for name, model in merged.items():
        assert same(
            found[name],
            pairs_of_several(
                "dtd", {"": model}, given["experts"]["dtd"], given["batches"]["dtd"], None
            )[""],
        )


def test_a_file_keeps_features_as_they_are(tmp_path):
    for pair in pairs(dtype=torch.float32).values():
        write_pair(pair, tmp_path / "one" / "pair.safetensors")
        assert same(read_pair(tmp_path / "one" / "pair.safetensors", torch.device("cpu")), pair)


@pytest.mark.parametrize("settings", [Surgery(rank=2, steps=4), ProbSurgery(hidden=3, steps=4)])
def test_adapters_from_shared_features_are_those_trained_alone(settings):
    given = experiment(torch.float32)
    call = (given["merged"], given["experts"], given["batches"])
    shared = adapters_from(settings, pool_features(*call), 42)
    alone = getattr(featcal, settings.name)(*call, **settings.model_dump())
    assert difference(shared, alone) == 0 and shared.losses == alone.losses


def test_features_of_every_batch_anew_cannot_be_shared():
    with pytest.raises(BadSetting, match="surgery.encode"):
        adapters_from(Surgery(rank=2, steps=1, encode="each_step"), pairs(), 42)
