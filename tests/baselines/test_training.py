"""Training of adapters: from models, from shared features, the order of samples, early results."""

from functools import partial
from itertools import islice

import pytest
import torch
from families import FAMILIES, translations, without_float32
from families import experiment as texts
from test_corrections import difference, pair, pairs
from tiny import clip, experiment, images, refilled, same_bits, seeded, shifted
from transformers import BartConfig, BartForConditionalGeneration
from transformers.modeling_utils import local_torch_dtype

import featcal
from featcal.baselines.adapters import Pair
from featcal.baselines.corrections import MeanShift, ProbSurgery, Surgery
from featcal.baselines.training import batch_order, cached_steps, together, train
from featcal.core import generator
from featcal.errors import BadBatches, BadSetting, Diverged
from featcal.models.batch import rows_before_head

SETTINGS = Surgery(rank=3, batch=8, steps=60, features="raw")


def call(given):
    return given["merged"], given["experts"], given["batches"]


def encoded(given, **how):
    """Adapters of features that are kept, and of features computed anew at every step."""
    both = ("once", "each_step")
    return [featcal.surgery(*call(given), rank=4, encode=encode, **how) for encode in both]


FEW = Surgery(rank=3, steps=30, batch=4)
KINDS = [FEW, FEW.but(encode="each_step"), ProbSurgery(hidden=4, steps=20), MeanShift()]


@pytest.mark.parametrize("settings", KINDS)
def test_public_functions_fit_projected_features(settings):
    """Each task's features are taken in one forward pass, as an oracle."""
    given, features = experiment(count=9), {}
    head = torch.randn(24, 32, generator=seeded(0)).double()
    for task, expert in sorted(given["experts"].items()):
        pixels = torch.cat([batch["pixel_values"] for batch in given["batches"][task]])
        with torch.no_grad():
            outputs = (model(pixel_values=pixels) for model in (given["merged"], expert))
            merged, theirs = (output.pooler_output @ head.T for output in outputs)
        features[task] = Pair(merged, theirs, torch.ones(len(pixels), dtype=torch.long))
    given["batches"] = {task: refilled(own) for task, own in given["batches"].items()}
    device, dtype = torch.device("meta"), local_torch_dtype(torch.bfloat16)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), device, dtype:
        ours = getattr(featcal, settings.name)(*call(given), head=head, **settings.model_dump())
    once = settings.but(encode="once") if ours.losses else settings
    assert difference(ours, once.fit(features)) < 1e-9


def test_models_and_other_draws_are_left_alone_and_a_seed_gives_the_same_adapters():
    given = experiment()
    given["merged"].train()
    before, state = shifted(given["merged"], 0, 0.0), torch.get_rng_state()
    featcal.surgery(*call(given), rank=2, steps=3)
    assert given["merged"].training and same_bits(before, given["merged"])
    assert all(p.grad is None for p in given["merged"].parameters())
    assert torch.equal(torch.get_rng_state(), state)
    first = SETTINGS.fit(pairs())
    torch.rand(7)
    assert difference(first, SETTINGS.fit(pairs())) == 0
    assert difference(first, SETTINGS.fit(pairs(), seed=43)) > 1e-3


def test_a_shuffle_shows_every_sample_once_and_official_rounds_two_batches():
    order = batch_order("mnist", 20, SETTINGS, 42)
    for _ in range(4):
        assert sorted(torch.cat(list(islice(order, 3))).tolist()) == list(range(20))
    official = batch_order("mnist", 40, Surgery(batch=8, reshuffle=2), 42)
    draws = generator("mnist", "batches", 42)
    for _ in range(4):
        assert [*torch.cat([*islice(official, 2)])] == [*torch.randperm(40, generator=draws)[:16]]


def test_adapters_after_some_steps_are_those_of_a_shorter_training():
    features, early = pairs(), {}
    audit = {step: partial(early.__setitem__, step) for step in (10, 25)}
    assert difference(SETTINGS.fit(features, audit=audit), SETTINGS.fit(features)) == 0
    for step, adapters in early.items():
        shorter = SETTINGS.but(steps=step).fit(features)
        assert difference(adapters, shorter) == 0 and adapters.losses == shorter.losses


def test_losses_and_weights_that_are_not_finite_name_task_and_step():
    steps = list(islice(cached_steps(pairs(), SETTINGS, 42), 6))
    own = steps[4]["dtd"]
    steps[4]["dtd"] = Pair(torch.full_like(own.merged, float("nan")), own.expert, own.sizes)
    with pytest.raises(Diverged, match="surgery 'dtd': the loss is not finite at step 4"):
        train(SETTINGS, steps, 42, progress=None, audit=None)
    broken_by_the_last_step = Surgery(rank=2, steps=1, lr=1e39, features="raw")
    with pytest.raises(Diverged, match="step 0"):
        broken_by_the_last_step.fit({"a": pair(0, 9, dtype=torch.float32)})
    message = r"prob_surgery 'a': the loss is not finite at step \d+[\s\S]*lr.*\(1e\+06\)"
    with pytest.raises(Diverged, match=message):
        ProbSurgery(hidden=4, steps=20, lr=1e6).fit({"a": pair(0, 20)})


def test_settings_that_do_not_fit_are_refused_by_name():
    for key, wrong in (("rank", 33), ("encode", 1), ("seed", -1), ("device", "no")):
        with pytest.raises(BadSetting, match=f"^(surgery.)?{key}"):
            featcal.surgery(*call(experiment()), **{key: wrong})
    with pytest.raises(BadSetting, match="surgery.encode"):
        Surgery(rank=2, steps=1, encode="each_step").fit(pairs())
    with pytest.raises(BadSetting, match="surgery.features: .* must be raw for a language model"):
        featcal.surgery(*call(texts(FAMILIES["llama"])), features="unit")


LANGUAGE = ("t5", "t5_gated", "llama")


@pytest.mark.parametrize("name", LANGUAGE)
def test_adapters_of_a_language_model_correct_the_input_of_its_head(name):
    given = texts(FAMILIES[name])
    model, batch = given["merged"], FAMILIES[name].batches(5)[0]
    given["merged"] = torch.nn.DataParallel(model)
    adapters = featcal.surgery(*call(given), rank=4, steps=20, lr=0.01)
    counted = batch["labels"] != -100 if "labels" in batch else batch["attention_mask"].bool()
    rows, sizes = rows_before_head(model, batch, None)
    assert sizes.tolist() == counted.sum(1).tolist()
    with torch.no_grad():
        plain = model(**batch).logits
        with adapters.before_head(model, "a"):
            logits = model(**batch).logits[counted]
        want = model.get_output_embeddings()(adapters.apply("a", rows))
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-12)
        assert torch.equal(model(**batch).logits, plain)
    assert (want - plain[counted]).abs().max() > 1e-3


@pytest.mark.parametrize("name", LANGUAGE)
def test_texts_encoded_at_every_step_give_the_adapters_of_kept_features(name, monkeypatch):
    """Texts of several lengths are made one batch; the second batch has no padding."""
    given = texts(FAMILIES[name])
    without_float32(monkeypatch, given["merged"])
    for own in given["batches"].values():
        own[1] = {key: x[:, : 2 if key == "labels" else 4] for key, x in own[1].items()}
    assert difference(*encoded(given, steps=20, batch=4)) < 1e-9
    with pytest.raises(BadBatches, match="texts differ in length; give an attention_mask"):
        together("a", [{"input_ids": torch.ones(1, n, dtype=torch.long)} for n in (3, 5)])


def test_decoder_tokens_of_several_lengths_are_padded_with_the_models_token():
    layers = {f"{part}coder_{key}": 2 for part in ("en", "de") for key in ("layers", "ffn_dim")}
    config = BartConfig(vocab_size=97, d_model=16, max_position_embeddings=32, **layers)
    model = BartForConditionalGeneration(config).eval()
    first, second = translations(0)
    second = {key: value[:, :4] for key, value in second.items()}
    own = [b | {"decoder_input_ids": b.pop("labels").clamp_min(2)} for b in (first, second)]
    given = {"merged": model, "experts": {"a": shifted(model, 1)}, "batches": {"a": own}}
    assert difference(*encoded(given, steps=6, batch=2)) < 1e-6


@pytest.mark.parametrize("encode", ["once", "each_step"])
def test_experts_and_samples_that_do_not_fit_are_refused_with_their_task(encode):
    merged, own = clip(), images(0)
    with pytest.raises(BadBatches, match=r"'a'.*\(\d, 64\) by the expert, but \(\d, 32\) by"):
        featcal.surgery(merged, {"a": clip(width=64)}, {"a": own}, steps=1, encode=encode)
    with pytest.raises(BadSetting, match=r"experts: \[1\] .*names that are texts"):
        featcal.surgery(merged, {1: merged}, {1: own}, steps=1, encode=encode)
    larger, named = images(0, size=32), [own[0] | {"output_attentions": torch.zeros(3)}, own[1]]
    for batches in (own + larger, named) if encode == "each_step" else ():
        with pytest.raises(BadBatches, match="'a'.*one size, or encode='once'"):
            featcal.surgery(merged, {"a": clip(1)}, {"a": batches}, steps=9, encode=encode)
