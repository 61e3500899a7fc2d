"""SVC: Algorithm 1 direction by direction, its limits, and folders like modules."""

from pathlib import Path
from types import SimpleNamespace

import checkpoints
import families
import tiny
import torch
from safetensors.torch import load_file

from featcal.merging.merge import merge
from reproduction.field.repair import svc, svc_matrix
from reproduction.studies.field import FieldStudy

COUNT = 3


def matrices(count=COUNT, o=10, d=12):
    g = tiny.seeded(3)
    return [torch.randn(o, d, generator=g, dtype=torch.float64) for _ in range(count)]


def test_svc_is_algorithm_1_direction_by_direction():
    vectors = matrices()
    tau, want = sum(vectors), torch.zeros(10, 12, dtype=torch.float64)
    U, S, Vt = torch.linalg.svd(tau, full_matrices=False)
    for u, s, v in zip(U.T, S, Vt, strict=True):
        shares = [float((u @ tau) @ (u @ one) / (u @ one).square().sum()) for one in vectors]
        want += COUNT / sum(max(0.1, share) for share in shares) * s * torch.outer(u, v)
    assert torch.allclose(svc_matrix(tau, vectors, 0.1), want, rtol=0, atol=1e-10)


def test_svc_undoes_what_equal_experts_add_up_and_leaves_one_expert_as_it_is():
    (vector,) = matrices(1)
    assert torch.allclose(svc_matrix(3 * vector, [vector] * 3, 0.1), vector, rtol=0, atol=1e-12)
    models = {"a": tiny.clip(1), "b": tiny.clip(1)}
    twice = merge("task_arithmetic", tiny.clip(), models, scale=1.0)  # adds the same change twice
    found = svc(twice, tiny.clip(), models).state_dict()
    expert, name = tiny.clip(1).state_dict(), "encoder.layers.0.mlp.fc1"
    assert torch.allclose(found[f"{name}.weight"], expert[f"{name}.weight"], rtol=0, atol=1e-10)
    assert torch.equal(found[f"{name}.bias"], twice.state_dict()[f"{name}.bias"])


def test_conv1d_weights_are_calibrated_as_outputs_by_inputs():
    build = families.FAMILIES["gpt2"].build
    base, *models = (tiny.make(build, seed) for seed in (0, 1, 2))
    merged, experts = tiny.averaged(models), dict(zip("ab", models, strict=True))
    result, name = svc(merged, base, experts, least=1.0), "transformer.h.0.attn.c_attn.weight"
    start, tau, *vectors = (m.get_parameter(name).detach().T for m in (base, merged, *models))
    want = start + svc_matrix(tau - start, [vector - start for vector in vectors], 1.0)
    assert torch.allclose(result.get_parameter(name), want.T, rtol=0, atol=1e-10)


def test_svc_follows_the_mergers_that_a_source_applies_it_after():
    study = SimpleNamespace(pool="8", trained=(), rivals=SimpleNamespace(setting="suite"), seed=1)
    made = [FieldStudy.models(study, name, Path("out")) for name in ("ties", "lot")]
    after = {model.name for own in made for model in own}
    assert "ties/svc" in after and "lot/svc" not in after and "lot/featcal" in after


def test_the_folder_holds_what_the_module_does(tmp_path):
    base = checkpoints.vision_folder(tmp_path / "base", 0)
    folders = {n: checkpoints.vision_folder(tmp_path / n, seed) for seed, n in ((1, "a"), (2, "b"))}
    merge("average", base, folders, out=tmp_path / "merged")
    want = svc(tmp_path / "merged", base, folders).state_dict()
    svc(tmp_path / "merged", base, folders, out=tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored and all(torch.equal(want[name], tensor) for name, tensor in stored.items())
