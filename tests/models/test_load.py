"""Folders to models and back: no weight lost, the same bytes for the same weights."""

import json

import checkpoints
import pytest
import torch
from transformers import (
    CLIPModel,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    MPNetConfig,
    MPNetModel,
)
from transformers.utils import logging

from featcal.errors import BadFile, BadSetting, WrongKeys
from featcal.models.load import (
    load_clip,
    load_model,
    load_tokenizer,
    load_vision,
    quiet_transformers,
    torch_device,
)
from featcal.models.save import save_model
from featcal.models.streamed import StreamedModel

SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32}
SIZES |= {"num_hidden_layers": 1, "num_attention_heads": 2}


def same(one, other):
    mine, yours = one.state_dict(), other.state_dict()
    return mine.keys() == yours.keys() and all(torch.equal(mine[n], yours[n]) for n in mine)


@pytest.mark.parametrize("layout", ["clip_folder", "vision_folder", "legacy_folder"])
def test_every_layout_of_a_clip_is_loaded_bit_for_bit_with_its_class(layout, tmp_path):
    folder, whole = getattr(checkpoints, layout)(tmp_path / "m"), layout == "clip_folder"
    loaded = load_model(folder)
    assert type(loaded) is (CLIPModel if whole else CLIPVisionModel) and not loaded.training
    assert same(loaded, checkpoints.clip() if whole else checkpoints.vision())
    assert same(load_vision(folder), checkpoints.vision())
    with StreamedModel(folder).block("encoder") as encoder:
        assert same(encoder, checkpoints.vision().encoder)


def test_half_precision_files_load_as_float32(tmp_path):
    save_model(checkpoints.clip().half(), tmp_path / "half")
    assert all(p.dtype == torch.float32 for p in load_clip(tmp_path / "half").parameters())
    assert load_vision(tmp_path / "half", dtype=torch.float16).dtype == torch.float16


def test_saving_twice_gives_the_same_bytes_and_transformers_loads_them(tmp_path):
    checkpoints.clip_folder(tmp_path / "one")
    save_model(load_clip(tmp_path / "one"), tmp_path / "two", like=tmp_path / "one")
    one, two = ({f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in ("one", "two"))
    assert one == two and {"tokenizer.json", "preprocessor_config.json"} <= one.keys()
    model, info = CLIPModel.from_pretrained(tmp_path / "two", output_loading_info=True)
    assert same(model, checkpoints.clip()) and not any(info.values())
    tied = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).eval()
    assert same(load_model(save_model(tied, tmp_path / "llama")), tied)


def test_a_sentence_encoder_is_loaded_without_the_head_that_its_config_names(tmp_path):
    """all-mpnet-base-v2's config.json names the class with the head it was trained with."""
    encoder = MPNetModel(MPNetConfig(**SIZES))
    save_model(encoder, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    with_head = json.dumps(config | {"architectures": ["MPNetForMaskedLM"]})
    (tmp_path / "config.json").write_text(with_head)
    with pytest.raises(WrongKeys):
        load_model(tmp_path)
    (tmp_path / "modules.json").write_text("[]")
    assert type(load_model(tmp_path)) is MPNetModel and same(load_model(tmp_path), encoder)
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "none"}))
    with pytest.raises(BadFile, match="model_type"):
        load_model(tmp_path)


def test_a_missing_weight_is_an_error_and_never_random(tmp_path):
    folder = checkpoints.vision_folder(tmp_path / "m")
    checkpoints.with_tensors(folder, {"post_layernorm.weight": None})
    with pytest.raises(WrongKeys, match=r"CLIPVisionModel \(1 missing: post_layernorm\.weight"):
        load_vision(folder)


@pytest.mark.parametrize(
    ("load", "kind", "said"),
    [
        (load_clip, "CLIPVisionModel", "(?s)CLIPVisionModel.*text tower"),
        (load_vision, "LlamaForCausalLM", "LlamaForCausalLM"),
    ],
)
def test_another_kind_of_model_is_refused_where_clip_is_needed(tmp_path, load, kind, said):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [kind]}))
    with pytest.raises(BadFile, match=said):
        load(tmp_path)


def test_tokenizer_is_loaded_and_its_absence_is_an_error(tmp_path):
    checkpoints.tokenizer().save_pretrained(tmp_path / "there")
    assert load_tokenizer(tmp_path / "there")("a cat")["input_ids"] == [1, 4, 8, 2]
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadFile, match="no tokenizer"):
        load_tokenizer(tmp_path / "empty")


def test_loading_is_silent_and_leaves_logging_and_random_numbers_alone(tmp_path, capfd):
    def shown():
        return logging.get_verbosity(), logging.is_progress_bar_enabled()

    checkpoints.clip_folder(tmp_path / "clip")
    before, drawn = shown(), torch.get_rng_state()
    load_clip(tmp_path / "clip")
    load_vision(tmp_path / "clip")
    assert shown() == before and torch.equal(torch.get_rng_state(), drawn)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ValueError), quiet_transformers():
        raise ValueError
    assert shown() == before


def test_a_missing_gpu_is_an_error_with_a_way_out(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert torch_device("auto") == torch_device("cpu") == torch.device("cpu")
    with pytest.raises(BadSetting, match="auto or cpu"):
        torch_device("cuda")
