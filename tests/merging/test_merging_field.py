"""The mergers of the field: by their definitions in float64, at their limits, and whatever the
order of the experts.
"""

import checkpoints
import pytest
import tiny
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import featcal
from featcal.merging.merge import merge, merge_recorded, open_merge
from featcal.merging.methods.breadcrumbs import mask_row_entries
from featcal.merging.methods.consensus import tall_masks
from featcal.merging.methods.dare import drop_entries
from featcal.merging.methods.fisher import fisher_tensor, fisher_weights, squared_gradients
from featcal.merging.methods.gradient_matching import matched_tensor
from featcal.merging.methods.iso_c import iso_c_matrix
from featcal.merging.methods.iso_cts import iso_cts_matrix
from featcal.merging.methods.mats import conjugate_gradients
from featcal.merging.methods.tsv_merge import orthogonal, tsv_matrix
from featcal.merging.registry import MergeJob, method_named, method_names
from featcal.merging.sources import ModuleSource

FIELD = ("wudi_closed_form", "tsv_merge", "iso_c", "iso_cts", "breadcrumbs", "consensus", "pcb")
COUNT = 3


def matrices(count=COUNT, o=10, d=12):
    g = tiny.seeded(3)
    return [torch.randn(o, d, generator=g, dtype=torch.float64) for _ in range(count)]


def experts(names="abc"):
    return {name: tiny.clip(seed) for seed, name in enumerate(names, start=1)}


def state(method, models=None, base=None, **settings):
    return merge(method, base or tiny.clip(), models or experts(), **settings).state_dict()


def close(one, other, tolerance=1e-12):
    return one.keys() == other.keys() and all(
        torch.allclose(one[n], other[n], rtol=0, atol=tolerance) for n in one
    )


@pytest.mark.parametrize("method", FIELD)  # without DARE, whose draws depend on the task
def test_which_expert_has_which_name_does_not_matter(method):
    renamed = dict(zip("bca", experts().values(), strict=True))
    assert close(state(method), state(method, renamed), 1e-9)


@pytest.mark.parametrize("method", [*FIELD, "dare", "dare_ties"])
def test_experts_that_are_the_base_leave_it_as_it_is(method):
    assert close(state(method, {"a": tiny.clip(), "b": tiny.clip()}), tiny.clip().state_dict())


def folders_of(tmp_path, names):
    seeds = enumerate(names, start=1)
    return {name: checkpoints.vision_folder(tmp_path / name, seed) for seed, name in seeds}


# one for every way in which tensors are read
@pytest.mark.parametrize("method", ["wudi_closed_form", "consensus", "dare_ties"])
def test_folders_are_merged_as_modules_are(method, tmp_path):
    models = {name: checkpoints.vision(seed) for seed, name in enumerate("ab", start=1)}
    base = checkpoints.clip_folder(tmp_path / "base")
    streamed = merge(method, base, folders_of(tmp_path, "ab")).state_dict()
    assert close(streamed, merge(method, checkpoints.clip(), models).state_dict(), 0.0)


@pytest.mark.parametrize("method", [n for n in method_names() if method_named(n).scaled])
def test_a_scale_tried_later_gives_what_merging_with_it_gives(method, tmp_path):
    folders, base = folders_of(tmp_path, "abc"), checkpoints.vision_folder(tmp_path / "base")
    at_scale = open_merge(method, base, folders).at_scales()
    merged = merge(method, base, folders, scale=1.0).state_dict()
    assert close(merged, at_scale(1.0).state_dict(), 0.0)
    written = (merge(method, base, folders, out=tmp_path / "one", scale=0.35),)
    written += (at_scale(0.35, out=tmp_path / "two"),)
    one, two = ({f.name: f.read_bytes() for f in folder.iterdir()} for folder in written)
    assert one == two


def test_the_closed_form_of_wudi_is_its_variant():
    assert close(state("wudi_closed_form"), state("wudi", variant="closed_form"), 0.0)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("dare", {"drop": 0.0}),
        ("breadcrumbs", {"keep": 1.0, "remove": 0.0, "scale": 0.3}),
        ("consensus", {"tasks": 0}),
    ],
)
def test_with_nothing_left_out_it_is_task_arithmetic(method, settings):
    assert close(state(method, **settings), state("task_arithmetic"))


def test_dare_with_ties_and_nothing_dropped_is_ties():
    assert close(state("dare_ties", drop=0.0, scale=0.3), state("ties"))


def test_dare_keeps_the_share_it_says_and_the_mean():
    vector = torch.ones(200, 200, dtype=torch.float64)
    sparse = drop_entries(vector, 0.9, tiny.seeded(0))
    assert sparse.unique().tolist() == pytest.approx([0.0, 10.0])
    assert float(sparse.mean()) == pytest.approx(1.0, abs=0.05)  # standard error 0.015


def test_dare_drops_other_entries_of_every_expert_and_the_same_again():
    one, again, other = (state("dare", seed=seed) for seed in (1, 1, 2))
    assert close(one, again, 0.0) and not close(one, other, 1e-6)
    alike = dict.fromkeys(
        "ab", tiny.clip(1)
    )  # were the same entries drop_entries, each would be 0 or N times its own share
    base, expert = tiny.clip().state_dict(), tiny.clip(1).state_dict()
    name = "encoder.layers.0.mlp.fc1.weight"
    share = (state("dare", alike, scale=1.0)[name] - base[name]) / (expert[name] - base[name])
    assert {round(x, 6) for x in share.flatten().tolist()} == {0.0, 2.0, 4.0}


def test_breadcrumbs_of_a_row_by_hand():
    row = torch.tensor([[9.0, -1.0, 3.0, -4.0, 0.5], [0.1, 0.2, -0.3, 0.4, 0.5]]).double()
    # of five entries the largest goes and the two next stay
    want = torch.tensor([[0.0, 0.0, 3.0, -4.0, 0.0], [0.0, 0.0, -0.3, 0.4, 0.0]]).double()
    assert torch.equal(mask_row_entries(row, keep=0.4, remove=0.2), want)


def test_consensus_by_hand():
    vectors = [torch.tensor([1.0, 1.0, 4.0]), torch.tensor([1.0, -1.0, 0.1])]
    assert tall_masks(vectors, 0.5).tolist() == [[True, True, True], [True, True, False]]
    base, name = tiny.clip().state_dict(), "encoder.layers.0.mlp.fc1.weight"
    taus = [model.state_dict()[name] - base[name] for model in experts().values()]
    agreed = sum((t.abs() > 0.6 * (sum(taus) - t).abs()).int() for t in taus) >= 2
    assert torch.allclose(
        state("consensus")[name], base[name] + 0.3 * (agreed * sum(taus)), rtol=0, atol=1e-12
    )
    assert close(state("consensus", tasks=4), tiny.clip().state_dict())


def test_one_expert_is_itself_by_tsv_and_keeps_its_directions_by_iso():
    one = {"a": tiny.clip(1)}
    assert close(state("tsv_merge", one), tiny.clip(1).state_dict(), 1e-10)
    (vector,) = matrices(1)
    U, S, Vt = torch.linalg.svd(vector, full_matrices=False)
    assert torch.allclose(iso_c_matrix([vector]), S.mean() * (U @ Vt), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rank", [10, 2])
def test_tsv_is_the_sum_of_leading_parts_whose_directions_are_made_orthogonal(rank):
    vectors = [a @ b for a, b in zip(matrices(o=10, d=rank), matrices(o=rank, d=12), strict=True)]
    parts = [torch.linalg.svd(v, full_matrices=False) for v in vectors]
    k = min(10 // COUNT, rank)
    U, V = torch.cat([p[0][:, :k] for p in parts], 1), torch.cat([p[2][:k].T for p in parts], 1)
    values = torch.cat([p[1][:k] for p in parts])

    def polar(M):  # U (UᵀU)^(−1/2), by eigenvalues
        e, Q = torch.linalg.eigh(M.T @ M)
        return M @ Q @ torch.diag(e.rsqrt()) @ Q.T

    want = polar(U) @ torch.diag(values) @ polar(V).T
    assert torch.allclose(tsv_matrix(vectors), want, rtol=0, atol=1e-9)
    one = torch.eye(COUNT * k, dtype=torch.float64)
    assert torch.allclose(orthogonal(U).T @ orthogonal(U), one, rtol=0, atol=1e-12)


def test_orthogonal_task_vectors_add_up_by_tsv():
    vectors = [torch.zeros(6, 6, dtype=torch.float64) for _ in range(2)]
    vectors[0][:3, :3], vectors[1][3:, 3:] = matrices(1, 3, 3)[0], matrices(2, 3, 3)[1]
    assert torch.allclose(tsv_matrix(vectors), vectors[0] + vectors[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("merged", [iso_c_matrix, lambda vectors: iso_cts_matrix(vectors, 0.4)])
def test_isotropic_task_vectors_have_one_singular_value(merged):
    values = torch.linalg.svdvals(merged(matrices()))
    assert torch.allclose(values, values[0].expand_as(values), rtol=1e-9)


def test_iso_cts_with_all_directions_common_is_iso_c():
    vectors = matrices()
    assert torch.allclose(iso_cts_matrix(vectors, 1.0), iso_c_matrix(vectors), rtol=0, atol=1e-12)


def test_iso_cts_keeps_the_leading_directions_of_the_sum():
    vectors = matrices()
    # of 10 directions round((10 − 4)/3) = 2 are every expert's own, 4 common
    merged = iso_cts_matrix(vectors, 0.4)
    U, S, Vt = torch.linalg.svd(sum(vectors), full_matrices=False)
    own = [torch.linalg.svd(v - U[:, :4] @ U[:, :4].T @ v, full_matrices=False) for v in vectors]
    mean = torch.cat([S[:4], *(s[:2] for _, s, _ in own)]).mean()
    left = torch.cat([U[:, :4], *(u[:, :2] for u, _, _ in own)], 1)
    right = torch.cat([Vt[:4].T, *(v[:2].T for _, _, v in own)], 1)
    (P, _, Qt), (A, _, Bt) = (torch.linalg.svd(side, full_matrices=False) for side in (left, right))
    assert torch.allclose(merged, mean * (P @ Qt) @ (A @ Bt).T, rtol=0, atol=1e-10)
    assert torch.linalg.matrix_norm(merged, 2) == pytest.approx(float(mean))


def test_pcb_is_its_formula_on_one_long_vector():
    base, models = tiny.clip().state_dict(), experts()
    names = sorted(n for n, t in base.items() if t.is_floating_point())
    moved = [model.state_dict() for model in models.values()]
    flat = torch.stack([torch.cat([(m[n] - base[n]).flatten() for n in names]) for m in moved])
    n, d = flat.shape
    sizes = flat.abs().sort(1).values
    sizes = flat.abs().clamp(sizes[:, int(d * 1e-4), None], sizes[:, int(d * (1 - 1e-4)) - 1, None])
    low, high = sizes.amin(1, keepdim=True), sizes.amax(1, keepdim=True)
    self_ = ((sizes - low) / (high - low)) ** 2
    beta = torch.exp(n * self_) * torch.tanh(flat * flat.sum(0))
    cut = beta.sort(1).values[:, int(d * 0.95), None]
    weight = (beta.clamp_min(cut) - cut) / (beta.amax(1, keepdim=True) - cut)
    want = 1.2 * (weight * flat.sign() * sizes).sum(0) / weight.sum(0).clamp_min(1e-12)
    merged = state("pcb")
    change = torch.cat([(merged[name] - base[name]).flatten() for name in names])
    assert torch.allclose(change, want, rtol=0, atol=1e-12)
    assert float((want != 0).double().mean()) > 0.05


def test_pcb_takes_an_expert_that_moved_few_entries():
    """Fewer than 5 % of its balances are above 0, so −0.0 and 0.0 are what its cut is chosen from."""
    models = experts("ab")
    frozen, name = tiny.clip(), "encoder.layers.0.mlp.fc1.weight"
    with torch.no_grad():
        frozen.get_parameter(name).add_(models["a"].get_parameter(name))
    result = state("pcb", {**models, "c": frozen})
    assert all(torch.isfinite(tensor).all() for tensor in result.values())
    assert not torch.equal(result[name], state("pcb", models)[name])


def heads(p=8, classes=4):
    g = tiny.seeded(3)
    result = {
        "visual_projection": torch.randn(p, 32, generator=g),
        "logit_scale": torch.tensor(2.0),
    }
    return result | {
        f"head/{task}": torch.nn.functional.normalize(torch.randn(classes, p, generator=g), dim=-1)
        for task in "abc"
    }


def images(names="abc"):
    return {name: tiny.images(50 + i) for i, name in enumerate(names)}


def test_conjugate_gradients_reach_the_solution_in_as_many_steps_as_there_are_eigenvalues():
    g = tiny.seeded(1)
    A = torch.randn(40, 8, generator=g, dtype=torch.float64)
    G, R = A.T @ A, torch.randn(3, 8, generator=g, dtype=torch.float64)
    X, steps = conjugate_gradients(G, R, torch.zeros_like(R), 100)
    assert 0 < steps <= 9 and float((X @ G - R).norm()) <= 1e-5 * float(R.norm())
    assert conjugate_gradients(G, R, X, 100)[1] == 0  # already solved
    one, _ = conjugate_gradients(G, R, torch.zeros_like(R), 1)  # the exact line search
    assert torch.allclose(one, R * (R.square().sum() / (R * (R @ G)).sum()), rtol=1e-12)


def test_mats_goes_from_task_arithmetic_to_regmean():
    name = "encoder.layers.1.mlp.fc2.weight"
    batches = {
        task: [b for seed in range(6) for b in tiny.images(100 * i + seed)]
        for i, task in enumerate("abc")
    }
    goal = state("regmean", batches=batches, off_diagonal=1.0)[name]
    start = state("mats", batches=batches, steps=0)[name]
    assert torch.allclose(start, state("task_arithmetic")[name], rtol=0, atol=1e-12)
    few, many = (state("mats", batches=batches, steps=n)[name] for n in (3, 200))
    far, nearer, near = (float((weight - goal).norm()) for weight in (start, few, many))
    assert far > nearer > near and near < 0.05 * far
    steps = merge_recorded("mats", tiny.clip(), experts(), batches=batches, steps=5).record["steps"]
    assert set(steps.values()) <= set(range(6)) and len(steps) == 8  # four sites in two blocks


def job():
    sources = {task: ModuleSource(model, task) for task, model in experts().items()}
    wide = {name: tensor.double() for name, tensor in heads().items()}
    base = ModuleSource(tiny.clip(), "base")
    return MergeJob(base, sources, tiny.clip, batches=images(), head=wide)


def test_the_diagonal_is_the_mean_of_squared_gradients_at_drawn_labels():
    """With every label instead of a drawn one, weighted by its probability, it comes out as the
    mean over many draws.
    """
    work, name = job(), "encoder.layers.1.mlp.fc2.bias"
    expert, head = tiny.clip(1), work.head
    exact, count = torch.zeros_like(expert.get_parameter(name)), 0
    for batch in work.batches["a"]:
        for pixels in batch["pixel_values"]:
            pooled = expert(pixel_values=pixels[None]).pooler_output @ head["visual_projection"].T
            features = torch.nn.functional.normalize(pooled, dim=-1)
            logits = head["logit_scale"].exp() * features @ head["head/a"].T
            answer = logits.log_softmax(-1)[0]
            for value in answer:
                (gradient,) = torch.autograd.grad(
                    value, expert.get_parameter(name), retain_graph=True
                )
                exact += value.detach().exp() * gradient.square()
            count += 1

    def diagonal(seed):
        sums, n = squared_gradients(job(), tiny.clip(), ModuleSource(expert, "a"), "a", seed)
        return sums[name] / n

    draws = [diagonal(seed) for seed in range(30)]
    mean = torch.stack(draws).mean(0)
    spread = torch.stack(draws).std(0) / len(draws) ** 0.5
    errors = (mean - exact / count).abs() / spread
    assert float(errors.mean()) < 2  # standard errors; 0.8 is expected
    assert torch.equal(diagonal(0), draws[0]) and not torch.equal(draws[0], draws[1])


def test_fisher_merging_by_hand():
    thetas = [torch.tensor([1.0, 2.0]).double(), torch.tensor([3.0, 6.0]).double()]
    F = [torch.tensor([1.0, 0.0]).double(), torch.tensor([3.0, 2.0]).double()]
    assert fisher_tensor(torch.zeros(2).double(), thetas, F, [1.0, 1.0]).tolist() == [2.5, 6.0]
    assert fisher_tensor(torch.zeros(2).double(), thetas, F, [3.0, 1.0]).tolist() == [2.0, 6.0]
    assert fisher_weights(
        [{"w": torch.tensor([3.0, 4.0])}, {"w": torch.ones(1)}], 0.0, True
    ) == pytest.approx([0.2, 1.0])


def test_fisher_merging_with_a_floor_above_all_is_the_average():
    result = state("fisher", batches=images(), head=heads(), floor=1e9, normalize=False)
    assert close(result, state("average"), 1e-6)
    assert not close(state("fisher", batches=images(), head=heads()), state("average"), 1e-4)


def test_gradient_matching_lies_between_fisher_merging_and_task_arithmetic():
    base, none, *thetas = torch.tensor([[1.0, 1], [0, 0], [2, 2], [3, 7]]).double()
    H = list(torch.tensor([[1.0, 2], [3, 2]]).double())
    fisher = fisher_tensor(base, thetas, H, [1.0, 1.0])
    assert torch.equal(matched_tensor(base, thetas, none, H, 1.0), fisher)
    assert matched_tensor(base, thetas, none + 1e12, H, 0.3).tolist() == pytest.approx([1.9, 3.1])
    # entry by entry: 1 + ½ ((2 + 1) 1 + (2 + 3) 2) / (2 + ½ 4) = 2.625 and 1 + ½ ((2 + 2) 1 + (2 +
    # 2) 6) / (2 + ½ 4) = 4.5
    assert matched_tensor(base, thetas, none + 2, H, 0.5).tolist() == [2.625, 4.5]


def test_gradient_matching_of_models_at_its_limits():
    more = {"batches": images(), "head": heads(), "scale": 0.3}
    alike = state("gradient_matching", dict.fromkeys("abc", tiny.clip()), **more)
    assert close(alike, tiny.clip().state_dict())
    name = "encoder.layers.1.mlp.fc2.bias"
    result = state("gradient_matching", base_weight=1e12, **more)[name]
    assert torch.allclose(result, state("task_arithmetic")[name], rtol=0, atol=1e-6)
    assert not torch.allclose(state("gradient_matching", **more)[name], result, atol=1e-4)
