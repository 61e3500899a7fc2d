"""The choice by answers, and the calibration of several students in one pass of the teachers."""

from functools import partial
from types import SimpleNamespace

import families
import pytest
import torch
from families import FAMILIES
from test_mixtures import given  # noqa: F401 - a fixture
from test_plan import Block, Toy
from test_streaming import written
from tiny import PAPER, TEXT, clip, experiment, make, same_bits, seeded, shifted
from torch import nn
from torch.nn.functional import log_softmax

from featcal import calibrate
from featcal.calibration import choose
from featcal.calibration.choose import STREAM, Part, parts_of
from featcal.errors import FeatCalError
from featcal.models.load import load_as_calibrated
from featcal.settings import Calibration

FEW = {"paper": PAPER, "stream": STREAM.but(anchor_blend=2.0)}


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(choose, "CANDIDATES", FEW)


@pytest.fixture
def few_samples(few, monkeypatch):
    """Choose among two candidates with as few as four samples."""
    monkeypatch.setattr(choose, "FEWEST_HELD_OUT", 2)
    monkeypatch.setattr(choose, "FEWEST", 4)


def noted(monkeypatch):
    """Keep every model whose answers are compared."""
    seen, own = [], choose.divergences

    def divergences(models, handles, *samples):
        seen.append({name: one.module for name, one in handles.items()})
        return own(models, handles, *samples)

    monkeypatch.setattr(choose, "divergences", divergences)
    return seen


def candidates(given, monkeypatch):
    """The calibrated candidates, and the experiment with the samples on which they are."""
    seen, parts = noted(monkeypatch), {}
    calibrate(**given)
    for task, own in given["batches"].items():
        parts[task] = Part(own, parts_of(sum(map(choose.sample_count, own)))[0])
    return seen[0], given | {"batches": parts}


def halves():
    uses = iter([lambda fc, x: x + fc(x), lambda fc, x: fc(x)])
    base = make(lambda: Toy(lambda: Block(next(uses))))
    base.config = SimpleNamespace(return_dict=False)  # which its forward does not know
    x = torch.randn(16, 3, 8, generator=seeded(0), dtype=torch.float64)
    given = {"merged": shifted(base, 5, 0.1), "base": base, "batches": {"a": [{"x": x}]}}
    return given | {"experts": {"a": shifted(base, 1, 0.3)}}


@pytest.mark.parametrize("family", ["clip", "t5", "gemma2", "halves"])
def test_students_of_one_sweep_are_those_calibrated_alone(family, few_samples, monkeypatch):
    """T5's decoder follows two encoders; Gemma 2, or its last block, writes into no stream."""
    given = halves() if family == "halves" else families.experiment(FAMILIES[family])
    models, few = candidates(given, monkeypatch)
    for name, settings in FEW.items():
        if family in ("gemma2", "halves"):
            settings = settings.but(residual=0.0)
        pair = calibrate(**few, settings=settings).model.state_dict(), models[name].state_dict()
        torch.testing.assert_close(*pair, rtol=1e-7, atol=1e-9)


def test_auto_in_memory_and_streamed_is_the_calibration_with_what_it_chose(tmp_path, few):
    given = experiment(torch.float32, tasks=["a", "b"], count=16, batch=8)
    result = calibrate(**given)
    assert result.choice.chosen in FEW and result.settings == FEW[result.choice.chosen]
    assert choose.FINAL not in result.choice.divergence  # no sample is left to check it on
    same = calibrate(**given, settings=result.settings)
    assert same_bits(same.model, result.model) and same.blocks == result.blocks
    streamed = calibrate(**written(given, tmp_path), out=tmp_path / "out")
    assert same_bits(load_as_calibrated(tmp_path / "out"), result.model)
    assert streamed.choice.chosen == result.choice.chosen


@pytest.mark.parametrize(("count", "why"), [(16, "calibration did not help"), (6, "8 samples")])
def test_merged_model_that_cannot_be_improved_or_judged_is_kept(count, why, tmp_path, monkeypatch):
    """All experts are equal to the merged model, so every change is for the worse."""
    monkeypatch.setattr(choose, "CANDIDATES", {"far": Calibration(ridge=10.0, anchor_blend=8.0)})
    given = experiment(torch.float32, count=count, batch=8)
    given["experts"] = dict.fromkeys(given["experts"], given["merged"])
    result = calibrate(**given)
    assert same_bits(result.model, given["merged"])
    assert result.settings is None and result.blocks == []
    assert result.choice.sentence.startswith("Kept the merged model") and why in str(result.choice)
    assert bool(result.choice.divergence) == (count > 6)
    out = calibrate(**written(given, tmp_path), out=tmp_path / "out").folder
    assert same_bits(load_as_calibrated(out), given["merged"])
    assert "Kept the merged model" in (out / "README.md").read_text()


@pytest.mark.parametrize("layers", [1, 2])
def test_a_candidate_that_overflows_is_left_out(layers, few, monkeypatch):
    """In the first of two blocks the second has no solution; in the last its answers are none."""
    given = experiment(torch.float32, ["a", "b"], 16, 8, partial(clip, num_hidden_layers=layers))
    expected = calibrate(**given)
    monkeypatch.setattr(choose, "CANDIDATES", {"far": PAPER.but(anchor_blend=1e300)} | FEW)
    result = calibrate(**given)
    assert same_bits(result.model, expected.model)
    sentence = " Weights or answers were not finite with far."
    assert result.choice.sentence == expected.choice.sentence + sentence
    given["experts"]["a"].post_layernorm.bias.data[0] = torch.inf
    with pytest.raises(FeatCalError, match="experts?.*a"):
        calibrate(**given)


@pytest.mark.parametrize("settings", FEW.values(), ids=FEW)
def test_a_candidate_that_overflows_on_all_samples_is_not_used(settings, monkeypatch):
    monkeypatch.setattr(choose, "CANDIDATES", {"far": settings})
    given = experiment(count=48, batch=16)
    unseen = (~parts_of(48)[0] & parts_of(48)[1]).nonzero()[-1]
    given["batches"]["svhn"][2]["pixel_values"][unseen - 32] = 1e308
    result = calibrate(**given)
    assert same_bits(result.model, given["merged"]) and not result.blocks
    assert "with all samples far has no finite solution" in result.choice.sentence


def test_a_result_that_fails_the_last_check_is_not_used(tmp_path, few, monkeypatch):
    given = experiment(torch.float32, count=48, batch=16)
    assert choose.FINAL in calibrate(**given).choice.divergence
    own = choose.divergences

    def worse_at_the_end(models, handles, *samples):
        found, more = own(models, handles, *samples), 10 * (choose.FINAL in handles)
        return {t: {n: [x + more for x in kl] for n, kl in of.items()} for t, of in found.items()}

    monkeypatch.setattr(choose, "divergences", worse_at_the_end)
    assert same_bits(calibrate(**given).model, given["merged"])
    calibrate(**written(given, tmp_path), out=tmp_path / "out")
    assert same_bits(load_as_calibrated(tmp_path / "out"), given["merged"])


@pytest.mark.parametrize("n", [8, 32, 42, 43, 256, 1000])
def test_a_quarter_is_held_out_and_serves_at_the_end_only_where_samples_are_few(n):
    assert choose.sample_count({"position_ids": torch.ones(1), "input_ids": torch.ones(n)}) == n
    few, last, held_out = ({i for i in range(n) if mask[i]} for mask in parts_of(n))
    assert len(held_out) == min(max(n // 4, 4), 64) and not few & held_out
    assert len(few) == min(32, n - len(held_out))
    assert last == (set(range(n)) if n <= 42 else set(range(n)) - held_out)


def test_candidates_of_a_mixture_are_those_calibrated_alone(given, few_samples, monkeypatch):
    models, few = candidates(given, monkeypatch)
    assert same_bits(calibrate(**few, settings=FEW["stream"]).model, models["stream"])


def test_models_are_listed_with_their_mean_over_the_tasks_that_all_have():
    choice = choose.Choice("paper", "", None, {"merged": {"a": 9, "b": 3}, "calibrated": {"b": 2}})
    assert choice.rows == [["merged", "3.0000"], ["calibrated", "2.0000"]]


def test_only_candidates_that_harm_no_task_are_chosen_from():
    merged = 1 + torch.rand(20, generator=seeded(0)).numpy()
    found = {"a": {"merged": merged, "paper": merged - 0.9, "stream": merged - 0.2}}
    found["b"] = {"merged": merged, "paper": merged + 0.1, "stream": merged}
    assert choose.choose(found, FEW).chosen == "stream"
    assert choose.choose({"b": found["b"]}, FEW).chosen == "merged"


@pytest.mark.parametrize("more", [0, 5])
def test_relations_are_softmaxes_over_the_experts_features_of_other_samples(more):
    g, n = seeded(1), 6
    f = torch.randn(n, 4, generator=g, dtype=torch.float64)
    f_exp = torch.randn(n + more, 4, generator=g, dtype=torch.float64)

    def cosines(x, i):
        cos = torch.nn.functional.cosine_similarity
        return torch.stack([cos(x[i], f_exp[j], dim=0) for j in range(n + more) if j != i])

    tau = torch.stack([cosines(f_exp, i) for i in range(n)]).std()
    for i, kl in enumerate(choose.relational_divergence(f, f_exp)):
        q, p = (log_softmax(cosines(x, i) / tau, dim=0) for x in (f_exp, f))
        assert float(kl) == pytest.approx(float((q.exp() * (q - p)).sum()))
    assert choose.relational_divergence(3 * f_exp[:n], f_exp).abs().max() < 1e-12


def test_similarities_to_given_classes_take_the_place_of_relations(few):
    given = experiment(torch.float32, tasks=["a"], count=16, batch=16)
    x = given["batches"]["a"][0]["pixel_values"][parts_of(16)[2]]
    classes = torch.randn(3, given["base"].config.hidden_size, generator=seeded(2))
    divergence = calibrate(**given, labels={"a": classes}).choice.divergence
    with torch.no_grad():
        features = [m(x).pooler_output for m in (given["experts"]["a"], given["merged"])]
    z_exp, z = (nn.functional.normalize(f, dim=1) @ classes.T for f in features)
    q, p = (log_softmax(scores / z_exp.std(), dim=1) for scores in (z_exp, z))
    expected = (q.exp() * (q - p)).sum(1).mean()
    assert divergence["merged"]["a"] == pytest.approx(float(expected), rel=1e-4)
    by_task = [{"a": classes[:, 1:]}, {"a": classes[:1]}, {"a": ["cat", "dog"]}, {"b": classes}]
    for wrong in (["cat", "dog"], classes, *by_task):
        with pytest.raises(FeatCalError, match="labels"):
            calibrate(**given, labels=wrong)
    with pytest.raises(FeatCalError, match="labels"):
        calibrate(**given, settings=PAPER, labels={"a": classes})


def test_halves_are_of_samples_and_not_of_batches():
    given = experiment(count=16, batch=16)
    whole = calibrate(**given, settings=STREAM).model
    for own in given["batches"].values():
        own[:] = [{"pixel_values": x} for x in own[0]["pixel_values"].split(3)]
    other = calibrate(**given, settings=STREAM).model
    torch.testing.assert_close(whole.state_dict(), other.state_dict(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_a_language_model_in_a_folder_is_judged_as_in_memory(family, tmp_path, few_samples):
    """Its scores are made from the language head while the model has its weights."""
    given = families.experiment(FAMILIES[family], dtype=torch.float32)
    ours = calibrate(**given).choice.divergence
    streamed = calibrate(**written(given, tmp_path), out=tmp_path / "out").choice.divergence
    for name, tasks in ours.items():
        for task, value in tasks.items():
            assert streamed[name][task] == pytest.approx(value, rel=1e-3, abs=1e-6)


TOKENS = families.GROUPED | {"bos_token_id": 0, "eos_token_id": 1}
POSITIONS = TEXT | {"relative_attention": True, "pos_att_type": ["p2c"], "share_att_key": True}
MAMBA = {"vocab_size": TEXT["vocab_size"], "hidden_size": 32, "num_hidden_layers": 2}
LEFT = {  # layers, why they cannot be solved, and their names
    "CohereForCausalLM": (TOKENS, "model.layers", "CohereLayerNorm", ["norm"]),
    "DebertaModel": (POSITIONS, "encoder.layer", "LayerNorm", ["LayerNorm", "pos_", "_bias"]),
    "MambaForCausalLM": (MAMBA, "backbone.layers", "no positional", ["dt_proj", "A_", "D", "conv"]),
    "DebertaV2Model": (POSITIONS, "encoder.layer", "ran twice", ["query_proj", "key_proj"]),
}


@pytest.mark.parametrize("name", LEFT)
def test_the_default_leaves_layers_alone_that_cannot_be_solved(name, few_samples, monkeypatch):
    sizes, blocks, why, ends = LEFT[name]
    given, seen = families.experiment(families.family(name, sizes, blocks)), noted(monkeypatch)
    with pytest.raises(FeatCalError, match=why):
        calibrate(**given, settings=PAPER)
    assert calibrate(**given).choice.chosen in (*FEW, choose.MERGED)
    before, own = (dict(m.named_parameters()) for m in (given["merged"], seen[0]["paper"]))
    same = {n for n, p in own.items() if n.startswith(blocks) and torch.equal(p, before[n])}
    assert same == {n for n in own if n.startswith(blocks) and any(end in n for end in ends)}
