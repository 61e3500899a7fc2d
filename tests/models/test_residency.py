"""Models of which only what computes is in memory: the same bits as whole ones, and nothing left
behind.
"""

import pytest
import torch
from families import FAMILIES, KINDS
from folders import batch_for, folder_of, nothing_left, numbers, outputs, present, same, whole
from tiny import make

from featcal.models.capture import first_inputs
from featcal.models.families import plan_for
from featcal.models.plan import blocks_of
from featcal.models.replay import check_replay
from featcal.models.save import save_model
from featcal.models.streamed import StreamedModel

ENTRIES = {  # what leads to the first block
    "t5": {"shared.weight"},
    "llama": {"model.embed_tokens.weight"},
    "gpt2": {"transformer.wte.weight", "transformer.wpe.weight"},
    "opt": {"model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight"},
    "clip": {
        "embeddings.class_embedding",
        "embeddings.patch_embedding.weight",
        "embeddings.position_embedding.weight",
        "pre_layrnorm.weight",
        "pre_layrnorm.bias",
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
    model, held = whole(folder, family, dtype), StreamedModel(folder, dtype=dtype)
    with held.running() as module:
        streamed = outputs(module, batch)
    assert same(streamed, outputs(model, batch)) and nothing_left(held)
    assert same(dict(held.module.named_buffers()), dict(model.named_buffers()))
    assert held.ledger.peak < sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("family", ENTRIES)
def test_first_inputs_are_those_of_the_whole_model_and_load_no_block(family, tmp_path):
    folder, batch = folder_of(tmp_path / "m", family), batch_for(family)
    model, held = whole(folder, family), StreamedModel(folder)
    stack = plan_for(held.module).stacks[0]
    with torch.no_grad(), held.running() as module:
        hidden, _ = first_inputs(module, blocks_of(module, stack), batch, stack.mixed)
        loaded = present(held)
    with torch.no_grad():
        expected, _ = first_inputs(model, blocks_of(model, stack), batch, stack.mixed)
    assert torch.equal(hidden, expected) and nothing_left(held)
    assert not any(name.startswith(stack.blocks) for name in loaded) and loaded == ENTRIES[family]


@pytest.mark.parametrize("family", ["t5", "clip", "gemma3"])
def test_blocks_of_a_streamed_model_replay_its_own_forward(family, tmp_path):
    held = StreamedModel(folder_of(tmp_path / "m", family))
    plan = plan_for(held.module)
    with held.running() as module:
        check_replay(module, plan, batch_for(family))
    assert nothing_left(held)


def test_whatever_is_raised_inside_nothing_is_left(tmp_path):
    held = StreamedModel(folder_of(tmp_path / "m", "llama"))
    broken = held.module.get_submodule("model.layers.1.mlp.down_proj").register_forward_pre_hook(
        lambda *_: 1 / 0
    )
    with pytest.raises(ZeroDivisionError), held.running() as module:
        outputs(module, batch_for("llama"))
    with pytest.raises(KeyError), held.block("model.layers.0"):
        raise KeyError
    broken.remove()
    assert nothing_left(held)


def test_a_part_of_a_block_runs_by_itself(tmp_path):
    folder = folder_of(tmp_path / "m", "llama")
    held, model, x = StreamedModel(folder), whole(folder, "llama"), torch.ones(1, 32)
    with held.running() as module:
        out = module.get_submodule("model.layers.0.mlp")(x)
        assert not any("layers" in name for name in present(held))
    assert torch.equal(out, model.get_submodule("model.layers.0.mlp")(x)) and nothing_left(held)


def test_a_block_may_be_written_to_and_is_read_anew_the_next_time(tmp_path):
    held = StreamedModel(folder_of(tmp_path / "m", "clip"))
    with torch.no_grad(), held.block(f"{LAYERS}.0") as block:
        before = numbers(block)
        for parameter in block.parameters():
            parameter.copy_(torch.zeros_like(parameter))
    with held.block(f"{LAYERS}.0") as block:
        assert same(numbers(block), before) and present(held) == {
            f"{LAYERS}.0.{name}" for name in before
        }
    assert nothing_left(held)


def test_a_tied_embedding_is_loaded_once(tmp_path):
    held = StreamedModel(folder_of(tmp_path / "m", "t5"))
    with held.running() as module:
        outputs(module, batch_for("t5"))
        assert module.shared.weight is module.lm_head.weight is module.encoder.embed_tokens.weight
        outside = [p for name, p in module.named_parameters() if not p.is_meta]
        assert held.ledger.now == sum(p.nbytes for p in outside)


def test_half_precision_files_compute_in_float32_and_tell_what_they_hold(tmp_path):
    save_model(make(FAMILIES["llama"].build, dtype=torch.bfloat16), tmp_path / "m")
    held, batch = StreamedModel(tmp_path / "m"), batch_for("llama")
    with held.running() as module:
        assert same(outputs(module, batch), outputs(whole(tmp_path / "m", "llama"), batch))
    kinds = {held.parameters.stored_dtype(name) for name in held.parameters.names}
    assert (
        kinds
        == {torch.bfloat16}
        == {held.parameters.stored(name).dtype for name in held.parameters.names}
    )


def test_other_lists_of_modules_come_and_go_like_blocks(tmp_path):
    folder = folder_of(tmp_path / "m", "t5")
    held, blind = StreamedModel(folder, ["encoder.block"]), StreamedModel(folder)
    for each in (held, blind):
        with each.running() as module:
            outputs(module, batch_for("t5"))
            assert not any(".block." in name for name in present(each))
    assert held.ledger.peak == blind.ledger.peak
