"""RegMean, RegMean++ and LOT against whole forwards with hooks, family by family."""

import copy

import families
import numpy as np
import plain
import pytest
import tiny
import torch
from test_methods import double
from torch import nn

from featcal.errors import SingularGram
from featcal.merging.merge import merge
from featcal.merging.methods.regression import lot_matrix, lot_scale

FAMILIES = ("t5", "clip", "llama", "gpt2")


def inputs(model, paths, batches):
    """What reaches each module in whole forwards, padding left out: rows by path."""
    rows = {
        path: [plain.kept(model, b, path, plain.inputs(model, b, path), False)[0] for b in batches]
        for path in paths
    }
    return {path: torch.from_numpy(np.concatenate(parts)) for path, parts in rows.items()}


def linears(model, below):
    kinds = (nn.Linear, families.tf.pytorch_utils.Conv1D)
    modules = model.get_submodule(below).named_modules(prefix=below)
    return [name for name, module in modules if isinstance(module, kinds)]


def upright(module):
    return module.weight.detach() if isinstance(module, nn.Linear) else module.weight.detach().T


def solve(merged, base, experts, rows, path, rule, factor):
    """The weight of one linear by normal equations on rows; written into `merged`."""
    X = [rows[task][path] for task in sorted(experts)]
    W = [upright(experts[task].get_submodule(path)) for task in sorted(experts)]
    W0 = upright(base.get_submodule(path))
    if rule == "lot":
        target = torch.cat([x @ (w - W0).T for x, w in zip(X, W, strict=True)])
        weight = W0 + torch.linalg.lstsq(torch.cat(X), target, driver="gelsd").solution.T
    else:
        eye = torch.eye(X[0].shape[1], dtype=X[0].dtype)
        G = [x.T @ x / len(x) * (factor + (1 - factor) * eye) for x in X]
        weight = (torch.linalg.inv(sum(G)) @ sum(g @ w.T for g, w in zip(G, W, strict=True))).T
    with torch.no_grad():
        upright(merged.get_submodule(path)).copy_(weight)


def by_whole_forwards(arguments, stacks, rule, factor=None):
    base, experts, batches = arguments["base"], arguments["experts"], arguments["batches"]
    merged = tiny.averaged(list(experts.values()))
    blocks = [f"{p}.{i}" for p in stacks.values() for i in range(len(base.get_submodule(p)))]
    if rule != "regmean++":
        paths = [path for block in blocks for path in linears(base, block)]
        rows = {task: inputs(experts[task], paths, batches[task]) for task in experts}
        for path in paths:
            solve(merged, base, experts, rows, path, rule, factor)
        return merged
    after = ("final_layer_norm", "lm_head", "model.norm", "post_layernorm", "ln_f", "projection")
    with torch.no_grad():
        for name, p in merged.named_parameters():
            inside = name.startswith(tuple(f"{block}." for block in blocks))
            if any(word in name for word in after) and not inside:
                p.copy_(base.get_parameter(name))
    for block in blocks:
        rows = {}
        for task, expert in experts.items():
            mixed = copy.deepcopy(merged)
            mixed.get_submodule(block).load_state_dict(expert.get_submodule(block).state_dict())
            rows[task] = inputs(mixed, linears(base, block), batches[task])
        for path in linears(base, block):
            solve(merged, base, experts, rows, path, rule, factor)
    return merged


def own_merge(method, arguments, **settings):
    given = {name: arguments[name] for name in ("base", "experts", "batches")}
    return merge(method, **given, **settings)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["regmean", "regmean++", "lot"])
def test_a_model_equals_whole_forwards_with_hooks(monkeypatch, family, method):
    arguments = families.experiment(families.FAMILIES[family])
    families.without_float32(monkeypatch, arguments["base"])
    factor = 0.95 if family == "clip" else 0.1  # images; texts
    oracle = by_whole_forwards(arguments, families.FAMILIES[family].stacks, method, factor)
    checked = []  # that a replay equals the model's forward
    monkeypatch.setattr("featcal.calibration.features.check_plan", lambda *a: checked.append(a))
    ours = own_merge(method.replace("++", "_plus_plus"), arguments)
    assert len(checked) == 1
    limit = 1e-8 if method == "lot" else 1e-9
    for name, p in ours.named_parameters():
        if method != "lot" or p.dim() == 2:  # LOT's norms are no mean
            assert torch.allclose(p, oracle.get_parameter(name), rtol=0, atol=limit), name


def test_lot_of_few_tokens_inverts_no_rounding_of_float32():
    kinds = (torch.float32, torch.float64)
    one, other = (own_merge("lot", tiny.experiment(kind, count=1, batch=1)) for kind in kinds)
    assert tiny.difference(one, other) < 1e-3


def test_lots_norms_weigh_task_vectors_by_squared_features():
    arguments = tiny.experiment()
    ours, path = own_merge("lot", arguments), "encoder.layers.0.layer_norm1"
    base, total, weight = arguments["base"].get_parameter(f"{path}.weight").detach(), 0.0, 0.0
    for task, expert in arguments["experts"].items():
        x = inputs(expert, [path], arguments["batches"][task])[path]
        squares = nn.functional.layer_norm(x, x.shape[-1:], eps=1e-5).square().sum(0)
        total = total + squares * (expert.get_parameter(f"{path}.weight").detach() - base)
        weight = weight + squares
    want = {f"{path}.weight": base + total / weight}
    mean = tiny.averaged(list(arguments["experts"].values()))
    averaged = ("embeddings.class_embedding", "post_layernorm.weight", f"{path}.bias")
    want |= {name: mean.get_parameter(name) for name in averaged}
    for name, tensor in want.items():
        assert torch.allclose(ours.get_parameter(name), tensor, rtol=0, atol=1e-12), name
    other = families.family("DebertaModel", tiny.TEXT, "encoder.layer")  # neither Layer nor RMSNorm
    arguments, path = families.experiment(other), "encoder.layer.0.output.LayerNorm.weight"
    mean = tiny.averaged(list(arguments["experts"].values())).get_parameter(path)
    assert torch.allclose(own_merge("lot", arguments).get_parameter(path), mean, atol=1e-12)


def test_lot_is_zero_in_directions_without_features_or_below_rtol():
    vectors = [double([4, 5]), double([0, 7])]
    for weak, rtol in ((0.0, None), (1e-6, 1e-5)):
        grams = [torch.diag(double(1, weak)), torch.diag(double(3, weak))]
        assert torch.allclose(lot_matrix(grams, vectors, rtol), double([1, 0]), atol=1e-14)
    scale = lot_scale([double(1, 0), double(3, 0)], [double(1, 0), double(3, 0)])
    assert scale.tolist() == [2.5, 0.0]


def test_too_few_tokens_are_refused_by_regmean_without_shrinking():
    with pytest.raises(SingularGram, match=r"encoder\.layers\.0\.self_attn\.k_proj.* 32 features"):
        own_merge("regmean", tiny.experiment(tasks=("mnist",), count=1, batch=1), off_diagonal=1.0)
