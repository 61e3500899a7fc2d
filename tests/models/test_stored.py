"""Names under which checkpoints hold a model's tensors, as transformers accepts them, and refusal
of whatever does not fit.
"""

import checkpoints
import pytest
import torch
import transformers as tf
from families import text
from folders import batch_for, folder_of, outputs, same, whole
from safetensors.torch import load_file, save_file
from tiny import TEXT, VISION, images, make

from featcal.errors import FeatCalError, MissingTensor, WrongKeys
from featcal.models.checkpoint import LazyCheckpoint, all_finite
from featcal.models.save import save_model
from featcal.models.streamed import StreamedModel


def renamed(folder, name):
    """Gives every tensor of a folder's file the name that `name` makes of its own; None removes
    it.
    """
    file = folder / "model.safetensors"
    state = {name(old): tensor.clone() for old, tensor in load_file(file).items()}
    save_file(
        {new: tensor for new, tensor in state.items() if new}, file, metadata={"format": "pt"}
    )
    return folder


def computes_the_same(folder, family):
    """Whether the streamed folder computes what from_pretrained makes of it."""
    held, batch = StreamedModel(folder), batch_for(family)
    with held.running() as module:
        return same(outputs(module, batch), outputs(whole(folder, family), batch))


def test_vision_towers_of_all_published_layouts_are_read(tmp_path):
    folders = [
        checkpoints.clip_folder(tmp_path / "whole"),
        checkpoints.legacy_folder(tmp_path / "legacy"),
    ]
    folders += [checkpoints.vision_folder(tmp_path / "present")]
    pixels = {"pixel_values": images(3, size=32, dtype=torch.float32)[0]["pixel_values"]}
    for folder in folders:
        held = StreamedModel(folder)
        with held.running() as module:
            assert same(outputs(module, pixels), outputs(checkpoints.vision(), pixels))


@pytest.mark.parametrize(
    ("family", "old"),
    [
        ("clip_text", lambda name: f"text_model.{name}"),
        ("bert", lambda name: f"bert.{name}"),
        (
            "bert",
            lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ),
        ),
        ("gpt2", lambda name: name.removeprefix("transformer.")),
        ("mistral", lambda name: f"model.{name}"),
    ],
    ids=["text tower", "base prefix", "gamma and beta", "no base prefix", "of a causal model"],
)
def test_names_of_older_and_related_files_are_understood(family, old, tmp_path):
    assert computes_the_same(renamed(folder_of(tmp_path / "m", family), old), family)


def test_a_matrix_stored_whole_is_cut_as_transformers_cuts_it(tmp_path):
    make(
        lambda: tf.Dinov2Model(tf.Dinov2Config(**VISION, use_swiglu_ffn=True)), dtype=torch.float32
    ).save_pretrained(tmp_path)
    assert any("weights_in" in name for name in load_file(tmp_path / "model.safetensors"))
    held, batch = StreamedModel(tmp_path), images(3, dtype=torch.float32)[0]
    with held.running() as module:
        assert same(outputs(module, batch), outputs(whole(tmp_path, "dinov2"), batch))


def test_the_links_of_a_hub_cache_are_followed(tmp_path):
    folder, blobs = folder_of(tmp_path / "snapshots" / "m", "clip"), tmp_path / "blobs"
    blobs.mkdir()
    for file in list(folder.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(f"../../blobs/{file.name}")
    assert computes_the_same(folder, "clip")


@pytest.mark.parametrize("kept", ["shared", "lm_head", "encoder.embed_tokens"])
def test_a_tied_embedding_is_found_under_any_of_its_names(kept, tmp_path):
    folder = folder_of(tmp_path / "m", "t5")
    assert computes_the_same(
        renamed(folder, lambda name: f"{kept}.weight" if name == "shared.weight" else name), "t5"
    )


def test_tied_names_that_hold_different_numbers_are_parted_as_from_pretrained_parts_them(tmp_path):
    folder = folder_of(tmp_path / "m", "t5")
    other = torch.randn(97, 32, generator=torch.Generator().manual_seed(5))
    checkpoints.with_tensors(folder, {"lm_head.weight": other})
    assert computes_the_same(folder, "t5")
    with StreamedModel(folder).block("lm_head") as head:
        assert torch.equal(head.weight, other)


def test_buffers_that_a_file_holds_are_read_from_it(tmp_path):
    model = make(lambda: tf.BartForConditionalGeneration(bart()), dtype=torch.float32)
    model.final_logits_bias += torch.arange(97)
    save_model(model, tmp_path / "m")
    assert torch.equal(
        StreamedModel(tmp_path / "m").module.final_logits_bias, model.final_logits_bias
    )


def bart():
    sizes = {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    }
    return tf.BartConfig(
        vocab_size=97, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=16, **sizes
    )


def test_a_lacking_tensor_is_named_with_the_three_nearest(tmp_path):
    folder = checkpoints.with_tensors(
        checkpoints.vision_folder(tmp_path / "m"), {"encoder.layers.1.mlp.fc2.weight": None}
    )
    with pytest.raises(
        MissingTensor,
        match=r"m: no tensor named 'encoder\.layers\.1\.mlp\.fc2\.weight'; nearest names: (\S+, ){2}\S+",
    ):
        StreamedModel(folder)


def test_a_tied_tensor_under_none_of_its_names_is_lacking(tmp_path):
    folder = renamed(
        folder_of(tmp_path / "m", "t5"), lambda name: None if name == "shared.weight" else name
    )
    with pytest.raises(MissingTensor, match=r"no tensor named 'shared\.weight'"):
        StreamedModel(folder)


def test_one_tensor_under_two_names_is_surplus(tmp_path):
    folder = folder_of(tmp_path / "m", "bert")
    checkpoints.with_tensors(folder, {"bert.pooler.dense.bias": torch.ones(32)})
    with pytest.raises(WrongKeys, match=r"1 not part of it: \S*pooler\.dense\.bias"):
        StreamedModel(folder)


def test_parts_that_make_no_whole_are_named(tmp_path):
    make(
        lambda: tf.Dinov2Model(tf.Dinov2Config(**VISION, use_swiglu_ffn=True)), dtype=torch.float32
    ).save_pretrained(tmp_path)
    checkpoints.with_tensors(tmp_path, {"encoder.layer.0.mlp.weights_in.bias": torch.tensor(1.0)})
    with pytest.raises(FeatCalError, match=r"weights_in\.bias|gate_proj\.bias"):
        StreamedModel(tmp_path)


def test_reading_a_file_maps_none_of_it_into_memory(tmp_path):
    checkpoint = LazyCheckpoint(folder_of(tmp_path / "m", "clip"))
    held = [checkpoint.tensor(name) for name in checkpoint.names]
    with open("/proc/self/maps") as maps:
        assert (
            str(tmp_path) not in maps.read()
        )  # mergekit maps the files of its own tests, in the same process
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in held)


def test_numbers_too_large_to_add_are_still_numbers():
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        largest = torch.full((8,), torch.finfo(dtype).max, dtype=dtype)
        assert all_finite(largest) and all_finite(-largest)
        for wrong in (float("nan"), float("inf"), float("-inf")):
            assert not all_finite(torch.cat([largest, torch.tensor([wrong, -wrong], dtype=dtype)]))


def test_a_table_that_a_model_reads_without_running_it_is_there_when_a_folder_is_streamed(tmp_path):
    """DeBERTa's encoder takes the weight of its relative positions."""
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}
    model = make(
        lambda: tf.DebertaV2Model(tf.DebertaV2Config(**TEXT | relative)), dtype=torch.float32
    )
    save_model(model, tmp_path)
    (batch, _) = text(1)
    with StreamedModel(tmp_path, ["encoder.layer"]).running() as streamed, torch.no_grad():
        found = streamed(**batch).last_hidden_state
        assert torch.allclose(found, model(**batch).last_hidden_state, atol=1e-6)
