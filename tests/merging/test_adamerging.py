"""AdaMerging: entropy and first step by hand, gradient by differences, start, clamping, streams."""

import math

import pytest
import tiny
import torch
import transformers as tf

from featcal.errors import BadBatches, Diverged
from featcal.merging.merge import merge
from featcal.merging.methods.answers import Mixture, endless, entropy, entropy_gradients, learn
from featcal.merging.registry import MergeJob
from featcal.merging.sources import ModuleSource

TASKS = ("dtd", "mnist")


def head(tasks=TASKS):
    """Zero-shot heads of an encoder of width 32."""
    g = tiny.seeded(3)
    tensors = {"logit_scale": torch.tensor(2.0)}
    tensors["visual_projection"] = torch.randn(8, 32, generator=g)
    for task in tasks:
        rows = torch.randn(5, 8, generator=g)
        tensors[f"head/{task}"] = torch.nn.functional.normalize(rows, dim=-1)
    return tensors


def models(build=tiny.clip):
    base = build()
    return base, {task: tiny.shifted(base, 10 + i, 0.05) for i, task in enumerate(TASKS)}


def data():
    return {task: tiny.images(100 + i) for i, task in enumerate(TASKS)}


def adamerging(base=None, experts=None, record=False, **settings):
    if experts is None:
        base, experts = models()
    given = {"batches": data(), "head": head()} | settings
    return (tiny.merged_with_record if record else merge)("adamerging", base, experts, **given)


def job():
    base, experts = models()
    sources = {task: ModuleSource(expert, task).tensors for task, expert in experts.items()}
    batches, heads = data(), {name: tensor.double() for name, tensor in head().items()}
    origin = ModuleSource(base, "base").tensors
    return MergeJob(origin, sources, tiny.clip, batches=batches, head=heads)


def answered(work, mixture):
    """The loss of every task's first batch; its gradient is added to that of the coefficients."""
    mixed, model, loss = mixture.tensors(), work.structure(), 0.0
    for task in work.experts:
        one, gradients = entropy_gradients(work, mixed, model, (task, 0, work.batches[task][0]))
        for tensor, gradient in zip(mixed.values(), gradients, strict=True):
            if gradient is not None:
                tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient
        loss += one
    mixture.pull_back(mixed)
    return loss


def test_entropy_of_two_answers_by_hand():
    logits = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]], dtype=torch.float64)
    want = (math.log(2) - 0.75 * math.log(0.75) - 0.25 * math.log(0.25)) / 2
    # the source adds 1e-8 inside the logarithm
    assert float(entropy(logits)) == pytest.approx(want, abs=1e-7)
    assert abs(entropy(torch.tensor([[99.0, 0.0]]).half())) < 1e-7


@pytest.mark.parametrize("granularity", ["layer", "task"])
@pytest.mark.parametrize("clamp", [False, True])
def test_the_gradient_is_that_of_finite_differences(granularity, clamp):
    work = job()
    mixture = Mixture(work, granularity, 0.4, clamp)
    answered(work, mixture)

    def loss_at(coefficients):
        other = Mixture(work, granularity, clamp=clamp)
        with torch.no_grad():
            other.coefficients.copy_(coefficients)
        return answered(work, other)

    for at in [(0, 0), (1, mixture.coefficients.shape[1] - 1)]:
        shift = torch.zeros_like(mixture.coefficients)
        shift[at] = 1e-5
        ends = [loss_at(mixture.coefficients + d) for d in (shift, -shift)]
        want = pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5, abs=1e-9)
        assert float(mixture.coefficients.grad[at]) == want


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({"granularity": "layer", "start": 0.3}, 0.3),
        ({"granularity": "task", "start": 0.3}, 0.3),
        ({"start": -1.0, "clamp": True}, 0.0),
        ({"start": 2.0, "clamp": True}, 1.0),
    ],
)
def test_without_steps_it_is_task_arithmetic_by_the_clamped_start(settings, scale):
    base, experts = models()
    want = merge("task_arithmetic", base, experts, scale=scale)
    assert tiny.difference(adamerging(base, experts, steps=0, **settings), want) < 1e-12


def vit(pools=True):
    config = tf.ViTConfig(**tiny.VISION, intermediate_size=96)
    return tiny.make(lambda: tf.ViTModel(config, add_pooling_layer=pools))


@pytest.mark.parametrize("build", [tiny.clip, vit])
def test_steps_lower_the_entropy_of_one_batch_and_the_record_shows_it(build):
    base, experts = models(build)
    batches = {task: [of[0]] for task, of in data().items()}
    settings = {"batches": batches, "steps": 30, "rate": 1e-2}
    lines: list[str] = []
    done = adamerging(base, experts, record=True, progress=lines.append, **settings)
    losses = done.record["loss"]
    assert len(losses) == 30 and losses[-1] < losses[0] and len(lines) == 30
    assert set(done.record["coefficients"]["mnist"]) == set(base.state_dict())


def test_tasks_answered_at_the_same_time_give_the_same_bits():
    base, experts = models()
    experts["gtsrb"] = tiny.shifted(base, 12, 0.05)  # an odd number: the last one answers alone
    given = {"batches": data() | {"gtsrb": tiny.images(102)}, "head": head((*TASKS, "gtsrb"))}
    given |= {"record": True, "steps": 5}
    one, two, many = (adamerging(base, experts, n_jobs=n, **given) for n in (1, 2, 8))
    assert tiny.same_bits(one.result, two.result) and one.record["loss"] == two.record["loss"]
    assert tiny.same_bits(one.result, many.result)


def test_two_batches_a_step_add_their_losses():
    def first_loss(work, count):
        return learn(work, [work.structure()], Mixture(work, "task"), 1, 1e-3, count)[0]

    work = job()
    losses = [first_loss(work, count) for count in (1, 2)]
    work.batches = {task: of[1:] for task, of in data().items()}
    assert losses[1] == pytest.approx(losses[0] + first_loss(work, 1), rel=1e-12)


def test_batches_repeat_and_an_iterable_that_shuffles_is_iterated_anew():
    batches = data()["mnist"]
    rounds = [batches, batches[::-1], []]

    class Shuffled:
        def __iter__(self):
            return iter(rounds.pop(0))

    stream = endless("mnist", Shuffled(), tiny.clip())
    for i in (0, 1, 1, 0):
        assert next(stream)[1] is batches[i]
    with pytest.raises(BadBatches, match="empty"):
        next(stream)


def test_nan_stops_with_the_step():
    with pytest.raises(Diverged, match="not finite at step 1"):
        adamerging(steps=5, rate=1e300)
