"""Fine-tuning encoders: a plain loop as oracle, frozen parts, repeats, one model for all tasks."""

import copy
import math
from zlib import crc32

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from encoders import encoder, task
from safetensors.torch import load_file
from tiny import same_bits

from featcal.errors import Diverged
from featcal.evaluation.accuracy import evaluate_pool, percent
from featcal.models.load import load_model
from reproduction.prepare.fine_tune import WINDOW, batch_indices, fine_tune, similar_lengths
from reproduction.prepare.sources import load_sentences
from reproduction.prepare.suite import FINE_TUNE, FineTune, FineTuneSentences
from reproduction.stages import prepare
from reproduction.stages.prepare import ExpertJob, write_expert

SHORT = FineTune(steps=12, batch=8, warm_up=3)
QUICK = FineTuneSentences(steps=60, lr=3.0e-3, batch=8, warm_up=5, frozen=("embeddings",))
HEADS = {
    "visual_projection": torch.randn(8, 32, generator=tiny.seeded(2)),
    "logit_scale": torch.tensor(2.0),
    "head/a": F.normalize(torch.randn(3, 8, generator=tiny.seeded(3)), dim=-1),
    "head/b": F.normalize(torch.randn(3, 8, generator=tiny.seeded(4)), dim=-1),
}


class Images:
    """An image set whose pixels are normalised already, and which notes what is read."""

    def __init__(self, seed=1, pixels=None):
        values = torch.randn(24, 3, 16, 16, generator=tiny.seeded(seed))
        self.pixels = (values if pixels is None else pixels).numpy()
        self.labels = np.arange(24) % 3
        self.seen = []

    def __len__(self):
        return len(self.labels)

    def batches(self, indices, size):
        self.seen.append(torch.from_numpy(self.pixels[indices]))
        yield {"pixel_values": self.seen[-1]}


def base():
    return tiny.clip(dtype=torch.float32)


def scores(model, pixels, head="head/a"):
    features = F.normalize(model(pixels).pooler_output @ HEADS["visual_projection"].T, dim=-1)
    return math.exp(2.0) * features @ HEADS[head].T


def test_an_expert_of_images_is_that_of_a_plain_loop():
    images, model = Images(), base()
    expected = copy.deepcopy(model).train()
    parameters = dict(expected.named_parameters())
    learning = [p for name, p in parameters.items() if not name.startswith(SHORT.frozen)]
    optimiser = torch.optim.SGD(learning, lr=1.0, momentum=0.9, nesterov=True)
    for step in range(SHORT.steps):
        epoch, turn = divmod(step, 3)
        order = np.random.default_rng([7, crc32(b"a"), epoch]).permutation(24)
        indices = order[8 * turn : 8 * turn + 8]
        rate = 0.03 * min(1, (step + 1) / 3) * (1 + math.cos(math.pi * step / 12)) / 2
        optimiser.param_groups[0]["lr"] = rate
        expected.zero_grad()
        pixels, labels = (torch.from_numpy(a[indices]) for a in (images.pixels, images.labels))
        F.cross_entropy(scores(expected, pixels), labels).backward()
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimiser.step()
    actual = fine_tune(model, HEADS, {"a": images}, SHORT, 7)
    for (name, weight), want in zip(actual.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(weight, want, msg=name, rtol=1e-5, atol=1e-6)
    assert not actual.training and all(p.requires_grad for p in actual.parameters())


def test_it_repeats_itself_leaves_base_and_frozen_parts_alone_and_depends_on_the_seed():
    model = base()
    first, again, other = (fine_tune(model, HEADS, {"a": Images()}, SHORT, s) for s in (0, 0, 1))
    assert same_bits(first, again) and not same_bits(first, other) and same_bits(model, base())
    for (name, p), q in zip(first.named_parameters(), model.parameters(), strict=True):
        # the bias of k shifts all scores of a query alike: its gradient is rounding, or nothing
        if not name.endswith("k_proj.bias"):
            assert torch.equal(p, q) == name.startswith(SHORT.frozen), name


def test_a_loss_that_is_not_finite_names_task_and_step():
    broken = Images(pixels=torch.full((24, 3, 16, 16), float("nan")))
    with pytest.raises(Diverged, match="'a'.*step 0"):
        fine_tune(base(), HEADS, {"a": broken}, SHORT, 0)


def test_a_model_for_all_tasks_sees_them_in_turn_in_an_order_no_expert_has():
    sets = {"a": Images(1), "b": Images(5)}
    shared = fine_tune(base(), HEADS, sets, SHORT.but(steps=5), 0, shared=True)
    assert [len(images.seen) for images in sets.values()] == [3, 2]
    for name, images in sets.items():
        for turn, batch in enumerate(images.seen):
            indices = batch_indices(f"multitask {name}", 24, 8, turn, 0)
            assert torch.equal(batch, torch.from_numpy(images.pixels[indices]))
            expert = batch_indices(name, 24, 8, turn, 0)
            assert not torch.equal(batch, torch.from_numpy(images.pixels[expert]))
    assert same_bits(shared, fine_tune(base(), HEADS, sets, SHORT.but(steps=5), 0, shared=True))


def test_batches_show_every_sample_once_per_epoch():
    epoch = np.concatenate([batch_indices("pcam", 12, 4, step, 0) for step in range(3)])
    assert sorted(epoch.tolist()) == list(range(12))
    assert not np.array_equal(batch_indices("pcam", 12, 4, 0, 0), batch_indices("dtd", 12, 4, 0, 0))
    steps = [similar_lengths("colours", 100, 8, step, 3) for step in range(100 // 8)]
    assert len(set(np.concatenate(steps).tolist())) == 96
    window = sorted(map(tuple, steps[:WINDOW]))  # cut of one sorted window: they do not overlap
    assert all(before[-1] < after[0] for before, after in zip(window, window[1:], strict=False))
    assert [s[0] for s in steps] != sorted(s[0] for s in steps)


def test_the_rate_rises_to_its_peak_and_falls_to_nothing():
    linear = FineTuneSentences(steps=100, lr=1.0, warm_up=20)
    rates = [linear.rate(step) for step in range(100)]
    assert (rates[0], max(rates), rates[20], rates[60]) == (0.05, 1.0, 1.0, 0.5)
    assert rates[99] == pytest.approx(1 / 80)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Base and heads of one task of sentences, and its expert."""
    root = tmp_path_factory.mktemp("store")
    texts = task(root / "texts" / "colours").parent
    folder = encoder(root / "encoder")
    prepare.write_encoder_and_heads(folder, texts, ("colours",), QUICK.temperature, root)
    job = ExpertJob("colours", FINE_TUNE, QUICK, 0, "cpu")
    write_expert(job, texts, root, root / "pins.json", root / "experts")
    return root


def test_an_expert_of_sentences_learns(store):
    before, expert = load_model(store / "base"), load_model(store / "experts")
    tensors = load_file(store / prepare.HEADS)
    assert set(tensors) == {"logit_scale", "head/colours"}
    assert float(tensors["logit_scale"]) == pytest.approx(np.log(20))
    sets = {"colours": load_sentences(store / "texts/colours", "test", store / "base")}
    models = {"base": before, "expert": expert}
    right = evaluate_pool(models, sets, {"colours": tensors["head/colours"]}, None)
    assert percent(right["expert"]["colours"]) > 90 > percent(right["base"]["colours"])
    for (name, old), new in zip(before.named_parameters(), expert.parameters(), strict=True):
        # no gradient reaches the pooling layer of the class token
        assert torch.equal(old, new) == name.startswith(("embeddings", "pooler")), name


def test_a_model_for_all_tasks_is_trained_from_the_base_or_fetched(store, tmp_path, monkeypatch):
    names, arguments = [], (store / "texts", store, tmp_path / "pins.json")
    job = ExpertJob("all", "fine_tune", QUICK.but(steps=2), 0, "cpu", tasks=("colours",))
    write_expert(job, *arguments, tmp_path / "trained")
    assert not same_bits(load_model(tmp_path / "trained"), load_model(store / "base"))
    fetched = "reproduction.prepare.hub.fetch"
    monkeypatch.setattr(fetched, lambda name, pins: names.append(name) or store / "experts")
    job = ExpertJob("all", "someone/model", QUICK, 0, "cpu", tasks=("colours",))
    write_expert(job, *arguments, tmp_path / "fetched")
    assert names == ["someone/model"]
    assert same_bits(load_model(tmp_path / "fetched"), load_model(store / "experts"))
