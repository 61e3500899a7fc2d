"""Folders in, a folder out, one block in memory at a time: the numbers of whole models in memory."""

from functools import partial

import checkpoints
import families
import pytest
import tiny
import torch
import transformers
from families import FAMILIES, KINDS
from folders import loaded_bytes
from safetensors.torch import load_file
from tiny import PAPER, clip, experiment, same_bits
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from featcal import calibrate
from featcal.calibration.scratch import Spool
from featcal.models.load import load_as_calibrated, save_model


def written(given, root, save=save_model):
    """The same experiment with every model as a folder."""
    folders = {"merged": root / "merged", "base": root / "base"}
    experts = {task: root / f"expert-{task}" for task in given["experts"]}
    for name, folder in (folders | experts).items():
        save(given["experts"].get(name, given.get(name)), folder)
    return given | folders | {"experts": experts}


def of_pictures(given):
    """Of whole CLIPs only pictures: the vision tower is what is calibrated of a folder."""
    for batches in given["batches"].values():
        batches[:] = [{"pixel_values": batch["pixel_values"]} for batch in batches]
    towers = {name: given[name].vision_model for name in ("merged", "base")}
    experts = {task: expert.vision_model for task, expert in given["experts"].items()}
    return given | towers | {"experts": experts}


@pytest.mark.parametrize("family", KINDS)
def test_folders_with_features_on_disk_give_the_bits_of_models_in_memory(family, tmp_path):
    given = families.experiment(FAMILIES[family], torch.float32)
    given = of_pictures(given) if family == "clip" else given
    in_memory = calibrate(**given, settings=PAPER)
    folders = written(given, tmp_path, lambda m, f: m.save_pretrained(f))
    on_disk = calibrate(**folders, settings=PAPER, out=tmp_path / "out", host_memory=0)
    assert on_disk.blocks == in_memory.blocks and not list(tmp_path.glob(".*"))
    assert same_bits(type(given["merged"]).from_pretrained(tmp_path / "out"), in_memory.model)
    assert same_bits(load_as_calibrated(tmp_path / "out"), in_memory.model)


def with_published_names(model, folder):
    """As the hub's towers of CLIP have them."""
    checkpoints.renamed(save_model(model, folder), "vision_model.{}".format)


@pytest.mark.parametrize(
    "save", [lambda m, f: m.save_pretrained(f, max_shard_size=20_000), with_published_names]
)
def test_forms_of_folders_give_the_bits_of_modules_alone_or_mixed_with_them(save, tmp_path):
    given = tiny.experiment(torch.float32)
    whole = calibrate(**given, settings=PAPER).model
    folders = written(given, tmp_path, save)
    assert bool([*tmp_path.glob("merged/*.index.json")]) != (save is with_published_names)
    calibrate(**folders, settings=PAPER, out=tmp_path / "out")
    assert same_bits(load_as_calibrated(tmp_path / "out"), whole)
    names = load_file(tmp_path / "out" / "model.safetensors")
    assert {n.startswith("vision_model.") for n in names} == {save is with_published_names}
    experts = given["experts"] | {"dtd": folders["experts"]["dtd"]}
    mixed = given | {"base": folders["base"], "experts": experts}
    assert same_bits(calibrate(**mixed, settings=PAPER).model, whole)


def test_text_tower_of_a_whole_clip_is_copied(tmp_path):
    given = families.experiment(FAMILIES["clip"], torch.float32)
    towers = of_pictures(given)
    calibrate(**written(given, tmp_path), settings=PAPER, out=tmp_path / "out")
    result = transformers.CLIPModel.from_pretrained(tmp_path / "out")
    assert same_bits(result.text_model, given["merged"].text_model)
    assert not same_bits(result.vision_model, given["merged"].vision_model)
    assert same_bits(result.vision_model, calibrate(**towers, settings=PAPER).model)


def test_half_precision_is_calibrated_in_float32_and_written_as_it_came(tmp_path):
    given = tiny.experiment(torch.float32)
    for model in (given["merged"], given["base"], *given["experts"].values()):
        model.bfloat16()
    folders = written(given, tmp_path)
    calibrate(**folders, settings=PAPER, out=tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    exact = calibrate(**folders, settings=PAPER).model  # in memory and in float32 throughout
    for name, value in exact.named_parameters():
        if name.startswith("encoder.layers.0."):  # nothing was rounded before the first block
            assert torch.equal(stored[name], value.bfloat16())


def counted(tmp_path, monkeypatch, blocks, experts):
    """Most bytes of parameters, and of activations, in memory while a folder is calibrated."""
    tasks, kept, keep = tuple(f"task{i}" for i in range(experts)), [], Spool.keep
    given = tiny.experiment(torch.float32, tasks, 10, build=partial(clip, num_hidden_layers=blocks))
    root = tmp_path / f"{blocks}-{experts}"

    def noted(spool, tensor):
        handle = keep(spool, tensor)
        kept.append(spool.kept["host"])
        return handle

    folders = written(given, root)
    with monkeypatch.context() as patch, loaded_bytes() as loaded:
        patch.setattr(Spool, "keep", noted)
        calibrate(**folders, settings=PAPER, out=root / "out", host_memory=4000)
    block = sum(p.nbytes for p in given["base"].encoder.layers[0].parameters())
    return loaded.peak, max(kept), block


def test_memory_grows_with_the_block_not_with_blocks_or_experts(tmp_path, monkeypatch):
    parameters, activations, block = counted(tmp_path, monkeypatch, blocks=4, experts=2)
    # the student's, the teacher's, the one read ahead; the base's while solving
    assert parameters <= 4 * block and activations <= 4000
    for blocks, experts in ((8, 2), (4, 4)):
        assert counted(tmp_path, monkeypatch, blocks, experts) == (parameters, activations, block)


WIDTH = 96
SITES = [(WIDTH, n * WIDTH) for n in (1, 2, 1, 3)] + [(3 * WIDTH, WIDTH)]  # (d, o), last block
MOMENTS = sum(d * d + (d * o if o < d / 2 else d * d) for d, o in SITES)
SYSTEMS = sum(d * d + d * o for d, o in SITES)
LARGEST = max(d * o for d, o in SITES)  # a weight


class Float64Peak(TorchDispatchMode):
    """Most float64 numbers alive at once among those made inside the `with`."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float64:
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes() // 8
        self.alive = {key: one for key, one in self.alive.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def peak(tasks):
    given = experiment(torch.float32, tasks, 30, 15, build=partial(clip, width=WIDTH))
    with Float64Peak() as counted:
        calibrate(**given, settings=PAPER)
    return counted.peak


def test_block_needs_systems_moments_of_one_task_and_a_few_weights_however_many_tasks():
    needed = peak("abc")
    assert SYSTEMS + MOMENTS <= needed <= SYSTEMS + MOMENTS + 2 * LARGEST + 100 * WIDTH
    assert peak("ab") == needed == peak("abcde")
