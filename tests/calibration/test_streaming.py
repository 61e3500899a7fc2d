"""Folders in, a folder out, one block of every model in memory at a time: the same numbers as with
whole models in memory.
"""

import json

import families
import pytest
import tiny
import torch
import transformers
from families import FAMILIES, KINDS
from safetensors.torch import load_file, save_file
from tiny import PAPER, clip, difference, same_bits

from featcal import calibrate
from featcal.calibration import calibrate as calibrate_module
from featcal.models.load import load_as_calibrated
from featcal.models.save import save_model


def written(given, root, save=save_model):
    """The same experiment with every model as a folder."""
    folders = {"merged": root / "merged", "base": root / "base"}
    for name, folder in folders.items():
        save(given[name], folder)
    experts = {}
    for task, expert in given["experts"].items():
        experts[task] = root / f"expert-{task}"
        save(expert, experts[task])
    return given | folders | {"experts": experts}


@pytest.mark.parametrize("family", KINDS)
def test_streamed_folders_give_the_bits_of_models_in_memory(family, tmp_path):
    given = families.experiment(FAMILIES[family], torch.float32)
    if family == "clip":  # of a folder the vision tower is calibrated
        given |= {name: given[name].vision_model for name in ("merged", "base")}
        given |= {
            "experts": {task: expert.vision_model for task, expert in given["experts"].items()}
        }
        given |= {
            "batches": {
                t: [{"pixel_values": b["pixel_values"]} for b in bs]
                for t, bs in given["batches"].items()
            }
        }
    in_memory = calibrate(**given, settings=PAPER, held_out={})
    folders = written(given, tmp_path, lambda m, f: m.save_pretrained(f))
    streamed = calibrate(**folders, settings=PAPER, out=tmp_path / "out", held_out={})
    assert streamed.blocks == in_memory.blocks and streamed.drift == in_memory.drift
    assert same_bits(type(given["merged"]).from_pretrained(tmp_path / "out"), in_memory.model)
    assert same_bits(load_as_calibrated(tmp_path / "out"), in_memory.model)


def test_streaming_in_float64_agrees_to_rounding(tmp_path, monkeypatch):
    given = families.experiment(FAMILIES["t5"])
    in_memory = calibrate(**given, settings=PAPER)
    folders = written(given, tmp_path)
    calibrate(**folders, settings=PAPER, out=tmp_path / "out", dtype=torch.float64)
    assert difference(load_as_calibrated(tmp_path / "out", torch.float64), in_memory.model) < 1e-9


def test_activations_on_disk_give_the_same_bits(tmp_path):
    given = written(families.experiment(FAMILIES["t5"], torch.float32), tmp_path)
    calibrate(**given, settings=PAPER, out=tmp_path / "in-memory")
    calibrate(**given, settings=PAPER, out=tmp_path / "on-disk", host_memory=0)
    first, second = (
        {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()}
        for name in ("in-memory", "on-disk")
    )
    assert first == second
    assert not list(tmp_path.glob(".*"))


def test_modules_and_folders_mix(tmp_path):
    given = tiny.experiment(torch.float32)
    folders = written(given, tmp_path)
    mixed = given | {
        "base": folders["base"],
        "experts": given["experts"] | {"dtd": folders["experts"]["dtd"]},
    }
    assert same_bits(
        calibrate(**mixed, settings=PAPER).model, calibrate(**given, settings=PAPER).model
    )


def test_written_folder_is_the_merged_one_with_other_weights(tmp_path):
    given = written(tiny.experiment(torch.float32), tmp_path)
    config = json.loads((given["merged"] / "config.json").read_text())
    (given["merged"] / "config.json").write_text(json.dumps(config | {"note": "kept"}))
    (given["merged"] / "preprocessor_config.json").write_text("{}")
    calibrate(**given, settings=PAPER, out=tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "README.md",
        "config.json",
        "featcal.json",
        "model.safetensors",
        "preprocessor_config.json",
    ]
    assert (tmp_path / "out" / "config.json").read_bytes() == (
        given["merged"] / "config.json"
    ).read_bytes()
    before, after = (
        load_file(folder / "model.safetensors") for folder in (given["merged"], tmp_path / "out")
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert changed and all(name.startswith("encoder.layers.") for name in changed)


def test_text_tower_of_a_whole_clip_is_copied(tmp_path):
    given = families.experiment(FAMILIES["clip"], torch.float32)
    given |= {
        "batches": {
            t: [{"pixel_values": b["pixel_values"]} for b in bs]
            for t, bs in given["batches"].items()
        }
    }
    calibrate(**written(given, tmp_path), settings=PAPER, out=tmp_path / "out")
    result = transformers.CLIPModel.from_pretrained(tmp_path / "out")
    assert same_bits(result.text_model, given["merged"].text_model)
    assert not same_bits(result.vision_model, given["merged"].vision_model)
    towers = {name: given[name].vision_model for name in ("merged", "base")}
    experts = {task: expert.vision_model for task, expert in given["experts"].items()}
    alone = calibrate(**given | towers | {"experts": experts}, settings=PAPER)
    assert same_bits(result.vision_model, alone.model)


def test_published_names_of_a_tower_are_kept(tmp_path):
    given = written(tiny.experiment(torch.float32), tmp_path)
    plain = calibrate(**given, settings=PAPER, out=tmp_path / "plain").folder
    for folder in (given["merged"], *given["experts"].values()):
        tensors = load_file(folder / "model.safetensors")
        old = {f"vision_model.{name}": tensor for name, tensor in tensors.items()}
        save_file(old, folder / "model.safetensors", metadata={"format": "pt"})
    calibrate(**given, settings=PAPER, out=tmp_path / "out")
    assert all(
        name.startswith("vision_model.")
        for name in load_file(tmp_path / "out" / "model.safetensors")
    )
    assert same_bits(load_as_calibrated(tmp_path / "out"), load_as_calibrated(plain))


def test_half_precision_is_calibrated_in_float32_and_written_as_it_came(tmp_path):
    given = tiny.experiment(torch.float32)
    halves = {"merged": given["merged"].bfloat16(), "base": given["base"].bfloat16()}
    halves["experts"] = {task: expert.bfloat16() for task, expert in given["experts"].items()}
    folders = written(given | halves, tmp_path)
    calibrate(**folders, settings=PAPER, out=tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    wide = {name: folder if name == "batches" else folder for name, folder in folders.items()}
    exact = calibrate(**wide, settings=PAPER).model  # in memory and in float32 throughout
    first = {
        name: p.bfloat16()
        for name, p in exact.named_parameters()
        if name.startswith("encoder.layers.0.")
    }
    assert all(
        torch.equal(stored[name], value) for name, value in first.items()
    )  # nothing was rounded before the first block


def test_sharded_folders_go_in(tmp_path):
    given = tiny.experiment(torch.float32)
    whole = calibrate(**given, settings=PAPER).model
    folders = written(
        given, tmp_path, lambda model, folder: save_model(model, folder, limit=20_000)
    )
    assert (folders["merged"] / "model.safetensors.index.json").is_file()
    calibrate(**folders, settings=PAPER, out=tmp_path / "out")
    assert same_bits(load_as_calibrated(tmp_path / "out"), whole)


def counted(tmp_path, monkeypatch, blocks, experts):
    """Most bytes of parameters, and of activations, in memory at once while a folder is
    calibrated.
    """
    tasks = tuple(f"task{i}" for i in range(experts))
    given = tiny.experiment(
        torch.float32, tasks, 10, build=lambda dtype: clip(dtype=dtype, num_hidden_layers=blocks)
    )
    root = tmp_path / f"{blocks}-{experts}"
    held, spools = [], []

    class Seen(calibrate_module.Spool):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            spools.append(self)

    monkeypatch.setattr(calibrate_module, "Spool", Seen)
    hold = calibrate_module.open_models
    monkeypatch.setattr(
        calibrate_module,
        "open_models",
        lambda *args, **kwargs: held.append(hold(*args, **kwargs)) or held[0],
    )
    calibrate(**written(given, root), settings=PAPER, out=root / "out", host_memory=4000)
    monkeypatch.undo()
    block = sum(p.nbytes for p in given["base"].encoder.layers[0].parameters())
    return held[0].ledger.peak, spools[0].host.peak, block


def test_memory_grows_with_the_block_and_not_with_the_model_or_the_number_of_experts(
    tmp_path, monkeypatch
):
    parameters, activations, block = counted(tmp_path, monkeypatch, blocks=4, experts=2)
    assert (
        parameters <= 4 * block
    )  # the student's, the teacher's, the one read ahead; the base's while solving
    assert activations <= 4000
    for blocks, experts in ((8, 2), (4, 4)):
        assert counted(tmp_path, monkeypatch, blocks, experts) == (parameters, activations, block)
