"""REPAIR, SVC, SWUDI and adapters whose task is inferred: plain loops, and what they must reach."""

from pathlib import Path
from types import SimpleNamespace

import checkpoints
import families
import tiny
import torch
from safetensors.torch import load_file
from test_methods import COUNT, matrices

from featcal.baselines.adapters import Adapters
from featcal.baselines.corrections import MeanShift
from featcal.merging.merge import merge
from featcal.merging.methods.matrices import Interference
from featcal.models.load import save_model
from reproduction.field import repair
from reproduction.field.repair import svc, svc_matrix
from reproduction.field.swudi import filtered_minimum
from reproduction.studies.field import FieldStudy, inferred


def plain_moments(model, batch, name):
    """Mean and standard deviation of one linear's outputs over all tokens."""
    outputs = []
    linear = model.get_submodule(name)
    handle = linear.register_forward_hook(lambda module, args, out: outputs.append(out))
    with torch.no_grad():
        model(**batch)
    handle.remove()
    (output,) = outputs
    rows = [row for sample in output for row in sample]
    mean = sum(rows) / len(rows)
    return mean, (sum((row - mean) ** 2 for row in rows) / len(rows)).sqrt()


def test_repaired_linears_have_the_experts_mean_and_deviation_on_all_tasks_samples(tmp_path):
    experts, base = {"b": tiny.clip(1), "a": tiny.clip(2)}, tiny.clip(0)
    merged = merge("average", base, experts)
    before = {name: p.detach().clone() for name, p in merged.named_parameters()}
    batch = repair.all_samples({"b": tiny.images(1, 5, 5), "a": tiny.images(2, 5, 5)})
    assert len(batch["pixel_values"]) == 10
    targets = repair.output_moments(experts.values(), batch, "cpu")
    first = repair.linears(merged)[0]
    mean, deviation = plain_moments(merged, batch, first)
    repaired = repair.renormalised(merged, targets, batch, out=tmp_path / "out")
    for name in repair.linears(repaired):
        want = [plain_moments(expert, batch, name) for expert in experts.values()]
        for actual, *moments in zip(plain_moments(repaired, batch, name), *want, strict=True):
            assert torch.allclose(actual, sum(moments) / len(moments), rtol=0, atol=1e-9), name
    factor = targets[first][1] / deviation
    weight, bias = (repaired.get_parameter(f"{first}.{part}") for part in ("weight", "bias"))
    old, shift = before[f"{first}.weight"], targets[first][0] - factor * mean
    for row in range(len(factor)):
        assert torch.allclose(weight[row], factor[row] * old[row], rtol=0, atol=1e-12)
    assert torch.allclose(bias, factor * before[f"{first}.bias"] + shift, rtol=0, atol=1e-12)
    untouched = [name for name in before if "norm" in name or "embed" in name]
    assert untouched and all(torch.equal(repaired.get_parameter(n), before[n]) for n in untouched)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_padding_counts_nowhere():
    texts = [torch.tensor([[5, 6, 7]]), torch.tensor([[8, 9, 4, 3, 2]])]
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in texts]
    model = tiny.make(families.FAMILIES["bert"].build, 1)
    batch = repair.all_samples({"a": batches[:1], "b": batches[1:]})
    moments = repair.output_moments([model], batch, "cpu")
    name, outputs = repair.linears(model)[-1], []
    model.get_submodule(name).register_forward_hook(lambda m, a, out: outputs.append(out[0]))
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    assert torch.allclose(moments[name][0], torch.cat(outputs).mean(0), rtol=0, atol=1e-10)


def test_swudi_s_filter_is_gradient_flow_and_ends_at_the_closed_form():
    vectors = [torch.randn(6, 8, generator=tiny.seeded(s), dtype=torch.float64) for s in range(3)]
    problem, steps, eta = Interference.of(vectors), 20_000, 3.0
    tau = torch.zeros(6, 8, dtype=torch.float64)
    for _ in range(steps):
        tau = tau - eta / steps * (tau @ problem.G - problem.R)
    assert torch.allclose(filtered_minimum(problem, eta), tau, rtol=0, atol=1e-3)
    want, (sigma, V) = torch.zeros(6, 8, dtype=torch.float64), torch.linalg.eigh(problem.G)
    for s, v in zip(sigma, V.T, strict=True):
        want += (1 - torch.exp(-eta * s)) / s * torch.outer(problem.R @ v, v)
    assert torch.allclose(filtered_minimum(problem, eta), want, rtol=0, atol=1e-10)
    assert torch.allclose(filtered_minimum(problem, 1e9), problem.minimum(), rtol=0, atol=1e-8)


def test_a_direction_without_any_expert_s_change_stays_the_base_s():
    vectors = [torch.zeros(4, 5, dtype=torch.float64) for _ in range(2)]
    vectors[0][:, 0] = 1.0
    minimum = filtered_minimum(Interference.of(vectors), 100.0)
    assert torch.isfinite(minimum).all() and not minimum[:, 1:].any()


def test_swudi_merges_matrices_by_its_filter_and_everything_else_by_the_mean(tmp_path):
    base, experts = tiny.clip(0), {"a": tiny.clip(1), "b": tiny.clip(2)}
    merged = merge("swudi", base, experts, eta=10.0)
    name, bias = "encoder.layers.0.mlp.fc1.weight", "encoder.layers.0.mlp.fc1.bias"
    start, *weights = (m.get_parameter(name).detach() for m in (base, *experts.values()))
    want = start + filtered_minimum(Interference.of([weight - start for weight in weights]), 10.0)
    assert torch.allclose(merged.get_parameter(name), want, rtol=0, atol=1e-12)
    mean = merge("average", base, experts).get_parameter(bias)
    assert torch.equal(merged.get_parameter(bias), mean)
    save_model(merged, tmp_path / "out")


def test_the_inferred_task_is_that_of_the_nearest_mean_whatever_the_true_one():
    shifts = {"a": torch.tensor([[10.0, 0.0]]), "b": torch.tensor([[0.0, 20.0]])}
    adapters = Adapters(MeanShift(), 0, {task: {"shift": shift} for task, shift in shifts.items()})
    means = {"a": torch.tensor([0.0, 0.0]), "b": torch.tensor([4.0, 4.0])}
    rows = torch.tensor([[0.5, 0.0], [3.0, 4.0], [1.0, 1.0]])
    want = []
    for row in rows:
        task = min(means, key=lambda task: float((row - means[task]).norm()))
        want.append(row + shifts[task][0])
    for true in shifts:
        assert torch.equal(inferred(adapters, means, true, rows), torch.stack(want))


def test_svc_is_algorithm_1_direction_by_direction():
    vectors = matrices()
    tau, want = sum(vectors), torch.zeros(10, 12, dtype=torch.float64)
    U, S, Vt = torch.linalg.svd(tau, full_matrices=False)
    for u, s, v in zip(U.T, S, Vt, strict=True):
        shares = [float((u @ tau) @ (u @ t) / (u @ t).square().sum()) for t in vectors]
        want += COUNT / sum(max(0.1, share) for share in shares) * s * torch.outer(u, v)
    assert torch.allclose(svc_matrix(tau, vectors, 0.1), want, rtol=0, atol=1e-10)


def test_svc_undoes_what_equal_experts_add_up_and_leaves_one_expert_as_it_is():
    (vector,) = matrices(1)
    assert torch.allclose(svc_matrix(3 * vector, [vector] * 3, 0.1), vector, rtol=0, atol=1e-12)
    models = {"a": tiny.clip(1), "b": tiny.clip(1)}
    twice = merge("task_arithmetic", tiny.clip(), models, scale=1.0)  # adds the same change twice
    state = svc(twice, tiny.clip(), models).state_dict()
    expert, name = tiny.clip(1).state_dict(), "encoder.layers.0.mlp.fc1"
    assert torch.allclose(state[f"{name}.weight"], expert[f"{name}.weight"], rtol=0, atol=1e-10)
    assert torch.equal(state[f"{name}.bias"], twice.state_dict()[f"{name}.bias"])


def test_conv1d_weights_are_calibrated_as_outputs_by_inputs():
    base, *models = (tiny.make(families.FAMILIES["gpt2"].build, seed) for seed in (0, 1, 2))
    merged, experts = tiny.averaged(models), dict(zip("ab", models, strict=True))
    result, name = svc(merged, base, experts, least=1.0), "transformer.h.0.attn.c_attn.weight"
    start, tau, *vectors = (m.get_parameter(name).detach().T for m in (base, merged, *models))
    want = start + svc_matrix(tau - start, [vector - start for vector in vectors], 1.0)
    assert torch.allclose(result.get_parameter(name), want.T, rtol=0, atol=1e-10)


def test_svc_follows_the_mergers_that_a_source_applies_it_after():
    comparison = SimpleNamespace(setting="suite")
    study = SimpleNamespace(pool="8", trained=(), comparison=comparison, seed=1)
    models = [FieldStudy.models(study, name, Path("out")) for name in ("ties", "lot")]
    after = {model.name for specs in models for model in specs}
    assert "ties/svc" in after and "lot/svc" not in after and "lot/featcal" in after


def test_the_folder_holds_what_the_module_does(tmp_path):
    base = checkpoints.vision_folder(tmp_path / "base", 0)
    folders = {n: checkpoints.vision_folder(tmp_path / n, seed) for seed, n in ((1, "a"), (2, "b"))}
    merge("average", base, folders, out=tmp_path / "merged")
    want = svc(tmp_path / "merged", base, folders).state_dict()
    svc(tmp_path / "merged", base, folders, out=tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored and all(torch.equal(want[name], tensor) for name, tensor in stored.items())
