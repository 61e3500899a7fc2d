"""Folders to modules and back: every weight accounted for, the same bytes for the same weights."""

import json
import os

import checkpoints
import pytest
import torch
from transformers import CLIPVisionModel, LlamaConfig, LlamaForCausalLM, MPNetConfig, MPNetModel
from transformers.utils import logging

from featcal.errors import BadFile, BadSetting, FeatCalError, WrongKeys
from featcal.models.load import (
    load_clip,
    load_model,
    load_tokenizer,
    load_vision,
    quiet,
    torch_device,
)
from featcal.models.save import save_model


def same(one, other):
    mine, yours = one.state_dict(), other.state_dict()
    return mine.keys() == yours.keys() and all(torch.equal(mine[n], yours[n]) for n in mine)


def test_a_saved_model_is_loaded_bit_for_bit_with_its_class(tmp_path):
    checkpoints.clip_folder(tmp_path / "clip")
    checkpoints.vision_folder(tmp_path / "vision")
    assert same(load_model(tmp_path / "clip"), checkpoints.clip())
    assert same(load_clip(tmp_path / "clip"), checkpoints.clip())
    loaded = load_model(tmp_path / "vision")
    assert (
        type(loaded) is CLIPVisionModel
        and not loaded.training
        and same(loaded, checkpoints.vision())
    )


def test_vision_towers_of_all_layouts_compute_the_same(tmp_path):
    folders = [
        checkpoints.clip_folder(tmp_path / "whole"),
        checkpoints.vision_folder(tmp_path / "present"),
        checkpoints.legacy_folder(tmp_path / "legacy"),
    ]
    assert all(same(load_vision(folder), checkpoints.vision()) for folder in folders)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        outputs = [load_vision(folder)(pixel_values=pixels).pooler_output for folder in folders]
    assert all(torch.equal(outputs[0], output) for output in outputs)


def test_half_precision_files_load_as_float32(tmp_path):
    save_model(checkpoints.clip().half(), tmp_path / "half")
    assert all(p.dtype == torch.float32 for p in load_clip(tmp_path / "half").parameters())
    assert load_vision(tmp_path / "half", dtype=torch.float16).dtype == torch.float16


def test_transformers_itself_loads_what_we_save(tmp_path):
    checkpoints.vision_folder(tmp_path / "vision")
    model, info = CLIPVisionModel.from_pretrained(tmp_path / "vision", output_loading_info=True)
    assert same(model, checkpoints.vision()) and not any(
        info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )


def test_saving_twice_gives_the_same_bytes(tmp_path):
    checkpoints.clip_folder(tmp_path / "one")
    save_model(load_clip(tmp_path / "one"), tmp_path / "two", like=tmp_path / "one")
    names = sorted(os.listdir(tmp_path / "one"))
    assert (
        names == sorted(os.listdir(tmp_path / "two"))
        and "tokenizer.json" in names
        and "preprocessor_config.json" in names
    )
    assert all(
        (tmp_path / "one" / n).read_bytes() == (tmp_path / "two" / n).read_bytes() for n in names
    )


def test_tied_embeddings_are_written_once_and_come_back(tmp_path):
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    save_model(model, tmp_path / "llama")
    assert same(load_model(tmp_path / "llama"), model)


def test_a_sentence_encoder_is_loaded_without_the_head_that_its_configuration_still_names(tmp_path):
    """As all-mpnet-base-v2 is published: a SentenceTransformer whose config.json names the class it
    was trained as.
    """
    sizes = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    encoder = MPNetModel(MPNetConfig(**sizes))
    save_model(encoder, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"architectures": ["MPNetForMaskedLM"]})
    )
    with pytest.raises(WrongKeys):
        load_model(tmp_path)
    (tmp_path / "modules.json").write_text("[]")
    assert type(load_model(tmp_path)) is MPNetModel and same(load_model(tmp_path), encoder)
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "none"}))
    with pytest.raises(BadFile, match="model_type"):
        load_model(tmp_path)


def test_a_lacking_weight_is_an_error_and_never_random(tmp_path):
    checkpoints.with_tensors(
        checkpoints.vision_folder(tmp_path / "m"), {"post_layernorm.weight": None}
    )
    with pytest.raises(WrongKeys, match=r"CLIPVisionModel \(1 missing: post_layernorm\.weight"):
        load_vision(tmp_path / "m")


@pytest.mark.parametrize(
    "config",
    ["{", "{}", '{"architectures": ["NoSuchModel"]}', '{"architectures": ["AutoModel"]}', "[]"],
)
def test_a_config_that_names_no_model_is_one_clear_error(tmp_path, config):
    (checkpoints.vision_folder(tmp_path / "m") / "config.json").write_text(config)
    with pytest.raises(FeatCalError, match=r"config\.json"):
        load_model(tmp_path / "m")


def test_another_kind_of_model_is_refused_where_clip_is_needed(tmp_path):
    checkpoints.vision_folder(tmp_path / "m")
    with pytest.raises(BadFile, match="(?s)CLIPVisionModel.*text tower"):
        load_clip(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text()) | {
        "architectures": ["LlamaForCausalLM"]
    }
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadFile, match="LlamaForCausalLM"):
        load_vision(tmp_path / "m")


def test_tokenizer_is_loaded_and_its_absence_is_an_error(tmp_path):
    checkpoints.clip_folder(tmp_path / "clip")
    assert load_tokenizer(tmp_path / "clip")("a cat")["input_ids"] == [1, 4, 8, 2]
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadFile, match="no tokenizer"):
        load_tokenizer(tmp_path / "empty")


def test_loading_is_silent_and_leaves_logging_and_random_numbers_alone(tmp_path, capfd):
    checkpoints.clip_folder(tmp_path / "clip")
    before = logging.get_verbosity(), logging.is_progress_bar_enabled(), torch.get_rng_state()
    load_clip(tmp_path / "clip")
    load_vision(tmp_path / "clip")
    after = logging.get_verbosity(), logging.is_progress_bar_enabled(), torch.get_rng_state()
    assert before[:2] == after[:2] and torch.equal(before[2], after[2])
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ValueError), quiet():
        raise ValueError
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before[:2]


def test_a_gpu_that_is_not_there_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert torch_device("auto") == torch_device("cpu") == torch.device("cpu")
    with pytest.raises(BadSetting, match="auto or cpu"):
        torch_device("cuda")
