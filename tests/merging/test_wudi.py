"""WUDI: its loss by definition, its minimum, its two codes' choice of matrices, NaN."""

import families
import pytest
import tiny
import torch
from test_methods import matrices

from featcal.errors import Diverged
from featcal.merging.merge import merge
from featcal.merging.methods.entries import mask_row_entries
from featcal.merging.methods.matrices import Interference, iso_cts_matrix, minimize
from featcal.merging.registry import MergeJob
from featcal.merging.sources import VOCABULARY, ModuleSource
from featcal.merging.tensors import linear_groups, matrix_names


def by_definition(tau, vectors):
    """Σ ‖(τ − τᵢ) τᵢᵀ‖² / ‖τᵢ‖², one expert at a time."""
    return sum(((tau - v) @ v.T).square().sum() / v.square().sum() for v in vectors)


@pytest.mark.parametrize("d", [6, 40])  # the second has directions that no task vector has
def test_no_step_from_the_closed_form_lowers_the_loss(d):
    vectors = matrices(o=4, d=d)
    problem = Interference.of(vectors)
    (first, slope), (last, flat) = map(problem.loss, (problem.start, problem.minimum()))
    tau = problem.start.requires_grad_()
    want = by_definition(tau, vectors)
    assert first == pytest.approx(float(want.detach()))
    assert torch.allclose(slope, *torch.autograd.grad(want, tau), rtol=0, atol=1e-9)
    assert float(flat.abs().max()) < 1e-9 and last < first


def test_many_steps_reach_the_closed_form():
    problem = Interference.of(matrices(o=4, d=6))
    tau, losses = minimize(problem, 4000, 1e-2, "a matrix")
    assert losses[-1] == pytest.approx(problem.loss(problem.minimum())[0], abs=1e-9)
    assert torch.allclose(tau, problem.minimum(), rtol=0, atol=1e-4)


def test_an_expert_that_did_not_move_a_matrix_does_not_count_there():
    vectors = matrices()
    zero = torch.zeros_like(vectors[0])
    assert torch.equal(Interference.of([*vectors, zero]).G, Interference.of(vectors).G)
    assert tiny.same_bits(merge("wudi", tiny.clip(), [tiny.clip()]), tiny.clip())


@pytest.mark.parametrize("variant", ["fusion_bench", "official"])
def test_a_variant_takes_its_matrices_and_averages_the_rest_or_keeps_the_base(variant):
    base, experts = tiny.clip(), [tiny.clip(1), tiny.clip(2)]
    merged = merge("wudi", base, experts, variant=variant, steps=3).state_dict()
    rest = (tiny.averaged(experts) if variant == "fusion_bench" else base).state_dict()
    moved = {name for name in rest if not torch.equal(merged[name], rest[name])}
    matrices = {name for name in rest if rest[name].dim() == 2}
    if variant == "official":
        matrices = {name for name in matrices if ".layers." in name}
    assert moved == matrices and any("position" in n for n in moved) == (variant != "official")


def job(family):
    model = ModuleSource(tiny.make(families.FAMILIES[family].build), "base").tensors
    return MergeJob(model, {}, lambda: None)


@pytest.mark.parametrize(("family", "stacked"), [("clip", 4), ("t5", 6), ("llama", 2), ("bert", 2)])
def test_official_stacks_q_k_and_v_of_every_attention(family, stacked):
    groups = linear_groups(job(family), VOCABULARY)
    assert sum(len(names) == 3 for names in groups) == stacked
    listed = " ".join(name for names in groups for name in names)
    assert "relative_attention_bias" not in listed and "embed" not in listed


@pytest.mark.parametrize("family", ["t5", "t5_gated", "llama"])
def test_token_tables_are_averaged(family):
    names = matrix_names(job(family), VOCABULARY)
    tables = ("shared", "embed_tokens", "lm_head")
    assert names and not any(table in name for name in names for table in tables)


def test_nan_stops_with_the_matrix_and_the_step():
    with pytest.raises(Diverged, match="fc1.weight: .*not finite at step 1"):
        minimize(Interference.of(matrices(2, 2, 12)), 5, 1e200, "fc1.weight")


@pytest.mark.parametrize("method", ["wudi_closed_form", "iso_cts", "breadcrumbs"])
def test_conv1d_weights_of_gpt2_are_merged_as_outputs_by_inputs(method):
    build = families.FAMILIES["gpt2"].build
    base, experts = tiny.make(build), [tiny.make(build, seed) for seed in (1, 2)]
    merged = merge(method, base, experts).state_dict()
    names = [n for n in merged if n.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))]
    assert names
    start, states = base.state_dict(), [expert.state_dict() for expert in experts]
    for name in names:
        vectors = [(state[name] - start[name]).T for state in states]  # (o, d)
        if method == "iso_cts":
            tau = iso_cts_matrix(vectors, 0.8)
        elif method == "breadcrumbs":  # scaled by its default
            tau = 0.2 * sum(mask_row_entries(vector, 0.15, 0.006) for vector in vectors)
        else:  # the minimum of the definition by least squares: Σ (τ − τᵢ) τᵢᵀτᵢ / ‖τᵢ‖² = 0
            G = sum(v.T @ v / v.square().sum() for v in vectors)
            R = sum(v @ v.T @ v / v.square().sum() for v in vectors)
            tau = torch.linalg.lstsq(G, R.T, driver="gelsd").solution.T
        assert torch.allclose(merged[name], start[name] + tau.T, rtol=0, atol=1e-8), name
