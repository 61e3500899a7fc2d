"""What `calibrate` is given and what it writes: one clear error each, and a folder that appears
whole or not at all.
"""

import copy
import json

import pytest
import torch
from tiny import PAPER, clip, experiment, images, same_bits

import featcal.models.save
from featcal import calibrate
from featcal.errors import BadBatches, BadPlan, NotFinite
from featcal.models.load import load_vision


def spoil(model, name, value):
    """A copy with one broken number."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = value
    return model


def refused(error, **changes):
    """The message with which a changed experiment is refused."""
    with pytest.raises(error) as caught:
        calibrate(**experiment() | changes, settings=PAPER)
    return str(caught.value)


@pytest.mark.parametrize(
    ("role", "value"), [("merged", torch.nan), ("base", torch.inf), ("mnist", torch.nan)]
)
def test_broken_number_in_a_checkpoint_names_the_model_and_the_tensor(role, value):
    given, name = experiment(), "encoder.layers.1.mlp.fc2.weight"
    if role == "mnist":
        message = refused(
            NotFinite, experts=given["experts"] | {role: spoil(given["experts"][role], name, value)}
        )
    else:
        message = refused(NotFinite, **{role: spoil(given[role], name, value)})
    assert role in message and name in message


def test_expert_without_batches_names_the_task_and_the_nearest_one():
    batches = experiment()["batches"]
    batches["mnits"] = batches.pop("mnist")
    message = refused(BadBatches, batches=batches)
    assert "['mnist']: is missing" in message and "did you mean 'mnits'" in message


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ([], "empty"),
        ([{"pixel_values": torch.zeros(0, 3, 16, 16, dtype=torch.float64)}], "empty"),
        ({"pixel_values": torch.zeros(1)}, "expected a list"),
        ([torch.zeros(1, 3, 16, 16)], "expected a mapping"),
        (
            [{"pixels": torch.zeros(1, 3, 16, 16, dtype=torch.float64)}],
            "batch 0 has no 'pixel_values' (it holds: pixels)",
        ),
        (
            [{"pixel_values": torch.zeros(1, 3, 9, 9, dtype=torch.float64)}],
            "batch 0 is refused by the model",
        ),
        (
            images(1)
            + [{"pixel_values": torch.full((1, 3, 16, 16), torch.inf, dtype=torch.float64)}],
            "batch 2 holds NaN or Inf",
        ),
    ],
)
def test_unusable_batches_name_the_task_and_what_is_wrong(bad, says):
    message = refused(BadBatches, batches=experiment()["batches"] | {"svhn": bad})
    assert "svhn" in message and says in message


def test_model_whose_blocks_cannot_be_replayed_is_refused_before_anything_is_solved():
    given = experiment()
    inner = given["merged"].encoder.layers[0].forward
    calls = []

    def drifting(*args, **kwargs):
        calls.append(1)
        return inner(*args, **kwargs) * len(calls)

    given["merged"].encoder.layers[0].forward = drifting
    assert "differs from the model's own forward by" in refused(BadPlan, **given)


def written(tmp_path, name="out", **changes):
    given = experiment(torch.float32) | changes
    return given, calibrate(**given, settings=PAPER, out=tmp_path / name)


def test_written_folder_holds_the_calibrated_model_its_settings_and_its_blocks(tmp_path):
    given, result = written(tmp_path)
    in_memory = calibrate(**given, settings=PAPER)
    assert result.model is None and result.folder == tmp_path / "out"
    assert same_bits(load_vision(result.folder), in_memory.model)
    record = json.loads((result.folder / "featcal.json").read_text())
    assert record["settings"]["ridge"] == 0.05
    assert [block["name"] for block in record["blocks"]] == ["vision.00", "vision.01"]
    assert result.blocks == in_memory.blocks


def test_of_a_folder_that_could_not_be_written_only_the_solved_blocks_are_left(
    tmp_path, monkeypatch
):
    def fails(*_args, **_kwargs):
        raise OSError("broken disk")

    monkeypatch.setattr(featcal.models.save, "write_config", fails)
    with pytest.raises(OSError, match="broken disk"):
        written(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [".out.unfinished"]
    monkeypatch.undo()
    written(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_older_folder_stays_whole_until_the_new_one_is(tmp_path, monkeypatch):
    folder = written(tmp_path)[1].folder
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    broken = experiment(torch.float32)["experts"] | {
        "dtd": spoil(clip(dtype=torch.float32), "post_layernorm.bias", torch.nan)
    }
    with pytest.raises(NotFinite, match="dtd"):
        written(tmp_path, experts=broken)
    assert before == {p.name: p.read_bytes() for p in folder.iterdir()}
