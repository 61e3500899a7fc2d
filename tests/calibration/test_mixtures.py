"""Mixtures of experts in packed tensors, solved as linears on the tokens that the router sends."""

import json

import pytest
import torch
import transformers as tf
from families import GROUPED, text
from safetensors.torch import load_file
from tiny import PAPER, averaged, difference, make, shifted

from featcal import calibrate
from featcal.calibration import block as block_module
from featcal.errors import BadPlan
from featcal.models.load import load_model, save_model

KINDS = {
    "phimoe": (tf.PhimoeForCausalLM, {"num_local_experts": 4}),
    "mixtral": (tf.MixtralForCausalLM, {"num_local_experts": 4}),
    "qwen3": (tf.Qwen3MoeForCausalLM, {"num_experts": 4, "moe_intermediate_size": 24}),
}


def mixture(name):
    kind, more = KINDS[name]
    return kind(kind.config_class(**GROUPED, **more, num_experts_per_tok=2))


@pytest.fixture(params=KINDS)
def given(request, monkeypatch):
    """Base, two experts, their average and batches; every expert that gets a token is solved."""
    monkeypatch.setattr(block_module, "FEWEST_TOKENS", 1)
    base = make(lambda: mixture(request.param), dtype=torch.float64)
    base.config._experts_implementation = "eager"  # the others know no float64
    experts = {task: shifted(base, i + 1) for i, task in enumerate("ab")}
    batches = {task: text(10 * i, batch=3) for i, task in enumerate("ab")}
    merged = averaged(list(experts.values()))
    return {"base": base, "experts": experts, "batches": batches, "merged": merged}


CHANGES = [{"order": "stale", "norm": False}, {"order": "sites", "modules": ("down_proj",)}]
CHANGES += [{"order": "sites", "residual": 1.0, "affine": "joint"}]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_the_result_does_not_depend_on_how_samples_are_batched(given, changes):
    settings = PAPER.but(**changes)
    parts = ({task: text(10 * i, batch=size) for i, task in enumerate("ab")} for size in (4, 6))
    one, other = (calibrate(**given | {"batches": b}, settings=settings).model for b in parts)
    assert difference(one, other) < 1e-4  # norms and routers compute in float32
    assert difference(one, given["merged"]) > 1e-2


def routed(model, batches, number):
    """Rows that reach the first block's experts, and which of them the router sends to one expert."""
    seen, experts = [], model.model.layers[0].mlp.experts
    with experts.register_forward_pre_hook(lambda _, args: seen.append(args[:2])), torch.no_grad():
        for batch in batches:
            model(**batch)
    pairs = zip(seen, (batch["attention_mask"].flatten().bool() for batch in batches), strict=True)
    return [(x, (chosen == number).any(1) & mask) for (x, chosen), mask in pairs]


def test_an_experts_linears_solve_the_ridge_of_its_tokens(given):
    """Eq. 17 by hand, in float64, on the rows that the merged model's router sends."""

    def weight(model):
        return model.model.layers[0].mlp.experts.gate_up_proj[number].detach()

    result = calibrate(**given, settings=PAPER)
    number = max(range(4), key=lambda n: result.blocks[0].experts[f"mlp.experts.{n}"])
    base, merged, tokens = weight(given["base"]), weight(given["merged"]), 0
    left = 0.05 * torch.eye(len(base[0])).double()
    right = 0.05 * (base + 2 * (merged - base))
    for task, expert in given["experts"].items():
        G, C, batches = torch.zeros_like(left), torch.zeros_like(left), given["batches"][task]
        ours, theirs = (routed(model, batches, number) for model in (given["merged"], expert))
        for (x, rows), (y, _) in zip(ours, theirs, strict=True):
            G, C = G + x[rows].T @ x[rows], C + x[rows].T @ y[rows]
            tokens += int(rows.sum())
        left = left + G / G.norm()
        right = right + weight(expert) @ (0.3 * C + 0.7 * G).T / G.norm()
    assert result.blocks[0].experts[f"mlp.experts.{number}"] == tokens > 0
    want = torch.linalg.solve(left, right.T).T
    assert torch.allclose(weight(result.model), want, rtol=0, atol=1e-10)
    assert not torch.allclose(want, merged, atol=1e-3)


def test_an_expert_with_too_few_tokens_keeps_its_anchor_and_the_router_stays(given, monkeypatch):
    monkeypatch.setattr(block_module, "FEWEST_TOKENS", 10**6)
    models = given["base"], given["merged"], calibrate(**given, settings=PAPER).model
    for number in range(2):
        base, merged, ours = (model.model.layers[number].mlp for model in models)
        for name in ("gate_up_proj", "down_proj"):
            kept = 2 * getattr(merged.experts, name) - getattr(base.experts, name)  # rho is 2
            assert torch.allclose(getattr(ours.experts, name), kept, rtol=0, atol=1e-12)
        assert torch.equal(*((getattr(m, "gate", None) or m.router).weight for m in (ours, merged)))
    assert not torch.equal(ours.experts.gate_up_proj, merged.experts.gate_up_proj)


@pytest.mark.parametrize("form", ["packed", "of the hub"])
def test_folders_equal_modules_and_load_with_the_same_logits(given, tmp_path, form):
    models = {"base": given["base"], "merged": given["merged"], **given["experts"]}
    for name, model in models.items():
        save_model(model.float(), tmp_path / name)
        if form != "packed":  # as transformers writes it: a tensor for each expert
            model.save_pretrained(tmp_path / name)
    module, batches = calibrate(**given, settings=PAPER).model, given["batches"]
    folders = {name: tmp_path / name for name in ("base", "merged")}
    folders |= {"experts": {task: tmp_path / task for task in "ab"}, "batches": batches}
    result = calibrate(**folders, settings=PAPER, out=tmp_path / "new")
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
    results = loaded, load_model(tmp_path / "new"), module
    with torch.no_grad():
        logits, same, near = (model(**batches["a"][0]).logits for model in results)
    assert torch.equal(logits, same) and torch.allclose(logits, near, rtol=1e-4, atol=1e-5)
    there, here = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "new"))
    assert there.keys() == here.keys()
    blocks = json.loads((tmp_path / "new/featcal.json").read_text())["blocks"]
    real = sum(int(b["attention_mask"].sum()) for own in batches.values() for b in own)
    for block in blocks:  # each token goes to two
        assert sum(block["experts"].values()) == 2 * real
    assert [block.experts for block in result.blocks] == [block["experts"] for block in blocks]


def test_experts_that_compute_otherwise_are_refused_by_name(given, monkeypatch):
    kind = type(given["merged"].model.layers[0].mlp.experts)
    monkeypatch.setattr(kind, "forward", lambda self, x, index, weights: x * 2)
    with pytest.raises(BadPlan, match=r"of model\.layers\.0\.mlp\.experts differ from plain"):
        calibrate(**given, settings=PAPER)
