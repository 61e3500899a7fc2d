"""Streamed models give the bits of whole ones, and unload everything they load."""

import threading

import checkpoints
import pytest
import torch
import transformers as tf
from families import FAMILIES, KINDS
from folders import batch_for, folder_of, nothing_left, numbers, outputs, present, same, whole
from tiny import TEXT, clip, make, shifted

import featcal
from featcal.errors import MissingTensor, NotFinite, TensorsDiffer, TruncatedFile
from featcal.files import Ledger
from featcal.models.blocks import check_replay, first_inputs
from featcal.models.families import plan_for
from featcal.models.plan import blocks_of
from featcal.models.save import save_model
from featcal.models.streamed import InMemoryModel, StreamedModel, in_turn, require_same_tensors

ENTRIES = {  # what leads to the first block
    "t5": {"shared.weight"},
    "llama": {"model.embed_tokens.weight"},
    "gpt2": {"transformer.wte.weight", "transformer.wpe.weight"},
    "opt": {"model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight"},
    "clip": {
        *(f"embeddings.{name}" for name in ("class_embedding", "patch_embedding.weight")),
        *("embeddings.position_embedding.weight", "pre_layrnorm.weight", "pre_layrnorm.bias"),
    },
}
LAYERS = "encoder.layers"


@pytest.mark.parametrize(
    ("family", "way", "dtype"),
    [(family, "transformers", torch.float32) for family in KINDS]
    + [(family, "featcal", torch.float64) for family in ENTRIES],
)
def test_a_streamed_forward_gives_the_bits_of_the_whole_model_and_leaves_nothing(
    family, way, dtype, tmp_path
):
    folder, batch = folder_of(tmp_path / "m", family, dtype, way), batch_for(family, dtype)
    model, streamed = whole(folder, family, dtype), StreamedModel(folder, dtype=dtype)
    with streamed.running() as module:
        result = outputs(module, batch)
    assert same(result, outputs(model, batch)) and nothing_left(streamed)
    assert same(dict(streamed.module.named_buffers()), dict(model.named_buffers()))
    assert streamed.ledger.peak < sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("family", ENTRIES)
def test_first_inputs_are_those_of_the_whole_model_and_load_no_block(family, tmp_path):
    folder, batch = folder_of(tmp_path / "m", family), batch_for(family)
    model, streamed = whole(folder, family), StreamedModel(folder)
    stack = plan_for(streamed.module).stacks[0]
    with torch.no_grad(), streamed.running() as module:
        hidden, _ = first_inputs(module, blocks_of(module, stack), batch, stack.mixed)
        loaded = present(streamed)
    with torch.no_grad():
        expected, _ = first_inputs(model, blocks_of(model, stack), batch, stack.mixed)
    assert torch.equal(hidden, expected) and nothing_left(streamed)
    assert not any(name.startswith(stack.blocks) for name in loaded) and loaded == ENTRIES[family]


@pytest.mark.parametrize("family", ["t5", "clip", "gemma3"])
def test_blocks_of_a_streamed_model_replay_its_own_forward(family, tmp_path):
    streamed = StreamedModel(folder_of(tmp_path / "m", family))
    plan = plan_for(streamed.module)
    with streamed.running() as module:
        check_replay(module, plan, batch_for(family))
    assert nothing_left(streamed)


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


def test_a_part_of_a_block_runs_by_itself(tmp_path):
    folder = folder_of(tmp_path / "m", "llama")
    streamed, model, x = StreamedModel(folder), whole(folder, "llama"), torch.ones(1, 32)
    with streamed.running() as module:
        out = module.get_submodule("model.layers.0.mlp")(x)
        assert not any("layers" in name for name in present(streamed))
    assert torch.equal(out, model.get_submodule("model.layers.0.mlp")(x)) and nothing_left(streamed)


def test_changes_to_a_block_are_lost_when_it_is_read_again(tmp_path):
    streamed = StreamedModel(folder_of(tmp_path / "m", "clip"))
    with torch.no_grad(), streamed.block(f"{LAYERS}.0") as block:
        before = numbers(block)
        for parameter in block.parameters():
            parameter.copy_(torch.zeros_like(parameter))
    with streamed.block(f"{LAYERS}.0") as block:
        assert same(numbers(block), before)
        assert present(streamed) == {f"{LAYERS}.0.{name}" for name in before}
    assert nothing_left(streamed)


def test_a_tied_embedding_is_loaded_once(tmp_path):
    streamed = StreamedModel(folder_of(tmp_path / "m", "t5"))
    with streamed.running() as module:
        outputs(module, batch_for("t5"))
        assert module.shared.weight is module.lm_head.weight is module.encoder.embed_tokens.weight
        outside = [p for name, p in module.named_parameters() if not p.is_meta]
        assert streamed.ledger.now == sum(p.nbytes for p in outside)


def test_half_precision_files_compute_in_float32(tmp_path):
    save_model(make(FAMILIES["llama"].build, dtype=torch.bfloat16), tmp_path / "m")
    streamed, batch = StreamedModel(tmp_path / "m"), batch_for("llama")
    with streamed.running() as module:
        assert same(outputs(module, batch), outputs(whole(tmp_path / "m", "llama"), batch))
    for name, _ in streamed.module.named_parameters():
        assert streamed.dtype(name) == streamed.read(name).dtype == torch.bfloat16


def test_other_lists_of_modules_are_loaded_like_blocks(tmp_path):
    folder = folder_of(tmp_path / "m", "t5")
    streamed, blind = StreamedModel(folder, ["encoder.block"]), StreamedModel(folder)
    for each in (streamed, blind):
        with each.running() as module:
            outputs(module, batch_for("t5"))
            assert not any(".block." in name for name in present(each))
    assert streamed.ledger.peak == blind.ledger.peak


def towers(folder, count, **sizes):
    """Write folders of CLIP vision towers with different weights, by name."""
    return {
        str(i): save_model(shifted(clip(dtype=torch.float32, **sizes), i), folder / str(i))
        for i in range(count)
    }


def block_bytes(model):
    return sum(p.nbytes for p in model.module.get_submodule(f"{LAYERS}.0").parameters())


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
    for name, model in models.items():
        with model.block(f"{LAYERS}.1") as block:
            assert same(numbers(block), ahead[name])
    assert list(ahead) == sorted(models) and all(nothing_left(model) for model in models.values())


def test_an_error_while_reading_ahead_is_raised_where_that_block_is_taken(tmp_path):
    folders = towers(tmp_path, 3)
    models = {name: StreamedModel(folder) for name, folder in folders.items()}
    file = folders["1"] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-40_000])
    turns = in_turn(models, f"{LAYERS}.1")
    assert next(turns)[0] == "0"
    with pytest.raises(TruncatedFile, match="cut short"):
        next(turns)
    assert all(nothing_left(model) for model in models.values()) and not reading()


def test_an_iterator_closed_early_leaves_neither_threads_nor_blocks(tmp_path):
    models = {name: StreamedModel(folder) for name, folder in towers(tmp_path, 3).items()}
    turns = in_turn(models, f"{LAYERS}.0")
    next(turns)
    assert models["1"].ledger.now == block_bytes(models["1"])
    turns.close()
    assert all(nothing_left(model) for model in models.values()) and not reading()


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
    """RoBERTa and BERT differ in their class only."""
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
