"""Streamed models give the bits of whole ones, and unload everything they load."""

import pytest
import torch
from families import FAMILIES, KINDS
from folders import batch_for, folder_of, nothing_left, numbers, outputs, present, same, whole
from tiny import make

from featcal.models.blocks import check_replay, first_inputs
from featcal.models.families import plan_for
from featcal.models.plan import blocks_of
from featcal.models.save import save_model
from featcal.models.streamed import StreamedModel

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
        assert streamed.stored_dtype(name) == streamed.stored(name).dtype == torch.bfloat16


def test_other_lists_of_modules_are_loaded_like_blocks(tmp_path):
    folder = folder_of(tmp_path / "m", "t5")
    streamed, blind = StreamedModel(folder, ["encoder.block"]), StreamedModel(folder)
    for each in (streamed, blind):
        with each.running() as module:
            outputs(module, batch_for("t5"))
            assert not any(".block." in name for name in present(each))
    assert streamed.ledger.peak == blind.ledger.peak
