"""Public functions name all their arguments; load_batches draws as the command line does."""

from inspect import Parameter, signature

import checkpoints
import pytest
import torch
from PIL import Image

import featcal
from featcal.data.batches import Draw, drawn
from featcal.data.places import Location
from featcal.errors import BadSetting, MissingPath
from featcal.models.stored import skeleton


@pytest.mark.parametrize("name", sorted(featcal.__all__))
def test_no_public_function_takes_just_anything(name):
    parameters = signature(getattr(featcal, name)).parameters.values()
    loose = [p.name for p in parameters if p.kind == Parameter.VAR_KEYWORD]
    assert loose == (["settings"] if name == "merge" else [])


@pytest.fixture
def folders(tmp_path):
    """A tiny model with its processor, and pictures of two tasks."""
    checkpoints.vision_folder(tmp_path / "base")
    checkpoints.processor().save_pretrained(tmp_path / "base")
    for number, task in enumerate(("b", "a")):
        (tmp_path / task / "train").mkdir(parents=True)
        for i in range(6):
            image = Image.new("RGB", (9, 9), (40 * i, 90 * number, 7))
            image.save(tmp_path / task / "train" / f"{i}.png")
    return tmp_path


def test_batches_are_those_that_the_command_draws(folders):
    data = {task: folders / task for task in ("b", "a")}
    ours = featcal.load_batches(data, folders / "base", samples=5, seed=3, batch=2)
    places = {task: Location(path) for task, path in data.items()}
    theirs = drawn(skeleton(folders / "base"), [folders / "base"], places, Draw(5, 3, 2))
    assert list(ours) == list(theirs) == ["a", "b"]
    for task in ours:
        for _ in range(2):  # they can be read again
            pairs = list(zip(ours[task], theirs[task], strict=True))
            assert [len(one["pixel_values"]) for one, _ in pairs] == [2, 2, 1]
            assert all(one["pixel_values"].equal(other["pixel_values"]) for one, other in pairs)


def test_samples_after_the_drawn_ones_are_others(folders):
    given = skeleton(folders / "base"), [folders / "base"], {"a": Location(folders / "a")}
    draws = Draw(4, 3, 6), Draw(2, 3, 6, skip=4)
    ours, others = (next(iter(drawn(*given, draw)["a"]))["pixel_values"] for draw in draws)
    assert len(others) == 2 and len(torch.cat([ours, others]).unique(dim=0)) == 6


def test_what_is_not_there_or_too_little_is_said(folders):
    with pytest.raises(BadSetting, match="at most 6"):
        featcal.load_batches({"a": folders / "a"}, folders / "base", samples=7)
    with pytest.raises(MissingPath, match="nowhere"):
        featcal.load_batches({"a": "nowhere"}, folders / "base")
