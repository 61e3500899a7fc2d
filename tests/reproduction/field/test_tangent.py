"""Towers linear in their weights: the base's features, a derivative, and merging adds functions."""

from types import SimpleNamespace

import tiny
import torch

import featcal
from featcal.data.images import ImageSet
from reproduction.field.tangent import Linearised
from reproduction.prepare.fine_tune import fine_tune
from reproduction.prepare.suite import FineTune

PIXELS = tiny.images(3)[0]["pixel_values"]


def feature(base, moved):
    return Linearised(base, moved)(PIXELS).pooler_output


def test_at_the_base_it_is_the_network_and_along_a_change_its_derivative():
    base = tiny.clip()
    output = base(PIXELS).pooler_output
    torch.testing.assert_close(feature(base, None), output)
    step = 1e-5
    forward, backward = tiny.shifted(base, 7, step), tiny.shifted(base, 7, -step)
    central = (forward(PIXELS).pooler_output - backward(PIXELS).pooler_output) / 2
    torch.testing.assert_close(feature(base, forward) - output, central, rtol=1e-5, atol=1e-12)


def test_task_arithmetic_adds_what_each_expert_adds_to_the_function():
    base = tiny.clip()
    experts = {task: tiny.shifted(base, seed) for seed, task in enumerate(tiny.TASKS)}
    merged = featcal.merge("task_arithmetic", base, experts, scale=0.3)
    output = base(PIXELS).pooler_output
    added = sum(feature(base, expert) - output for expert in experts.values())
    torch.testing.assert_close(feature(base, merged) - output, 0.3 * added, rtol=1e-9, atol=1e-11)
    network = merged(PIXELS).pooler_output - output
    assert (network - 0.3 * added).abs().max() > 1e-2, "the network itself is not linear"


def test_fine_tuning_moves_what_learns_and_lowers_the_loss():
    base = tiny.clip(dtype=torch.float32)
    pixels, labels = torch.randn(24, 3, 16, 16, generator=tiny.seeded(1)), torch.arange(24) % 3
    projection = torch.randn(8, 32, generator=tiny.seeded(2))
    head = torch.nn.functional.normalize(torch.randn(3, 8, generator=tiny.seeded(3)), dim=-1)

    def loss(model):
        features = torch.nn.functional.normalize(model(pixels).pooler_output @ projection.T, dim=-1)
        return torch.nn.functional.cross_entropy(10 * features @ head.T, labels).item()

    recipe = FineTune(steps=30, batch=12, warm_up=3, frozen=("base.", "moved.embeddings"))
    heads = {"visual_projection": projection, "head/x": head}
    heads["logit_scale"] = torch.tensor(10.0).log()
    as_is = SimpleNamespace(normalised=lambda pixels, device: torch.from_numpy(pixels))
    images = ImageSet(pixels.numpy(), as_is, labels.numpy())
    expert = fine_tune(Linearised(base), heads, {"x": images}, recipe, 0)
    assert loss(expert) < 0.8 * loss(base) and tiny.same_bits(expert.base, base)
    assert torch.equal(expert.moved.embeddings.class_embedding, base.embeddings.class_embedding)
    assert not torch.equal(expert.moved.post_layernorm.weight, base.post_layernorm.weight)
