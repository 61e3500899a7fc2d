"""Training of adapters: shared features, the order of samples, early results, and broken losses."""

from functools import partial
from itertools import islice

import pytest
import torch
from adapter_features import difference, pairs
from tiny import experiment, shifted

import featcal
from featcal.baselines.adapters import Pair
from featcal.baselines.prob_surgery import ProbSurgery
from featcal.baselines.surgery import Surgery
from featcal.baselines.training import (
    batch_order,
    kept_steps,
    pairs_of_several,
    pool_features,
    train,
)
from featcal.core.draws import generator
from featcal.errors import BadSetting, Diverged
from reproduction.engine.make import read_pair, write_pair

SETTINGS = Surgery(rank=3, batch=8, steps=60, features="raw")


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def test_several_merged_models_share_the_experts_features():
    given = experiment(torch.float32)
    expert, batches = given["experts"]["dtd"], given["batches"]["dtd"]
    merged = {"one": given["merged"], "other": shifted(given["merged"], 7)}
    features = pairs_of_several("dtd", merged, expert, batches, None)
    assert features["one"].expert is features["other"].expert
    for name, model in merged.items():
        alone = pairs_of_several("dtd", {"": model}, expert, batches, None)[""]
        assert same(features[name], alone)


def test_a_file_keeps_features_bit_for_bit(tmp_path):
    for pair in pairs(dtype=torch.float32).values():
        write_pair(pair, tmp_path / "one" / "pair.safetensors")
        assert same(read_pair(tmp_path / "one" / "pair.safetensors", torch.device("cpu")), pair)


@pytest.mark.parametrize("settings", [Surgery(rank=2, steps=4), ProbSurgery(hidden=3, steps=4)])
def test_adapters_from_shared_features_are_those_trained_alone(settings):
    given = experiment(torch.float32)
    call = (given["merged"], given["experts"], given["batches"])
    shared = settings.fit(pool_features(*call), 42)
    alone = getattr(featcal, settings.name)(*call, **settings.model_dump())
    assert difference(shared, alone) == 0 and shared.losses == alone.losses


def test_features_of_every_step_cannot_be_shared():
    with pytest.raises(BadSetting, match="surgery.encode"):
        Surgery(rank=2, steps=1, encode="each_step").fit(pairs(), 42)


def test_a_shuffle_shows_every_sample_once_and_official_rounds_two_batches():
    order = batch_order("mnist", 20, SETTINGS, 42)
    for _ in range(4):
        assert sorted(torch.cat(list(islice(order, 3))).tolist()) == list(range(20))
    official = batch_order("mnist", 40, Surgery(batch=8, reshuffle=2), 42)
    draws = generator("mnist", "batches", 42)
    for _ in range(4):
        want = torch.randperm(40, generator=draws)[:16]
        assert torch.equal(torch.cat(list(islice(official, 2))), want)


def test_adapters_after_some_steps_are_those_of_a_shorter_training():
    features, early = pairs(), {}
    audit = {step: partial(early.__setitem__, step) for step in (10, 25)}
    whole = SETTINGS.fit(features, audit=audit)
    assert difference(whole, SETTINGS.fit(features)) == 0
    for step, adapters in early.items():
        shorter = SETTINGS.but(steps=step).fit(features)
        assert difference(adapters, shorter) == 0 and adapters.losses == shorter.losses


def test_a_loss_that_is_nan_names_task_and_step():
    steps = list(islice(kept_steps(pairs(), SETTINGS, 42), 6))
    own = steps[4]["dtd"]
    steps[4]["dtd"] = Pair(torch.full_like(own.merged, float("nan")), own.expert, own.sizes)
    with pytest.raises(Diverged, match="surgery 'dtd': the loss is not finite at step 4"):
        train(SETTINGS, steps, 42)
