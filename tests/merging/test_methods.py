"""The methods by their definitions in float64, at their limits, and whatever the order of experts."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import tiny
import torch
from test_adamerging import job, models

from featcal.merging.merge import merge, open_merge
from featcal.merging.methods import answers
from featcal.merging.methods.entries import mask_row_entries, tall_masks
from featcal.merging.methods.matrices import iso_c_matrix, iso_cts_matrix, orthogonal, tsv_matrix
from featcal.merging.registry import method_named, method_names

FIELD = ("wudi_closed_form", "tsv_merge", "iso_c", "iso_cts", "breadcrumbs", "consensus", "pcb")
COUNT = 3
FC1 = "encoder.layers.0.mlp.fc1.weight"
svd = partial(torch.linalg.svd, full_matrices=False)


def double(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def near(one, other, tolerance=1e-12):
    return torch.allclose(one, other, rtol=0, atol=tolerance)


def matrices(count=COUNT, o=10, d=12):
    g = tiny.seeded(3)
    return [torch.randn(o, d, generator=g, dtype=torch.float64) for _ in range(count)]


def experts():
    return {name: tiny.clip(seed) for seed, name in enumerate("abc", start=1)}


def state(method, given=None, **settings):
    return merge(method, tiny.clip(), given or experts(), **settings).state_dict()


def close(one, other, tolerance=1e-12):
    return one.keys() == other.keys() and all(near(one[n], other[n], tolerance) for n in one)


@pytest.mark.parametrize("method", [*FIELD, "dare", "dare_ties"])
def test_experts_that_are_the_base_leave_it_as_it_is(method):
    for base in (tiny.clip(), torch.nn.ParameterList([torch.ones(3, 4), torch.ones(0, 4)])):
        assert close(merge(method, base, [base, base]).state_dict(), base.state_dict())


@pytest.mark.parametrize("method", [n for n in method_names() if method_named(n).scaled])
def test_task_vectors_made_once_serve_every_scale(method):
    opened = open_merge(method, tiny.clip(), experts())
    vectors = dict(opened.run())
    scaled = replace(opened, settings={**opened.settings, "scale": 0.35})
    merged = scaled.finish(iter(vectors.items()), None).state_dict()
    assert close(merged, state(method, scale=0.35), 0.0)


@pytest.mark.parametrize(
    ("method", "settings", "same_as", "theirs"),
    [
        ("wudi_closed_form", {}, "wudi", {"variant": "closed_form"}),
        ("dare", {"drop": 0.0}, "task_arithmetic", {}),
        ("breadcrumbs", {"keep": 1.0, "remove": 0.0, "scale": 0.3}, "task_arithmetic", {}),
        ("consensus", {"tasks": 0}, "task_arithmetic", {}),
        ("dare_ties", {"drop": 0.0, "scale": 0.3}, "ties", {}),
    ],
)
def test_one_method_at_its_limit_is_another(method, settings, same_as, theirs):
    assert close(state(method, **settings), state(same_as, **theirs))


def test_dare_drops_other_entries_of_every_expert_and_the_same_again():
    one, again, other = (state("dare", seed=seed) for seed in (1, 1, 2))
    assert close(one, again, 0.0) and not close(one, other, 1e-6)
    # were the same entries dropped of two equal experts, each share would be 0 or 4
    alike = state("dare", dict.fromkeys("ab", tiny.clip(1)), scale=1.0)[FC1]
    base, expert = (tiny.clip(seed).state_dict()[FC1] for seed in (0, 1))
    share = (alike - base) / (expert - base)
    assert {round(x, 6) for x in share.flatten().tolist()} == {0.0, 2.0, 4.0}


def test_breadcrumbs_of_a_row_by_hand():
    rows = double([9.0, -1.0, 3.0, -4.0, 0.5], [0.1, 0.2, -0.3, 0.4, 0.5])
    # of five entries the largest goes and the two next stay
    want = [[0.0, 0.0, 3.0, -4.0, 0.0], [0.0, 0.0, -0.3, 0.4, 0.0]]
    assert mask_row_entries(rows, keep=0.4, remove=0.2).tolist() == want


def test_consensus_by_hand():
    vectors = [torch.tensor([1.0, 1.0, 4.0]), torch.tensor([1.0, -1.0, 0.1])]
    assert tall_masks(vectors, 0.5).tolist() == [[True, True, True], [True, True, False]]
    base = tiny.clip().state_dict()
    taus = [model.state_dict()[FC1] - base[FC1] for model in experts().values()]
    agreed = sum((t.abs() > 0.6 * (sum(taus) - t).abs()).int() for t in taus) >= 2
    assert near(state("consensus")[FC1], base[FC1] + 0.3 * (agreed * sum(taus)))
    assert close(state("consensus", tasks=4), base)


@pytest.mark.parametrize("rank", [10, 2])
def test_tsv_is_the_sum_of_leading_parts_whose_directions_are_made_orthogonal(rank):
    vectors = [a @ b for a, b in zip(matrices(o=10, d=rank), matrices(o=rank, d=12), strict=True)]
    parts = [svd(v) for v in vectors]
    k = min(10 // COUNT, rank)
    U, V = torch.cat([p[0][:, :k] for p in parts], 1), torch.cat([p[2][:k].T for p in parts], 1)

    def polar(M):  # U (UᵀU)^(−1/2), by eigenvalues
        e, Q = torch.linalg.eigh(M.T @ M)
        return M @ Q @ torch.diag(e.rsqrt()) @ Q.T

    values = torch.diag(torch.cat([p[1][:k] for p in parts]))
    assert near(tsv_matrix(vectors), polar(U) @ values @ polar(V).T, 1e-9)
    assert near(orthogonal(U).T @ orthogonal(U), torch.eye(COUNT * k, dtype=torch.float64))


def test_iso_c_is_the_sum_with_all_singular_values_equal():
    vectors = matrices()
    U, S, Vt = svd(sum(vectors))
    assert near(iso_c_matrix(vectors), S.mean() * (U @ Vt))
    assert near(iso_cts_matrix(vectors, 1.0), iso_c_matrix(vectors))  # all directions common


def test_iso_cts_keeps_the_leading_directions_of_the_sum():
    vectors = matrices()
    # of 10 directions round((10 − 4)/3) = 2 are every expert's own, 4 common
    merged = iso_cts_matrix(vectors, 0.4)
    U, S, Vt = svd(sum(vectors))
    own = [svd(v - U[:, :4] @ U[:, :4].T @ v) for v in vectors]
    mean = torch.cat([S[:4], *(s[:2] for _, s, _ in own)]).mean()
    left = torch.cat([U[:, :4], *(u[:, :2] for u, _, _ in own)], 1)
    (P, _, Qt), (A, _, Bt) = svd(left), svd(torch.cat([Vt[:4].T, *(v[:2].T for _, _, v in own)], 1))
    assert near(merged, mean * (P @ Qt) @ (A @ Bt).T, 1e-10)
    assert torch.allclose(torch.linalg.svdvals(merged), mean, rtol=1e-9)


def test_directions_beyond_the_numerical_rank_take_no_part():
    vectors = [a @ b for a, b in zip(matrices(o=10, d=2), matrices(o=2, d=12), strict=True)]
    U, S, Vt = np.linalg.svd(sum(vectors).numpy())
    want = S[:6].mean() * U[:, :6] @ Vt[:6]  # three adapters of rank 2
    assert near(iso_c_matrix(vectors), torch.from_numpy(want), 1e-10)
    # of 10 directions 4 are common and 2 every expert's; outside of the common ones each has some
    merged = torch.linalg.svdvals(iso_cts_matrix(vectors, 0.4))
    assert torch.allclose(merged, merged[0]) and float(merged[0]) > 0
    one = matrices(1, 10, 2)[0] @ matrices(1, 2, 12)[0]
    values = torch.linalg.svdvals(iso_cts_matrix([one, one], 0.8))
    assert near(values[:2], values[0]) and float(values[2:].max()) < 1e-12 * float(values[0])


def test_pcb_is_its_formula_on_one_long_vector():
    base = tiny.clip().state_dict()
    names = sorted(n for n, t in base.items() if t.is_floating_point())
    moved = [model.state_dict() for model in experts().values()]
    flat = torch.stack([torch.cat([(m[n] - base[n]).flatten() for n in names]) for m in moved])
    n, d = flat.shape
    sizes = flat.abs().sort(1).values
    sizes = flat.abs().clamp(sizes[:, int(d * 1e-4), None], sizes[:, int(d * (1 - 1e-4)) - 1, None])
    low, high = sizes.amin(1, keepdim=True), sizes.amax(1, keepdim=True)
    beta = torch.exp(n * ((sizes - low) / (high - low)) ** 2) * torch.tanh(flat * flat.sum(0))
    cut = beta.sort(1).values[:, int(d * 0.95), None]
    weight = (beta.clamp_min(cut) - cut) / (beta.amax(1, keepdim=True) - cut)
    want = 1.2 * (weight * flat.sign() * sizes).sum(0) / weight.sum(0).clamp_min(1e-12)
    merged = state("pcb")
    change = torch.cat([(merged[name] - base[name]).flatten() for name in names])
    assert near(change, want) and float((want != 0).double().mean()) > 0.05


def test_mats_goes_from_task_arithmetic_to_regmean():
    name = "encoder.layers.1.mlp.fc2.weight"
    batches = {task: tiny.images(i, 36) for i, task in enumerate("abc")}
    goal = state("regmean", batches=batches, off_diagonal=1.0)[name]
    start, few, many = (state("mats", batches=batches, steps=n)[name] for n in (0, 3, 200))
    assert near(start, state("task_arithmetic")[name])
    far, nearer, nearest = (float((weight - goal).norm()) for weight in (start, few, many))
    assert far > nearer > nearest and nearest < 0.05 * far
    done = tiny.merged_with_record("mats", tiny.clip(), experts(), batches=batches, steps=5)
    steps = done.record["steps"]
    assert set(steps.values()) <= set(range(6)) and len(steps) == 8  # four sites in two blocks


def test_the_diagonal_is_the_mean_of_squared_gradients_at_drawn_labels():
    """The oracle takes every label, weighted by its probability, and not a drawn one."""
    name, work = "encoder.layers.1.mlp.fc2.bias", job()
    expert = models()[1]["dtd"]
    heads, parameter, exact, count = work.head, expert.get_parameter(name), 0.0, 0
    for batch in work.batches["dtd"]:
        for pixels in batch["pixel_values"]:
            pooled = expert(pixel_values=pixels[None]).pooler_output @ heads["visual_projection"].T
            features = torch.nn.functional.normalize(pooled, dim=-1)
            logits = heads["logit_scale"].exp() * features @ heads["head/dtd"].T
            for value in logits.log_softmax(-1)[0]:
                (gradient,) = torch.autograd.grad(value, parameter, retain_graph=True)
                exact += value.detach().exp() * gradient.square()
            count += 1

    def diagonal(seed):
        sums, n = answers.squared_gradients(work, tiny.clip(), work.experts["dtd"], "dtd", seed)
        return sums[name] / n

    draws = torch.stack([diagonal(seed) for seed in range(30)])
    errors = (draws.mean(0) - exact / count).abs() / (draws.std(0) / len(draws) ** 0.5)
    assert float(errors.mean()) < 2  # standard errors; 0.8 is expected
    assert torch.equal(diagonal(0), draws[0]) and not torch.equal(draws[0], draws[1])


def test_fisher_merging_by_hand():
    thetas, F = list(double([1.0, 2.0], [3.0, 6.0])), list(double([1.0, 0.0], [3.0, 2.0]))
    for weights, want in (([1.0, 1.0], [2.5, 6.0]), ([3.0, 1.0], [2.0, 6.0])):
        assert answers.fisher_tensor(double(0, 0), thetas, F, weights).tolist() == want
    norms = [{"w": torch.tensor([3.0, 4.0])}, {"w": torch.ones(1)}]
    assert answers.fisher_weights(norms, 0.0) == pytest.approx([0.2, 1.0])


def test_gradient_matching_lies_between_fisher_merging_and_task_arithmetic():
    base, none, *thetas = double([1, 1], [0, 0], [2, 2], [3, 7])
    H = list(double([1, 2], [3, 2]))
    fisher = answers.fisher_tensor(base, thetas, H, [1.0, 1.0])
    assert torch.equal(answers.matched_tensor(base, thetas, none, H, 1.0), fisher)
    far = answers.matched_tensor(base, thetas, none + 1e12, H, 0.3)
    assert far.tolist() == pytest.approx([1.9, 3.1])
    # entry by entry: 1 + ½ ((2 + 1) 1 + (2 + 3) 2) / (2 + ½ 4) = 2.625 and
    # 1 + ½ ((2 + 2) 1 + (2 + 2) 6) / (2 + ½ 4) = 4.5
    assert answers.matched_tensor(base, thetas, none + 2, H, 0.5).tolist() == [2.625, 4.5]


def test_gradient_matching_divides_the_bases_curvature_by_the_number_of_tasks():
    (base, others), work = models(), job()

    def curvature(model, task, purpose):
        return answers.squared_gradients(work, base, model, task, 42, purpose)[0][FC1].numpy()

    H = [curvature(source, task, "fisher") for task, source in work.experts.items()]
    H0 = sum(curvature(work.base, task, "base's fisher") for task in others) / 2 + 1e-12
    start, *thetas = (m.state_dict()[FC1].numpy() for m in (base, *others.values()))
    change = sum((H0 + h) * (theta - start) for h, theta in zip(H, thetas, strict=True))
    merged = merge("gradient_matching", base, others, batches=work.batches, head=work.head)
    assert near(merged.state_dict()[FC1], torch.from_numpy(start + change / (H0 + sum(H))))
