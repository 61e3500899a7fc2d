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


def given_of(tasks=("mnist", "dtd")):
    given = experiment(tasks=tasks)
    return {key: given[key] for key in ("merged", "experts", "batches")}


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
    x, behind = model.pre_layrnorm(model.embeddings(x)), []
    for i, layer in enumerate(model.encoder.layers):
        x = x + attention(i, layer.self_attn(layer.layer_norm1(x))[0])
        x = block(i, x + layer.mlp(layer.layer_norm2(x)))
        behind.append(x.mean(1))
    return behind, model.post_layernorm(x[:, 0]) @ HEAD.T


def published_surgery(model, task):
    """The weights of one task, the function that a batch goes through, and what is compared."""
    places = {f"encoder.layers.{i}": 32 for i in range(2)} | {FEATURE: 8}
    own = {}
    for path, width in places.items():
        draws = generator(task, f"initialisation {path}", 42)
        own[path] = (linear(width, 3, False, draws), linear(width, 3, True, draws))

    def off(path, z):
        down, up = own[path]
        return z - up(torch.relu(down(z)))

    def run(x):
        behind, last = through(model, x, lambda i, z: off(f"encoder.layers.{i}", z))
        return [*behind, off(FEATURE, last)]

    found = {path: {"down": down.weight, "up": up.weight} for path, (down, up) in own.items()}
    return found, run, lambda expert, x: [*(pair := through(expert, x))[0], pair[1]]


def published_interventions(model, task):
    found = {}
    for i in range(2):
        path = f"encoder.layers.{i}.self_attn.out_proj"
        draws = generator(task, f"initialisation {path}", 42)
        shapes = {"source": (3, 32), "read": (3, 32), "source_bias": (1, 3), "read_bias": (1, 3)}
        drawn = {name: bounded(shape, 32, draws) for name, shape in shapes.items()}
        found[path] = {name: weight.requires_grad_() for name, weight in drawn.items()}

    def attention(i, y):
        w, h = found[f"encoder.layers.{i}.self_attn.out_proj"], y[:, 0]
        wanted, there = h @ w["source"].T + w["source_bias"], h @ w["read"].T + w["read_bias"]
        return torch.cat([(h + (wanted - there) @ w["read"])[:, None], y[:, 1:]], 1)

    def run(x):
        return [through(model, x, attention=attention)[1]]

    return found, run, lambda expert, x: [through(expert, x)[1]]


@pytest.mark.parametrize(
    ("published", "settings"),
    [(published_surgery, SurgeryV2(**STEPS)), (published_interventions, IntervMerge(**STEPS))],
)
def test_weights_are_those_of_the_published_loop(published, settings):
    given = given_of()
    result = trained(settings, **given)
    images = torch.cat([batch["pixel_values"] for batch in given["batches"]["dtd"]])
    weights, run, wanted = published(given["merged"], "dtd")
    each = [w for own in weights.values() for w in own.values()]
    times = 3 if settings.name == "interv_merge" else 1  # how often its script lists each of them
    with warnings.catch_warnings(action="ignore"):
        adam = torch.optim.Adam(each * times, lr=0.01)
    for chosen in islice(batch_order("dtd", len(images), settings, 42), settings.steps):
        with torch.no_grad():
            theirs = wanted(given["experts"]["dtd"], images[chosen])
        pairs = zip(run(images[chosen]), theirs, strict=True)
        loss = sum((one - other).abs().mean() for one, other in pairs)
        adam.zero_grad()
        loss.backward()
        adam.step()
    for path, own in weights.items():
        for name, want in own.items():
            found = result.weights["dtd"][path][name]
            torch.testing.assert_close(found, want.detach(), rtol=0, atol=1e-8)
    with torch.no_grad():
        want = run(images)[-1]
        with result.inside(given["merged"], "dtd"):
            last = given["merged"](pixel_values=images).pooler_output @ HEAD.T
    torch.testing.assert_close(result.apply("dtd", last), want, rtol=0, atol=1e-8)


@pytest.mark.parametrize("settings", [SurgeryV2(**STEPS), IntervMerge(**STEPS)])
def test_no_task_touches_another_or_the_model(settings, tmp_path):
    given, before = given_of(), given_of()["merged"]
    both = trained(settings, **given)
    one = {key: {"mnist": given[key]["mnist"]} for key in ("experts", "batches")}
    alone = trained(settings, given["merged"], **one)
    both.save(tmp_path / "adapters")
    stored = InnerAdapters.load(tmp_path / "adapters")
    assert stored.method == settings.name and stored.weights.keys() == both.weights.keys()
    for task, other in (("mnist", alone), ("mnist", stored), ("dtd", stored)):
        assert other.weights[task].keys() == both.weights[task].keys()
        for path, named in both.weights[task].items():
            assert all(torch.equal(w, other.weights[task][path][n]) for n, w in named.items())
    assert same_bits(given["merged"], before)
    assert not any(module._forward_hooks for module in given["merged"].modules())


def test_a_rank_above_the_width_and_a_language_model_are_refused():
    with pytest.raises(BadSetting, match="surgery_v2.rank"):
        trained(SurgeryV2(**STEPS | {"rank": 33}), **given_of(("mnist",)))
    model = tiny.make(lambda: LlamaForCausalLM(LlamaConfig(**tiny.TEXT)))
    texts = {"a": [{"input_ids": torch.ones(2, 3, dtype=torch.long)}]}
    with pytest.raises(BadPlan, match="encoder"):
        trained(SurgeryV2(), model, {"a": model}, texts)
