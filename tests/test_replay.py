"""Running the blocks one by one against the model's own forward, to the bit."""

import pytest
import torch
import transformers as tf
from tiny import TEXT, VISION, clip, images, make, seeded

from featcal.blocks.capture import first_inputs
from featcal.blocks.plan import BlockPlan, Stack, infer_plan
from featcal.blocks.plans import CLIP_VISION, plan_for
from featcal.blocks.replay import check_replay, replay, step
from featcal.errors import BadCapture, BadPlan, ReplayDiffers


def text():
    ids = torch.randint(2, 97, (2, 7), generator=seeded(1))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def pixels():
    return images(1)[0]


GPT2 = {"vocab_size": 97, "bos_token_id": 0, "eos_token_id": 1}
FAMILIES = {
    "clip": (lambda: tf.CLIPVisionModel(tf.CLIPVisionConfig(**VISION, intermediate_size=64)), pixels),
    "clip_projected": (lambda: tf.CLIPVisionModelWithProjection(tf.CLIPVisionConfig(**VISION, intermediate_size=64)), pixels),
    "clip_text": (lambda: tf.CLIPTextModel(tf.CLIPTextConfig(**TEXT, max_position_embeddings=16, eos_token_id=1)), text),
    "vit": (lambda: tf.ViTModel(tf.ViTConfig(**VISION, intermediate_size=64)), pixels),
    "dinov2": (lambda: tf.Dinov2Model(tf.Dinov2Config(**VISION, mlp_ratio=2)), pixels),
    "siglip": (lambda: tf.SiglipVisionModel(tf.SiglipVisionConfig(**VISION, intermediate_size=64)), pixels),
    "bert": (lambda: tf.BertModel(tf.BertConfig(**TEXT)), text),
    "gpt2": (lambda: tf.GPT2Model(tf.GPT2Config(**GPT2, n_embd=32, n_layer=2, n_head=4)), text),
    "llama": (lambda: tf.LlamaModel(tf.LlamaConfig(**TEXT, num_key_value_heads=2)), text),
}
T5_ENCODER = BlockPlan(Stack("encoder", "encoder.block", carry={1: "position_bias"}))


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_blocks_equal_the_models_own_forward(family):
    build, batch = FAMILIES[family]
    model, batch = make(build, dtype=torch.float32), batch()
    batch = {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
    plan = plan_for(model)
    last = plan.blocks(model)[-1]
    own = []
    handle = last.register_forward_hook(lambda _m, _a, out: own.append(out if torch.is_tensor(out) else out[0]))
    with torch.no_grad():
        model(**batch)
        handle.remove()
        assert torch.equal(replay(model, plan, batch), own[0])
    check_replay(model, plan, batch)


def test_position_bias_that_only_the_first_block_computes_is_carried_on():
    config = tf.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4)
    model = make(lambda: tf.T5EncoderModel(config), dtype=torch.float32)
    with torch.no_grad():
        hidden = replay(model, T5_ENCODER, text())
        assert torch.equal(model.encoder.final_layer_norm(hidden), model(**text()).last_hidden_state)


def test_plan_of_clip_is_known_and_the_inferred_one_agrees():
    assert plan_for(clip()) is CLIP_VISION
    assert infer_plan(clip()).stack.blocks == CLIP_VISION.stack.blocks


def test_given_plan_wins_over_the_known_one():
    mine = BlockPlan(Stack("mine", "encoder.layers"))
    assert plan_for(clip(), mine) is mine


@pytest.mark.parametrize("path", ["encoder.layer", "encoder", "encoder.layers.0"])
def test_plan_that_names_no_list_of_blocks_is_an_error_with_the_path(path):
    with pytest.raises(BadPlan, match=path):
        BlockPlan(Stack("mine", path)).blocks(clip())


def test_two_stacks_of_like_size_must_be_chosen_by_the_user():
    config = tf.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    with pytest.raises(BadPlan, match="encoder.block"):
        infer_plan(tf.T5ForConditionalGeneration(config))


def test_model_without_blocks_is_an_error_that_names_its_class():
    with pytest.raises(BadPlan, match="Linear"):
        infer_plan(torch.nn.Linear(2, 2))


class Crosstalk(torch.nn.Module):
    """Blocks whose inputs are scaled between them, which no plan can express."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(2)])

    def forward(self, x):
        return self.blocks[1](2 * self.blocks[0](x))


def test_blocks_that_replay_cannot_express_are_an_error_with_the_difference():
    with pytest.raises(ReplayDiffers, match=r"differs .* by \d"):
        check_replay(Crosstalk(), BlockPlan(Stack("s", "blocks")), {"x": torch.ones(1, 2, 3)})


def test_unreached_first_block_is_an_error():
    model = Crosstalk()
    with pytest.raises(BadPlan, match="never reaches"):
        first_inputs(model, torch.nn.Linear(3, 3), {"x": torch.ones(1, 2, 3)})


def test_block_that_overwrites_its_own_input_is_an_error():
    class Adds(torch.nn.Module):
        def forward(self, hidden):
            hidden += 1
            return hidden

    with torch.no_grad(), pytest.raises(BadCapture, match="Adds"):
        step(Adds(), Stack("s", "blocks"), torch.zeros(1, 2, 3), {})
