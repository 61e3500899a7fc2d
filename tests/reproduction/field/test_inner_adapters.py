"""Adapters inside a merged model: published loops as oracle, separate tasks, an untouched model."""

import warnings
from itertools import islice

import pytest
import tiny
import torch
from tiny import experiment, same_bits
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from featcal.baselines.training import batch_order
from featcal.core import generator
from featcal.errors import BadPlan, BadSetting
from reproduction.field.inner_adapters import FEATURE, InnerAdapters, inner_adapters
from reproduction.studies.field import IntervMerge, SurgeryV2

HEAD = torch.randn(8, 32, generator=tiny.seeded(5), dtype=torch.float64)
STEPS = {"steps": 12, "batch": 4, "lr": 0.01, "rank": 3}


def trained(settings, merged, experts, batches):
    return inner_adapters(settings, merged, experts, batches, HEAD, 42, None)


def arguments_of(tasks=("mnist", "dtd")):
    arguments = experiment(tasks=tasks)
    return {key: arguments[key] for key in ("merged", "experts", "batches")}


def linear(width, rank, back, draws):
    """torch's own layer with weights drawn as its own are."""
    layer = nn.Linear(rank if back else width, width if back else rank, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(0 * layer.weight if back else bounded((rank, width), width, draws))
    return layer


def bounded(shape, width, draws):
    return torch.empty(shape).uniform_(-(width**-0.5), width**-0.5, generator=draws).double()


def through(model, x, block=lambda i, x: x, attention=lambda i, y: y):
    """CLIP's forward written out: what stands behind every block, and the last feature."""
    x, means = model.pre_layrnorm(model.embeddings(x)), []
    for i, layer in enumerate(model.encoder.layers):
        x = x + attention(i, layer.self_attn(layer.layer_norm1(x))[0])
        x = block(i, x + layer.mlp(layer.layer_norm2(x)))
        means.append(x.mean(1))
    return means, model.post_layernorm(x[:, 0]) @ HEAD.T


def published_surgery(model, task):
    """The weights of one task, the function that a batch goes through, and what is compared."""
    widths = {f"encoder.layers.{i}": 32 for i in range(2)} | {FEATURE: 8}
    layers = {}
    for path, width in widths.items():
        draws = generator(task, f"initialisation {path}", 42)
        layers[path] = (linear(width, 3, False, draws), linear(width, 3, True, draws))

    def corrected(path, z):
        down, up = layers[path]
        return z - up(torch.relu(down(z)))

    def run(x):
        means, last = through(model, x, lambda i, z: corrected(f"encoder.layers.{i}", z))
        return [*means, corrected(FEATURE, last)]

    weights = {path: {"down": down.weight, "up": up.weight} for path, (down, up) in layers.items()}
    return weights, run, lambda expert, x: [*(pair := through(expert, x))[0], pair[1]]


def published_interventions(model, task):
    weights = {}
    for i in range(2):
        path = f"encoder.layers.{i}.self_attn.out_proj"
        draws = generator(task, f"initialisation {path}", 42)
        shapes = {"source": (3, 32), "read": (3, 32), "source_bias": (1, 3), "read_bias": (1, 3)}
        tensors = {name: bounded(shape, 32, draws) for name, shape in shapes.items()}
        weights[path] = {name: weight.requires_grad_() for name, weight in tensors.items()}

    def attention(i, y):
        w, h = weights[f"encoder.layers.{i}.self_attn.out_proj"], y[:, 0]
        source, read = h @ w["source"].T + w["source_bias"], h @ w["read"].T + w["read_bias"]
        return torch.cat([(h + (source - read) @ w["read"])[:, None], y[:, 1:]], 1)

    def run(x):
        return [through(model, x, attention=attention)[1]]

    return weights, run, lambda expert, x: [through(expert, x)[1]]


@pytest.mark.parametrize(
    ("published", "settings"),
    [(published_surgery, SurgeryV2(**STEPS)), (published_interventions, IntervMerge(**STEPS))],
)
def test_weights_are_those_of_the_published_loop(published, settings):
    arguments = arguments_of()
    result = trained(settings, **arguments)
    images = torch.cat([batch["pixel_values"] for batch in arguments["batches"]["dtd"]])
    weights, run, expected = published(arguments["merged"], "dtd")
    parameters = [w for by_name in weights.values() for w in by_name.values()]
    times = 3 if settings.name == "interv_merge" else 1  # how often its script lists each of them
    with warnings.catch_warnings(action="ignore"):
        adam = torch.optim.Adam(parameters * times, lr=0.01)
    for indices in islice(batch_order("dtd", len(images), settings, 42), settings.steps):
        with torch.no_grad():
            targets = expected(arguments["experts"]["dtd"], images[indices])
        pairs = zip(run(images[indices]), targets, strict=True)
        loss = sum((output - target).abs().mean() for output, target in pairs)
        adam.zero_grad()
        loss.backward()
        adam.step()
    for path, by_name in weights.items():
        for name, want in by_name.items():
            actual = result.weights["dtd"][path][name]
            torch.testing.assert_close(actual, want.detach(), rtol=0, atol=1e-8)
    with torch.no_grad():
        want = run(images)[-1]
        with result.inside(arguments["merged"], "dtd"):
            last = arguments["merged"](pixel_values=images).pooler_output @ HEAD.T
    torch.testing.assert_close(result.apply("dtd", last), want, rtol=0, atol=1e-8)


@pytest.mark.parametrize("settings", [SurgeryV2(**STEPS), IntervMerge(**STEPS)])
def test_no_task_touches_another_or_the_model(settings, tmp_path):
    arguments, before = arguments_of(), arguments_of()["merged"]
    both = trained(settings, **arguments)
    single = {key: {"mnist": arguments[key]["mnist"]} for key in ("experts", "batches")}
    alone = trained(settings, arguments["merged"], **single)
    both.save(tmp_path / "adapters")
    stored = InnerAdapters.load(tmp_path / "adapters")
    assert stored.method == settings.name and stored.weights.keys() == both.weights.keys()
    for task, other in (("mnist", alone), ("mnist", stored), ("dtd", stored)):
        assert other.weights[task].keys() == both.weights[task].keys()
        for path, by_name in both.weights[task].items():
            assert all(torch.equal(w, other.weights[task][path][n]) for n, w in by_name.items())
    assert same_bits(arguments["merged"], before)
    assert not any(module._forward_hooks for module in arguments["merged"].modules())


def test_a_rank_above_the_width_and_a_language_model_are_refused():
    with pytest.raises(BadSetting, match="surgery_v2.rank"):
        trained(SurgeryV2(**STEPS | {"rank": 33}), **arguments_of(("mnist",)))
    model = tiny.make(lambda: LlamaForCausalLM(LlamaConfig(**tiny.TEXT)))
    texts = {"a": [{"input_ids": torch.ones(2, 3, dtype=torch.long)}]}
    with pytest.raises(BadPlan, match="encoder"):
        trained(SurgeryV2(), model, {"a": model}, texts)
