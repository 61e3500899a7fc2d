"""Pico models and batches: two blocks, 32 features, made in memory from a seed."""

import copy
from types import SimpleNamespace

import torch
import transformers as tf

from featcal.settings import Calibration

TASKS = ("mnist", "dtd", "svhn")
PAPER = Calibration(ridge=0.05, anchor_blend=2.0, interpolation=0.3)
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION = SIZES | {"image_size": 16, "patch_size": 8}
TEXT = SIZES | {"vocab_size": 97, "intermediate_size": 64}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def make(build, seed=0, dtype=torch.float64):
    """A model in evaluation mode whose parameters come from the seed, none of them trivial."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build().to(dtype).eval()
    return shifted(model, seed + 1000, 0.1)


def clip(seed=0, dtype=torch.float64, width=32, **more):
    """A CLIP vision tower of 5 tokens."""
    sizes = VISION | {"hidden_size": width, "intermediate_size": 3 * width} | more
    return make(lambda: tf.CLIPVisionModel(tf.CLIPVisionConfig(**sizes)), seed, dtype)


def shifted(model, seed, scale=0.1):
    """A copy with every parameter moved: a stand-in for fine-tuning."""
    model, g = copy.deepcopy(model), seeded(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += scale * torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype)
    return model


def averaged(models):
    result = copy.deepcopy(models[0])
    with torch.no_grad():
        for p, *others in zip(result.parameters(), *(m.parameters() for m in models), strict=True):
            p.copy_(sum(others) / len(others))
    return result


def images(seed, count=6, batch=3, dtype=torch.float64, size=16):
    x = torch.randn(count, 3, size, size, generator=seeded(seed), dtype=torch.float64).to(dtype)
    return [{"pixel_values": part} for part in x.split(batch)]


def refilled(batches):
    """Batches that are one mapping and its tensors, filled again for each."""
    same = {}
    for batch in batches:
        for name, x in batch.items():
            same.setdefault(name, torch.empty_like(x)).copy_(x)
        yield same


def experiment(dtype=torch.float64, tasks=TASKS, count=6, batch=3, build=clip):
    """Arguments of `featcal.calibrate`: base, experts, their average and batches."""
    base = build(dtype=dtype)
    experts = {task: shifted(base, 10 + i) for i, task in enumerate(tasks)}
    batches = {task: images(100 + i, count, batch, dtype) for i, task in enumerate(tasks)}
    merged = averaged(list(experts.values()))
    return {"merged": merged, "base": base, "experts": experts, "batches": batches}


def difference(a, b):
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


def same_bits(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def merged_with_record(method, base, experts, out=None, **given):
    """The result of a merge as `featcal.merge` makes it, and the content of its merge.json."""
    from featcal.merging.merge import open_merge

    opened = open_merge(method, base, experts, **given)
    return SimpleNamespace(result=opened.finish(opened.run(), out), record=opened.record)
