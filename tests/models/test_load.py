"""Folders of every layout to models and back, and errors that name what is wrong with one."""

import json

import checkpoints
import pytest
import torch
import transformers as tf
from folders import same
from safetensors.torch import save_file
from test_save import TENSORS, written
from tiny import TEXT
from transformers.utils import logging

from featcal.errors import BadFile, MissingPath, NotFinite, TruncatedFile, WrongKeys
from featcal.models import load
from featcal.models.checkpoint import LazyCheckpoint, all_finite
from featcal.models.sentences import Sentences
from featcal.models.streamed import StreamedModel


@pytest.mark.parametrize("layout", ["clip_folder", "vision_folder", "legacy_folder"])
def test_every_layout_of_a_clip_is_loaded_bit_for_bit_with_its_class(layout, tmp_path):
    folder, whole = getattr(checkpoints, layout)(tmp_path / "m"), layout == "clip_folder"
    loaded = load.load_model(folder)
    assert type(loaded) is (tf.CLIPModel if whole else tf.CLIPVisionModel) and not loaded.training
    assert same(loaded, checkpoints.clip() if whole else checkpoints.vision())
    assert same(load.load_vision(folder), checkpoints.vision())
    with StreamedModel(folder).block("encoder") as encoder:
        assert same(encoder, checkpoints.vision().encoder)


def test_saving_twice_gives_the_same_bytes_and_transformers_loads_them(tmp_path):
    checkpoints.clip_folder(tmp_path / "one")
    load.save_model(load.load_clip(tmp_path / "one"), tmp_path / "two", like=tmp_path / "one")
    one, two = ({f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in ("one", "two"))
    assert one == two and {"tokenizer.json", "preprocessor_config.json"} <= one.keys()
    model, info = tf.CLIPModel.from_pretrained(tmp_path / "two", output_loading_info=True)
    assert same(model, checkpoints.clip()) and not any(info.values())
    tied = tf.LlamaForCausalLM(tf.LlamaConfig(**TEXT, tie_word_embeddings=True)).eval()
    assert same(load.load_model(load.save_model(tied, tmp_path / "llama")), tied)


def test_a_sentence_encoder_is_loaded_without_the_head_that_its_config_names(tmp_path):
    encoder = tf.MPNetModel(tf.MPNetConfig(**TEXT))
    load.save_model(encoder, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["MPNetForMaskedLM"]  # as all-mpnet-base-v2's config.json has it
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WrongKeys):
        load.load_model(tmp_path)
    (tmp_path / "modules.json").write_text("[]")
    assert type(load.load_model(tmp_path)) is load.model_class(tmp_path) is tf.MPNetModel
    assert same(load.load_model(tmp_path), encoder)
    for own in ("CrossEncoder", "SparseEncoder", "SentenceTransformer"):
        record, is_encoder = json.dumps({"model_type": own}), own == "SentenceTransformer"
        (tmp_path / "config_sentence_transformers.json").write_text(record)
        modules = json.dumps([{"path": "1", "type": "SpladePooling"}] * (not is_encoder))
        (tmp_path / "modules.json").write_text(modules)
        assert (load.model_class(tmp_path) is tf.MPNetForMaskedLM) is not is_encoder
        assert Sentences.of_folder(tmp_path).given is is_encoder
    (tmp_path / "config.json").write_text('{"architectures": ["T5EncoderModel"]}')
    assert load.model_class(tmp_path) is tf.T5EncoderModel
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "none"}))
    with pytest.raises(BadFile, match="model_type"):
        load.load_model(tmp_path)


def test_a_missing_weight_is_an_error_and_never_random(tmp_path):
    folder = checkpoints.vision_folder(tmp_path / "m")
    lost = r"CLIPVisionModel \(1 missing: post_layernorm\.weight"
    for given, said in ((torch.zeros(0), "weight is empty"), (None, lost)):
        checkpoints.with_tensors(folder, {"post_layernorm.weight": given})
        with pytest.raises((BadFile, WrongKeys), match=said):
            load.load_vision(folder)


def test_an_adapter_in_the_folder_of_a_whole_model_is_refused(tmp_path):
    (checkpoints.vision_folder(tmp_path / "m") / "adapter_config.json").write_text("{}")
    with pytest.raises(BadFile, match=r"a whole model and adapter_config\.json[\s\S]*own"):
        load.load_model(tmp_path / "m")


@pytest.mark.parametrize("kind", ["CLIPVisionModel", "LlamaForCausalLM"])
def test_another_kind_of_model_is_refused_where_clip_is_needed(tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [kind]}))
    with pytest.raises(BadFile, match=f"(?s){kind}.*is needed"):
        (load.load_clip if kind == "CLIPVisionModel" else load.load_vision)(tmp_path)
    (tmp_path / "config.json").write_text('{"text_config": {"quantization_config": {"bits": 4}}}')
    with pytest.raises(BadFile, match="a quantised model"):
        load.load_model(tmp_path)


def test_loading_is_silent_and_leaves_logging_and_random_numbers_alone(tmp_path, capfd):
    def shown():
        return logging.get_verbosity(), logging.is_progress_bar_enabled()

    checkpoints.clip_folder(tmp_path / "clip")
    before, drawn = shown(), torch.get_rng_state()
    load.load_clip(tmp_path / "clip")
    load.load_vision(tmp_path / "clip")
    assert shown() == before and torch.equal(torch.get_rng_state(), drawn)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ValueError), load.quiet_transformers():
        raise ValueError
    assert shown() == before


@pytest.mark.parametrize("text", [None, "", "{}", '{"added_tokens": [], "model": {}}'])
def test_a_folder_without_a_usable_tokenizer_is_an_error(tmp_path, text):
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
        config = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
        (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(BadFile, match="no tokenizer"):
        load.load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "error", "said"),
    [
        ("model.safetensors", b"", TruncatedFile, r"model\.safetensors.*cut short"),
        ("model.safetensors.index.json", b"{", BadFile, r"index\.json"),
        ("model.safetensors", None, BadFile, r"found: nothing[\s\S]*link to blobs/0, which"),
        ("model.fp16.safetensors", b"x", BadFile, r"variant model\.fp16\.safetensors, copy it"),
        ("model.safetensors.index.fp16.json", b"x", BadFile, r"to model\.safetensors\.index\.json"),
        ("model.fp16-00001-of-00002.safetensors", b"x", BadFile, "give the folder that holds"),
        ("pytorch_model.bin", b"x", BadFile, r"pytorch_model\.bin is a pickle[\s\S]*save_pretrai"),
        ("rng_state_0.pth", b"x", BadFile, "rng_state[\\s\\S]*give the folder that holds"),
        ("model-q4.gguf", b"x", BadFile, r"model-q4\.gguf is not read: give the checkpoint"),
        (None, b"", BadFile, "found: nothing"),
    ],
)
def test_a_folder_without_readable_safetensors_is_refused(tmp_path, name, content, error, said):
    if name:
        file = tmp_path / name
        file.symlink_to("blobs/0") if content is None else file.write_bytes(content)
    with pytest.raises(error, match=said):
        LazyCheckpoint(tmp_path)
    with pytest.raises(MissingPath, match="nowhere"):
        LazyCheckpoint(tmp_path / "nowhere")


def test_a_missing_shard_and_a_wrong_index_are_errors(tmp_path):
    folder = written(tmp_path / "model", limit=70)
    file = folder / "model.safetensors.index.json"
    weight_map = json.loads(file.read_text())["weight_map"]
    shard, no_name = weight_map["count"], "no name of a file in this folder"
    for wrong, error, said in (
        ({"count": "../model.safetensors"}, BadFile, no_name),
        ({"count": "a\\b"}, BadFile, no_name),
        ({"count": 3}, BadFile, no_name),
        ({"ghost": shard}, BadFile, "lists ghost in"),
        ({"ghost": "lost.safetensors"}, MissingPath, "lost"),
    ):
        file.write_text(json.dumps({"weight_map": weight_map | wrong}))
        with pytest.raises(error, match=said):
            LazyCheckpoint(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_found_and_the_largest_values_are_not(tmp_path, dtype, wrong):
    extreme = [torch.finfo(dtype).max, torch.finfo(dtype).min, torch.finfo(dtype).tiny / 2, -0.0]
    good = torch.tensor(extreme * 25, dtype=dtype)
    largest = torch.full((8,), torch.finfo(dtype).max, dtype=dtype)  # their sum overflows
    bad = good.clone()
    bad[-1] = wrong
    state = {"good": good, "bad": bad, "none": good[:0], "large": largest, "n": torch.tensor(-1)}
    state["attention.masked_bias"] = bad.clone()  # in older GPT-NeoX files, which no model reads
    save_file(state, tmp_path / "model.safetensors")
    checkpoint = LazyCheckpoint(tmp_path)
    assert [name for name, each in checkpoint.items() if not all_finite(each.read())] == ["bad"]
    assert not all_finite(torch.cat([largest, -largest, bad[-1:], -bad[-1:]]))
    assert torch.equal(checkpoint["good"].finite(), good)
    for check in (checkpoint.check_finite, checkpoint["bad"].finite):
        with pytest.raises(NotFinite, match=r"model\.safetensors: bad"):
            check()


def test_the_files_that_transformers_reads_are_read(tmp_path):
    folder = written(tmp_path, limit=70)  # shards with their index
    new = {name: tensor + 1 for name, tensor in TENSORS.items()}
    save_file(new, folder / "model.safetensors")
    (folder / "model-00001-of-00002.safetensors").unlink(missing_ok=True)  # the index is stale
    assert torch.equal(LazyCheckpoint(folder)["a.bias"].read(), new["a.bias"])
    save_file({"other": torch.ones(1)}, folder / "own.safetensors")
    (folder / "config.json").write_text('{"transformers_weights": "own.safetensors"}')
    assert list(LazyCheckpoint(folder)) == ["other"]
    (folder / "config.json").write_text('{"transformers_weights": "../own.safetensors"}')
    with pytest.raises(BadFile, match="no name of a file in this folder"):
        LazyCheckpoint(folder)
