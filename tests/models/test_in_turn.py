"""Models by name, given or streamed: one block after another, the next one read meanwhile, and
models that do not fit.
"""

import threading

import checkpoints
import pytest
import torch
import transformers as tf
from folders import batch_for, nothing_left, numbers, outputs, same, whole
from tiny import TEXT, clip, make, shifted

import featcal
from featcal.errors import MissingTensor, NotFinite, TensorsDiffer, TruncatedFile
from featcal.files import Ledger
from featcal.models.save import save_model
from featcal.models.streamed import InMemoryModel, StreamedModel, in_turn, require_same_tensors

LAYERS = "encoder.layers"


def towers(folder, count, **sizes):
    """Folders of CLIP vision towers with numbers of their own, by name."""
    return {
        str(i): save_model(shifted(clip(dtype=torch.float32, **sizes), i), folder / str(i))
        for i in range(count)
    }


def block_bytes(held):
    return sum(p.nbytes for p in held.module.get_submodule(f"{LAYERS}.0").parameters())


def test_peak_grows_with_the_block_and_not_with_the_number_of_blocks_or_models(tmp_path):
    forward, turns = set(), set()
    for depth, count in ((4, 2), (16, 2), (4, 8)):
        folders = towers(tmp_path / f"{depth}-{count}", count, num_hidden_layers=depth)
        ledger = Ledger()
        models = {name: StreamedModel(folder, ledger=ledger) for name, folder in folders.items()}
        for index in range(depth):
            for _ in in_turn(models, f"{LAYERS}.{index}"):
                pass
        turns.add(ledger.peak)
        one = StreamedModel(folders["0"])
        with one.running() as module:
            outputs(module, batch_for("clip"))
        forward.add(one.ledger.peak)
    assert turns == {2 * block_bytes(one)} and len(forward) == 1


def test_blocks_read_ahead_are_those_read_when_needed(tmp_path):
    models = {name: StreamedModel(folder) for name, folder in towers(tmp_path, 3).items()}
    ahead = {name: numbers(block) for name, block in in_turn(models, f"{LAYERS}.1")}
    for name, held in models.items():
        with held.block(f"{LAYERS}.1") as block:
            assert same(numbers(block), ahead[name])
    assert list(ahead) == sorted(models) and all(nothing_left(held) for held in models.values())


def test_an_error_while_reading_ahead_is_raised_where_that_block_is_taken(tmp_path):
    folders = towers(tmp_path, 3)
    models = {name: StreamedModel(folder) for name, folder in folders.items()}
    file = folders["1"] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-40_000])
    turns = in_turn(models, f"{LAYERS}.1")
    assert next(turns)[0] == "0"
    with pytest.raises(TruncatedFile, match="cut short"):
        next(turns)
    assert all(nothing_left(held) for held in models.values()) and not reading()


def test_an_iterator_closed_early_leaves_neither_threads_nor_blocks(tmp_path):
    models = {name: StreamedModel(folder) for name, folder in towers(tmp_path, 3).items()}
    turns = in_turn(models, f"{LAYERS}.0")
    next(turns)
    assert models["1"].ledger.now == block_bytes(models["1"])
    turns.close()
    assert all(nothing_left(held) for held in models.values()) and not reading()


def reading():
    return [thread for thread in threading.enumerate() if thread.name.startswith("featcal-read")]


def test_models_that_do_not_fit_each_other_are_refused_by_name(tmp_path):
    narrow = save_model(clip(dtype=torch.float32), tmp_path / "narrow")
    wide = save_model(clip(dtype=torch.float32, width=64), tmp_path / "wide")
    deep = save_model(clip(dtype=torch.float32, num_hidden_layers=3), tmp_path / "deep")
    models = {"merged": StreamedModel(narrow), "expert 'a'": InMemoryModel(whole(narrow, "clip"))}
    require_same_tensors(models)
    with pytest.raises(
        TensorsDiffer,
        match=r"embeddings\.class_embedding: \[32\] in merged, but \[64\] in expert 'b'",
    ):
        require_same_tensors(models | {"expert 'b'": StreamedModel(wide)})
    with pytest.raises(MissingTensor, match=r"merged: no tensor named 'encoder\.layers\.2\."):
        require_same_tensors(models | {"expert 'b'": StreamedModel(deep)})
    with pytest.raises(MissingTensor, match=r"expert 'b': no tensor named 'encoder\.layers\.2\."):
        require_same_tensors({"merged": StreamedModel(deep), "expert 'b'": StreamedModel(narrow)})


def test_families_whose_tensors_have_the_same_names_and_shapes_are_not_mixed():
    """RoBERTa beside BERT: nothing but the class tells them apart."""
    sizes = TEXT | {"max_position_embeddings": 16}
    bert = make(lambda: tf.BertModel(tf.BertConfig(**sizes)))
    roberta = make(lambda: tf.RobertaModel(tf.RobertaConfig(**sizes)))
    named = [{name: p.shape for name, p in model.named_parameters()} for model in (bert, roberta)]
    assert named[0] == named[1]
    with pytest.raises(TensorsDiffer, match="BertModel in merged, but RobertaModel in expert 'a'"):
        require_same_tensors({"merged": InMemoryModel(bert), "expert 'a'": InMemoryModel(roberta)})
    with pytest.raises(TensorsDiffer, match="BertModel in base, but RobertaModel in expert 'a'"):
        featcal.merge("average", bert, {"a": roberta})


def test_nan_is_found_in_folders_and_in_given_modules(tmp_path):
    folder = checkpoints.vision_folder(tmp_path / "m")
    StreamedModel(folder).check_finite()
    checkpoints.with_tensors(folder, {"post_layernorm.bias": torch.full((32,), float("nan"))})
    with pytest.raises(NotFinite, match=r"m/model\.safetensors: post_layernorm\.bias"):
        StreamedModel(folder).check_finite("merged")
    model = clip()
    model.post_layernorm.bias.data[3] = float("inf")
    with pytest.raises(NotFinite, match=r"merged: post_layernorm\.bias"):
        InMemoryModel(model).check_finite("merged")
