"""Streamed models give the bits of whole ones, and unload everything they load."""

import threading

import pytest
import torch
import transformers as tf
from families import KINDS
from folders import (
    batch_for,
    folder_of,
    loaded_bytes,
    nothing_left,
    numbers,
    outputs,
    present,
    same,
    whole,
)
from tiny import TEXT, clip, make, shifted

import featcal
from featcal.errors import MissingTensor, TensorsDiffer, TruncatedFile
from featcal.models.load import save_model
from featcal.models.streamed import InMemoryModel, StreamedModel, in_turn, require_same_tensors

LAYERS = "encoder.layers"


@pytest.mark.parametrize(
    ("family", "way", "dtype"),
    [(family, "transformers", torch.float32) for family in KINDS]
    + [(family, "featcal", torch.float64) for family in ("t5", "gpt2", "clip")],
)
def test_a_streamed_forward_gives_the_bits_of_the_whole_model_and_leaves_nothing(
    family, way, dtype, tmp_path
):
    folder, batch = folder_of(tmp_path / "m", family, dtype, way), batch_for(family, dtype)
    model, streamed = whole(folder, family, dtype), StreamedModel(folder, dtype=dtype)
    with loaded_bytes() as loaded, streamed.running() as module:
        result = outputs(module, batch)
    assert same(result, outputs(model, batch)) and nothing_left(streamed)
    assert same(dict(streamed.module.named_buffers()), dict(model.named_buffers()))
    assert loaded.now == 0 < loaded.peak < sum(p.nbytes for p in model.parameters())


def test_nothing_stays_loaded_after_an_exception(tmp_path):
    streamed = StreamedModel(folder_of(tmp_path / "m", "llama"))
    last = streamed.module.get_submodule("model.layers.1.mlp.down_proj")
    broken = last.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), streamed.running() as module:
        outputs(module, batch_for("llama"))
    with pytest.raises(KeyError), streamed.block("model.layers.0"):
        raise KeyError
    broken.remove()
    assert nothing_left(streamed)


def test_a_part_of_a_block_runs_by_itself_and_changes_to_a_block_are_lost(tmp_path):
    folder, path = folder_of(tmp_path / "m", "llama"), "model.layers.0"
    streamed, model, x = StreamedModel(folder), whole(folder, "llama"), torch.ones(1, 32)
    with streamed.running() as module:
        out = module.get_submodule(f"{path}.mlp")(x)
        assert not any("layers" in name for name in present(streamed))
    assert torch.equal(out, model.get_submodule(f"{path}.mlp")(x)) and nothing_left(streamed)
    for _ in range(2):
        with torch.no_grad(), streamed.block(path) as block:
            assert same(numbers(block), numbers(model.get_submodule(path)))
            assert present(streamed) == {f"{path}.{name}" for name in numbers(block)}
            for parameter in block.parameters():
                parameter.zero_()
    assert nothing_left(streamed)


def towers(folder, count, **sizes):
    """Write folders of CLIP vision towers with different weights, by name."""
    return {
        str(i): save_model(shifted(clip(dtype=torch.float32, **sizes), i), folder / str(i))
        for i in range(count)
    }


@pytest.mark.parametrize("broken", [True, False])
def test_an_error_or_an_early_end_leaves_neither_threads_nor_blocks(tmp_path, broken):
    folders = towers(tmp_path, 3)
    models = {name: StreamedModel(folder) for name, folder in folders.items()}
    if broken:
        file = folders["1"] / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-40_000])
    turns = in_turn(models, f"{LAYERS}.1")
    assert next(turns)[0] == "0"
    assert reading()
    if broken:  # raised where the block is taken
        with pytest.raises(TruncatedFile, match="cut short"):
            next(turns)
    else:
        turns.close()
    assert all(nothing_left(model) for model in models.values()) and not reading()


def reading():
    return [thread for thread in threading.enumerate() if thread.name.startswith("featcal-read")]


def test_models_that_do_not_fit_each_other_are_refused_by_name(tmp_path):
    sizes = {"narrow": {}, "wide": {"width": 64}, "deep": {"num_hidden_layers": 3}}
    narrow, wide, deep = (
        StreamedModel(save_model(clip(dtype=torch.float32, **size), tmp_path / name))
        for name, size in sizes.items()
    )
    in_memory = InMemoryModel(whole(tmp_path / "narrow", "clip"))
    require_same_tensors({"merged": narrow, "expert 'a'": in_memory})
    more = r"no tensor named 'encoder\.layers\.2\."
    for merged, expert, error, said in (
        (narrow, wide, TensorsDiffer, r"embedding: \[32\] in merged, but \[64\] in expert 'b'"),
        (narrow, deep, MissingTensor, f"merged: {more}"),
        (deep, narrow, MissingTensor, f"expert 'b': {more}"),
    ):
        with pytest.raises(error, match=said):
            require_same_tensors({"merged": merged, "expert 'b'": expert})


def test_families_whose_tensors_have_the_same_names_and_shapes_are_not_mixed():
    """RoBERTa and BERT differ in their class only."""
    sizes = TEXT | {"max_position_embeddings": 16}
    bert = make(lambda: tf.BertModel(tf.BertConfig(**sizes)))
    roberta = make(lambda: tf.RobertaModel(tf.RobertaConfig(**sizes)))
    assert bert.state_dict().keys() == roberta.state_dict().keys()
    said = "BertModel in base, but RobertaModel in expert 'a'"
    with pytest.raises(TensorsDiffer, match=said):
        require_same_tensors({"base": InMemoryModel(bert), "expert 'a'": InMemoryModel(roberta)})
    with pytest.raises(TensorsDiffer, match=said):
        featcal.merge("average", bert, {"a": roberta})
