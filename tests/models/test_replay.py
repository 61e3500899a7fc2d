"""Plans, and running blocks one by one against the model's own forward."""

import pytest
import torch
import transformers as tf
from tiny import clip

from featcal.errors import BadCapture, BadPlan
from featcal.models.blocks import IN_PLACE, check_replay, first_inputs, in_place, step
from featcal.models.families import CLIP_VISION, plan_for
from featcal.models.plan import BlockPlan, Stack, blocks_of, infer_plan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", IN_PLACE)
def test_activations_in_place_give_the_same_bits_and_keep_input_and_gradients(kind, dtype):
    block, x = torch.nn.Sequential(kind()), torch.linspace(-9, 9, 693).reshape(3, 7, 33).to(dtype)
    before, expected = x.clone(), block(x)
    with torch.no_grad(), in_place(block):
        assert torch.equal(block(x), expected) and torch.equal(x, before)
        assert block[0].forward is IN_PLACE[kind]
    with in_place(block):
        block(x.requires_grad_()).sum().backward()
    assert x.grad is not None and "forward" not in vars(block[0])


def test_a_given_plan_wins_over_the_known_one_and_that_over_the_inferred_one():
    given = BlockPlan(Stack("mine", "encoder.layers"))
    assert plan_for(clip()) is CLIP_VISION and plan_for(clip(), given) is given
    assert infer_plan(clip()).stacks[0].blocks == CLIP_VISION.stacks[0].blocks


@pytest.mark.parametrize("path", ["encoder.layer", "encoder", "encoder.layers.0"])
def test_plan_that_names_no_list_of_blocks_is_an_error_with_the_path(path):
    with pytest.raises(BadPlan, match=path):
        blocks_of(clip(), Stack("mine", path))


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
    with pytest.raises(BadPlan, match=r"differs .* by \d"):
        check_replay(Crosstalk(), BlockPlan(Stack("s", "blocks")), {"x": torch.ones(1, 2, 3)})


def test_unreached_first_block_is_an_error():
    model = Crosstalk()
    with pytest.raises(BadPlan, match="never reaches"):
        first_inputs(model, [torch.nn.Linear(3, 3)], {"x": torch.ones(1, 2, 3)})


def test_block_that_overwrites_its_own_input_is_an_error():
    class Adds(torch.nn.Module):
        def forward(self, hidden):
            hidden += 1
            return hidden

    with torch.no_grad(), pytest.raises(BadCapture, match="Adds"):
        step(Adds(), Stack("s", "blocks"), torch.zeros(1, 2, 3), ({},))
