"""Clear errors for what `calibrate` is given, and a folder that appears whole or not at all."""

import copy
import json

import pytest
import torch
from tiny import PAPER, clip, experiment, images, same_bits

import featcal.models.save
from featcal import Calibration, calibrate
from featcal.calibration.report import BlockRecord
from featcal.errors import BadBatches, BadPlan, NotFinite
from featcal.models.load import load_vision

PLAIN = {"settings": PAPER}


def spoil(model, name, value):
    """A copy with one broken number."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = value
    return model


def refused(error, given):
    """The message with which an experiment is refused."""
    with pytest.raises(error) as caught:
        calibrate(**given, settings=PAPER)
    return str(caught.value)


@pytest.mark.parametrize(
    ("role", "value"), [("merged", torch.nan), ("base", torch.inf), ("mnist", torch.nan)]
)
def test_broken_number_in_a_checkpoint_names_the_model_and_the_tensor(role, value):
    given, name = experiment(), "encoder.layers.1.mlp.fc2.weight"
    place = given["experts"] if role == "mnist" else given
    place[role] = spoil(place[role], name, value)
    message = refused(NotFinite, given)
    assert role in message and name in message


def pixels(*shape, value=0.0):
    return {"pixel_values": torch.full(shape, value, dtype=torch.float64)}


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ([], "empty"),
        ([pixels(0, 3, 16, 16)], "empty"),
        (pixels(1), "expected a list"),
        ([torch.zeros(1, 3, 16, 16)], "expected a mapping"),
        ([{"pixels": torch.zeros(1)}], "batch 0 has no 'pixel_values' (it holds: pixels)"),
        ([pixels(1, 3, 9, 9)], "batch 0 is refused by the model"),
        ([*images(1), pixels(1, 3, 16, 16, value=torch.inf)], "batch 2 holds NaN or Inf"),
        (None, "['svhn']: is missing for the expert of that name; did you mean 'svnh'"),
    ],
)
def test_unusable_batches_name_the_task_and_what_is_wrong(bad, says):
    given = experiment()
    if bad is None:
        given["batches"]["svnh"] = given["batches"].pop("svhn")
    else:
        given["batches"]["svhn"] = bad
    message = refused(BadBatches, given)
    assert "svhn" in message and says in message


def test_model_whose_blocks_cannot_be_replayed_is_refused_before_anything_is_solved():
    given, calls = experiment(), []
    inner = given["merged"].encoder.layers[0].forward

    def drifting(*args, **kwargs):
        calls.append(1)
        return inner(*args, **kwargs) * len(calls)

    given["merged"].encoder.layers[0].forward = drifting
    assert "differs from the model's own forward by" in refused(BadPlan, given)


def test_a_folder_appears_whole_or_the_older_one_stays(tmp_path, monkeypatch):
    def fails(*_args, **_kwargs):
        raise OSError("broken disk")

    how = PLAIN | {"out": tmp_path / "out"}
    with monkeypatch.context() as patch, pytest.raises(OSError, match="broken disk"):
        patch.setattr(featcal.models.save, "write_config", fails)
        calibrate(**experiment(torch.float32), **how)
    assert [p.name for p in tmp_path.iterdir()] == [".out.unfinished"]  # the solved blocks
    result, in_memory = (calibrate(**experiment(torch.float32), **each) for each in (how, PLAIN))
    folder = result.folder
    assert result.model is None and [p.name for p in tmp_path.iterdir()] == ["out"]
    assert same_bits(load_vision(folder), in_memory.model)
    record = json.loads((folder / "featcal.json").read_text())
    assert Calibration(**record["settings"]) == PAPER
    assert [BlockRecord(**block) for block in record["blocks"]] == in_memory.blocks == result.blocks
    before, given = {p.name: p.read_bytes() for p in folder.iterdir()}, experiment(torch.float32)
    given["experts"]["dtd"] = spoil(clip(dtype=torch.float32), "post_layernorm.bias", torch.nan)
    with pytest.raises(NotFinite, match="dtd"):
        calibrate(**given, **how)
    assert before == {p.name: p.read_bytes() for p in folder.iterdir()}
