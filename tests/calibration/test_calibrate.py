"""The whole method on pico models against a plain numpy version, and what is refused."""

import copy
import json
from contextlib import nullcontext
from unittest.mock import Mock

import families
import numpy as np
import plain
import pytest
import torch
from accelerate import Accelerator
from families import FAMILIES
from tiny import PAPER, TASKS, clip, difference, experiment, images, refilled, same_bits

import featcal.calibration.observe as observe
import featcal.models.load
from featcal import BlockPlan, Calibration, Stack, calibrate, compare, merge
from featcal.card import BlockRecord
from featcal.core.moments import every_token
from featcal.errors import BadBatches, BadSetting, NotFinite, SingularGram
from featcal.models.load import load_vision
from reproduction.stages.measure import model_drift

ALL = {"residual": 0.7, "order": "sites", "affine": "joint", "ridge": 1e-3, "interpolation": 0.9}
VARIANTS = [{}, {"ridge": 1e-3, "anchor_blend": 0.5, "interpolation": 0.9}, {"order": "stale"}, ALL]
VARIANTS += [{"task_weights": "uniform"}, {"bias": False}, {"norm": False}, {"residual": 0.5}]
VARIANTS += [{"order": "sites"}, {"affine": "joint"}]
WRAPS = [torch.compile, torch.nn.DataParallel, lambda model: model.compile() or model]
WRAPS += [lambda m: vars(m).update(forward=torch.compile(m.forward)) or m]
WRAPS += [lambda m: setattr(m.encoder, "layers", torch.nn.Sequential(*m.encoder.layers)) or m]
WRAPS += [lambda m: Accelerator(cpu=True, mixed_precision="bf16").prepare_model(m)]
STATEFUL = type("Stateful", (torch.nn.Module,), {"get_extra_state": lambda _: {"steps": 1}})
WRAPS += [lambda m: m.add_module("own", STATEFUL()) or m]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_calibrated_model_equals_the_plain_version(changes):
    given, settings = experiment(), PAPER.but(**changes)
    expected = plain.calibrate(**given, settings=settings, paths=["encoder.layers"])
    assert difference(calibrate(**given, settings=settings).model, expected) < 1e-9


def test_order_of_tasks_and_context_change_no_bit():
    given = experiment(torch.float32)
    turned = given | {part: dict(reversed(given[part].items())) for part in ("experts", "batches")}
    first = calibrate(**given, settings=PAPER)
    with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        other = calibrate(**turned, settings=PAPER)
    assert same_bits(first.model, other.model) and first.blocks == other.blocks


@pytest.mark.parametrize("name", ["t5", "llama", "auto"])
def test_batches_that_are_filled_again_and_again_change_no_bit(name):
    """They would be kept as masks, for a second stack, or for the choice of settings."""
    auto = name == "auto"
    given = experiment(count=16, batch=8) if auto else families.experiment(FAMILIES[name])
    given["settings"] = "auto" if auto else PAPER
    streams = {task: refilled(batches) for task, batches in given["batches"].items()}
    first, other = (calibrate(**given | more).model for more in ({}, {"batches": streams}))
    assert same_bits(first, other)


@pytest.mark.parametrize("wrap", WRAPS)
def test_wrapped_and_compiled_modules_are_used_as_what_they_wrap(wrap):
    own, plain, results = experiment(torch.float32), experiment(torch.float32), []
    own |= {role: wrap(own[role]) for role in ("merged", "base")}
    own["experts"] = {task: wrap(expert) for task, expert in own["experts"].items()}
    for given in (own, plain):
        made = calibrate(**given, settings=PAPER).model
        models = made, merge("average", given["base"], given["experts"])
        rows = [model(**given["batches"]["dtd"][0]).pooler_output.tolist() for model in models]
        agreements = compare({"m": given["merged"]}, given["experts"], given["batches"])
        results.append((rows, [*map(type, models)], agreements))
    assert results[0] == results[1]


def test_given_models_and_weights_outside_the_blocks_are_not_modified():
    given = experiment()
    models = [given["merged"], given["base"], *given["experts"].values()]
    for model in models:
        model.train()
    before = copy.deepcopy(models)
    result = calibrate(**given, settings=PAPER)
    assert all(same_bits(a, b) for a, b in zip(models, before, strict=True))
    assert all(module.training for model in models for module in model.modules())
    assert not result.model.training and result.folder is None
    for part in ("embeddings", "pre_layrnorm", "post_layernorm"):
        assert same_bits(result.model.get_submodule(part), given["merged"].get_submodule(part))


def test_records_hold_the_drift_after_each_block():
    given, lines = experiment(), []
    result = calibrate(**given, settings=PAPER, progress=lines.append)
    assert [record.name for record in result.blocks] == ["vision.00", "vision.01"]
    assert all(record.tokens == 3 * 6 * 5 and record.conditioning >= 1 for record in result.blocks)
    after = [model_drift(result.model, given["experts"][t], given["batches"][t]) for t in TASKS]
    for index, record in enumerate(result.blocks):
        expected = np.mean([a[1 + index]["relative_drift"] for a in after])
        assert record.relative_drift == pytest.approx(expected, rel=1e-5)
    assert len(lines) == 2 and lines[0].startswith("vision.00  3 tasks  drift")


def test_block_drift_can_be_switched_off(tmp_path):
    given, lines = experiment() | {"settings": PAPER}, []
    measured = calibrate(**given)
    without = calibrate(**given, block_drift=False, progress=lines.append)
    assert same_bits(measured.model, without.model)
    assert [(block.relative_drift, block.cosine) for block in without.blocks] == [(None, None)] * 2
    assert len(lines) == 2 and not any("drift" in line for line in lines)
    folder = calibrate(**given, out=tmp_path / "calibrated", block_drift=False).folder
    assert "| block |" not in (folder / "README.md").read_text()


def test_model_drift_equals_numpy():
    given = experiment()
    models, batches = (given["merged"], given["experts"]["dtd"]), given["batches"]["dtd"]
    records = model_drift(*models, batches)
    assert [r["block"] for r in records] == ["embeddings", "00", "01"]
    with torch.no_grad():
        h, h_exp = (torch.cat([m(**b).last_hidden_state for b in batches]).numpy() for m in models)
    norm, cls, cls_exp = np.linalg.norm, h[:, 0], h_exp[:, 0]
    cosine = (cls * cls_exp).sum(1) / norm(cls, axis=1) / norm(cls_exp, axis=1)
    expected = {"relative_drift": norm(h - h_exp) / norm(h_exp), "cosine": cosine.mean()}
    expected |= {"l2": norm(cls - cls_exp, axis=1).mean(), "count": 6}
    for name, value in expected.items():
        assert records[-1][name] == pytest.approx(value, rel=1e-12)


def test_plan_and_token_weights_can_be_given():
    given = experiment()
    by_plan = calibrate(**given, settings=PAPER, plan=BlockPlan(Stack("tower", "encoder.layers")))
    by_rule = calibrate(**given, settings=PAPER, token_weights=every_token)
    assert by_plan.blocks[0].name == "tower.00" and same_bits(by_plan.model, by_rule.model)
    assert difference(by_rule.model, calibrate(**given, settings=PAPER).model) > 1e-4
    assert "BlockPlan" in refused(BadSetting, given | {"plan": Stack("tower", "encoder.layers")})


def spoil(model, name, value):
    """A copy with one broken number."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = value
    return model


def refused(error, given, settings=PAPER):
    with pytest.raises(error) as caught:
        calibrate(**given, settings=settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("role", "value"), [("merged", torch.nan), ("base", torch.inf), ("mnist", torch.nan)]
)
def test_broken_number_in_a_checkpoint_names_the_model_and_the_tensor(role, value):
    given, name = experiment(), "encoder.layers.1.mlp.fc2.weight"
    place = given["experts"] if role == "mnist" else given
    place[role] = spoil(place[role], name, value)
    message = refused(NotFinite, given)
    assert role in message and name in message


def pixels(*shape, value=0.0):
    return {"pixel_values": torch.full(shape, value, dtype=torch.float64)}


@pytest.mark.parametrize("settings", [PAPER, "auto"])
@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ([], "empty"),
        ([pixels(0, 3, 16, 16)], "empty"),
        (pixels(1), "expected a list"),
        ([torch.zeros(1, 3, 16, 16)], "expected a mapping"),
        ([{"pixels": torch.zeros(1)}], "no tensor 'pixel_values' (it holds: pixels, a Tensor)"),
        ([{"pixel_values": np.zeros((8, 3, 16, 16))}], "it holds: pixel_values, a ndarray"),
        ([pixels(1, 3, 9, 9)], "batch 0 is refused by the model"),
        ([*images(1), pixels(1, 3, 16, 16, value=torch.inf)], "batch 2 holds NaN or Inf"),
        (None, "['svhn']: is missing for its expert; did you mean 'svnh'"),
    ],
)
def test_unusable_batches_name_the_task_and_what_is_wrong(bad, says, settings):
    given = experiment()
    if bad is None:
        given["batches"]["svnh"] = given["batches"].pop("svhn")
    else:
        given["batches"]["svhn"] = bad
    message = refused(BadBatches, given, PAPER if "refused" in says else settings)
    assert "svhn" in message and says in message and "?." not in message


@pytest.mark.parametrize("more", [{}, {"ridge": "auto"}, {"ridge": "auto", "order": "sites"}])
def test_features_that_overflow_after_the_first_batch_have_no_solution(more):
    given = experiment()
    given["batches"]["svhn"][1]["pixel_values"][0] = 1e308
    assert "no finite solution" in refused(SingularGram, given, PAPER.but(**more))
    given["batches"]["dtd"][0]["pixel_values"][0] = 1e308
    assert "'encoder.layers' is NaN" in refused(BadBatches, given, PAPER.but(**more))


def test_tasks_without_names_and_samples_without_tokens_or_halves_are_refused():
    given = experiment(tasks=["a"], count=1)
    numbered = {part: dict(enumerate(given[part].values())) for part in ("experts", "batches")}
    assert "experts: [0] cannot be used" in refused(BadSetting, given | numbered)
    assert "has one sample; give two" in refused(BadBatches, given, PAPER.but(ridge="auto"))
    given["base"].float()  # gives anchors only
    calibrate(**given, settings=PAPER)
    given["merged"].float()
    assert "models in float64: [\"expert 'a'\"]" in refused(BadSetting, given)
    given = families.experiment(FAMILIES["llama"])
    given["merged"].config.vocab_size = 4  # some models have further rows
    given["batches"]["b"][1]["attention_mask"][2] = 0
    assert "sample 2 of batch 1 is all padding" in refused(BadBatches, given, "auto")
    given["batches"]["b"][1]["input_ids"][0, 0] = given["base"].config.vocab_size  # as many as rows
    assert "but the model has" in refused(BadBatches, given, "auto")


def test_a_folder_appears_whole_or_the_older_one_stays(tmp_path, monkeypatch):
    own, fails = {"settings": PAPER}, Mock(side_effect=OSError("broken disk"))
    how = own | {"out": tmp_path / "out"}
    with monkeypatch.context() as patch, pytest.raises(OSError, match="broken disk"):
        patch.setattr(featcal.models.load, "write_config", fails)
        calibrate(**experiment(torch.float32), **how)
    assert [p.name for p in tmp_path.iterdir()] == [".out.unfinished"]  # the solved blocks
    result, in_memory = (calibrate(**experiment(torch.float32), **each) for each in (how, own))
    folder = result.folder
    assert result.model is None and [p.name for p in tmp_path.iterdir()] == ["out"]
    assert same_bits(load_vision(folder), in_memory.model)
    record = json.loads((folder / "featcal.json").read_text())
    assert Calibration(**record["settings"]) == PAPER
    assert [BlockRecord(**block) for block in record["blocks"]] == in_memory.blocks == result.blocks
    before, given = {p.name: p.read_bytes() for p in folder.iterdir()}, experiment(torch.float32)
    given["experts"]["dtd"] = spoil(clip(dtype=torch.float32), "post_layernorm.bias", torch.nan)
    with pytest.raises(NotFinite, match="dtd"):
        calibrate(**given, **how)
    assert before == {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("more", [{}, {"residual": 1.0}, {"ridge": "auto"}, {"affine": "joint"}])
def test_products_with_each_token_in_place_of_the_sums_change_nothing(more, monkeypatch):
    given, results = experiment(), []
    for few in (0, 1000):
        monkeypatch.setattr(observe, "FEW_TOKENS", few)
        results.append(calibrate(**given, settings=PAPER.but(**more)).model)
    assert 0 < difference(*results) < 1e-11


WAYS = [{}, {"order": "sites"}, {"order": "sites", "residual": 1.0}, {"residual": 1.0}]


@pytest.mark.parametrize("more", WAYS, ids=str)
def test_passes_that_end_where_all_is_seen_give_the_bits_of_whole_passes(more, monkeypatch):
    given, own, asked = experiment(torch.float32, batch=2), observe.capture, []
    given["settings"] = PAPER.but(**more)
    left = calibrate(**given)

    def whole_passes(*arguments):
        asked.append(arguments[-1])
        return own(*arguments[:-1], True)

    monkeypatch.setattr(observe, "capture", whole_passes)
    result = calibrate(**given)
    assert not all(asked)
    assert same_bits(left.model, result.model) and left.blocks == result.blocks


@pytest.mark.parametrize("name", ["clip_text", "llama", "gpt2"])
def test_experts_own_outputs_give_the_result_of_outputs_computed_anew(name, monkeypatch):
    """With a bias, without one, and with GPT-2's transposed weights."""
    monkeypatch.setattr(observe, "FEW_TOKENS", 0)
    monkeypatch.setattr(observe, "FOLDED_SHARE", 10.0)
    given = families.experiment(FAMILIES[name])
    kept = calibrate(**given, settings=PAPER).model
    monkeypatch.setattr(observe, "module_outputs", lambda *_: nullcontext({}))
    anew = calibrate(**given, settings=PAPER).model
    monkeypatch.setattr(observe, "FOLDED_SHARE", 0.0)
    unfolded = calibrate(**given, settings=PAPER).model
    assert difference(kept, anew) < 1e-12 and difference(kept, unfolded) < 1e-12
    assert not same_bits(kept, unfolded)
