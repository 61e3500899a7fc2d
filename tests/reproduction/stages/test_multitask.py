"""The model trained on all tasks at once: what each step sees, and what stays as it was."""

import pytest
import torch
from safetensors.torch import load_file
from smoke_graph import lay_out, working_in

from featcal.data.images import ImageSet
from reproduction.stages.run import run_stage
from reproduction.suites import fine_tune, load_task, multitask
from reproduction.suites.descent import batch_indices
from reproduction.suites.experts import write_base_and_heads
from reproduction.suites.recipe import FineTune

TASKS = ("mnist", "svhn", "dtd")
# Softmax does not see a shift of its scores, so this gradient is nothing but rounding, and on some
# processors nothing at all.
NO_GRADIENT = "self_attn.k_proj.bias"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Images of the smoke suite, and a folder with base and heads."""
    work = tmp_path_factory.mktemp("multitask")
    lay_out(work)
    with working_in(work):
        run_stage("prepare_data", None)
    data, prepared = work / "outputs/smoke/data", work / "prepared"
    write_base_and_heads(
        work / "reproduction/mini/models/clip_b32", data, TASKS, "prompts", "cpu", prepared
    )
    return data, prepared


def job(seed=0, steps=4, model=None):
    return multitask.Shared(TASKS, model, FineTune(steps=steps, batch=8, warm_up=1), seed, "cpu")


def made(folders, out, **more):
    """The tensors of one training."""
    data, prepared = folders
    multitask.write_multitask(job(**more), prepared, data, out / "pins.json", out / "model")
    return load_file(out / "model/model.safetensors")


def test_the_same_seed_gives_the_same_bytes_and_what_is_frozen_stays_the_base(folders, tmp_path):
    once, again, other = (
        made(folders, tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert (tmp_path / "a/model/model.safetensors").read_bytes() == (
        tmp_path / "b/model/model.safetensors"
    ).read_bytes()
    base = load_file(folders[1] / "base/model.safetensors")
    stayed = {name for name in base if torch.equal(once[name], base[name])}
    frozen = {name for name in base if name.startswith(FineTune().frozen)}
    assert (
        frozen <= stayed <= frozen | {name for name in base if name.endswith(NO_GRADIENT)}
        and again.keys() == base.keys()
    )
    assert any(not torch.equal(once[name], other[name]) for name in base)


def test_every_step_sees_the_next_task_with_its_own_head_in_an_order_no_expert_has(
    folders, tmp_path, monkeypatch
):
    whole, seen = fine_tune.trained, []

    def told(vision, projection, scale, lesson, settings):
        seen.extend(lesson(step) for step in range(settings.steps))
        return whole(vision, projection, scale, lesson, settings)

    monkeypatch.setattr(fine_tune, "trained", told)
    made(folders, tmp_path, steps=4)
    heads = load_file(folders[1] / "heads.safetensors")
    assert [lesson.task for lesson in seen] == [*TASKS, TASKS[0]]
    assert all(
        torch.equal(lesson.head, heads[f"head/{lesson.task}"]) and len(lesson.labels) == 8
        for lesson in seen
    )
    first, second = seen[0], seen[3]
    assert not torch.equal(first.pixels, second.pixels), (
        "the second turn of a task goes on in its epoch"
    )
    images: ImageSet = load_task.load_task(folders[0], "mnist", "train", folders[1] / "base")
    experts = images.tensor(batch_indices("mnist", len(images), 8, 0, 0))
    assert not torch.equal(first.pixels, experts)


def test_a_model_of_the_hub_is_fetched_and_stored_as_a_vision_tower(folders, tmp_path, monkeypatch):
    prepared, asked = folders[1], []
    monkeypatch.setattr(
        "reproduction.suites.hub.fetch", lambda name, pins: asked.append(name) or prepared / "base"
    )
    model, base = (
        made(folders, tmp_path, model="someone/model"),
        load_file(prepared / "base/model.safetensors"),
    )
    assert asked == ["someone/model"] and all(torch.equal(base[name], model[name]) for name in base)
