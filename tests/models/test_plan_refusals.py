"""What a plan cannot express is refused with one clear error, each shown by a model that does
it.
"""

import pytest
import torch
import transformers as tf
from families import FAMILIES, GROUPED, experiment, text
from tiny import PAPER, TEXT, make, shifted
from torch import nn

from featcal import BlockPlan, Stack, calibrate
from featcal.errors import BadCapture, BadPlan, BadSetting
from featcal.models.blocks import check_replay
from featcal.models.families import T5 as T5_PLAN


def refused(error, build, batches, **more):
    """The message with which a model is refused."""
    base = make(build)
    with pytest.raises(error) as caught:
        calibrate(
            base,
            base=base,
            experts={"a": shifted(base, 1)},
            batches={"a": batches},
            settings=PAPER,
            **more,
        )
    return str(caught.value)


def test_one_block_that_runs_several_times_is_refused_by_name():
    message = refused(
        BadCapture, lambda: tf.AlbertModel(tf.AlbertConfig(**TEXT, embedding_size=16)), text(1)
    )
    assert "encoder.albert_layer_groups.0: this block runs twice in one forward" in message


def test_blocks_that_share_a_weight_are_refused_with_both_names():
    def build():
        model = tf.LlamaModel(tf.LlamaConfig(**GROUPED))
        model.layers[1].mlp = model.layers[0].mlp
        return model

    message = refused(BadPlan, build, text(1))
    assert (
        "layers.0.mlp.gate_proj.weight and layers.1.mlp.gate_proj.weight are one tensor" in message
    )


def test_experts_in_tensors_of_an_unknown_form_are_refused_with_the_share_that_is_left():
    """GPT-OSS keeps gate and up of its experts interleaved, transposed and with biases."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    message = refused(BadPlan, lambda: tf.GptOssModel(tf.GptOssConfig(**GROUPED, **sizes)), text(1))
    assert (
        "% of the parameters of 'layers' belong to linears and norms, at least 50% must" in message
    )
    assert "layers.0.mlp.experts.gate_up_proj [4, 32, 128]" in message


class Toy(nn.Module):
    """Two blocks; subclasses say what a block is."""

    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def toy(seed=0):
    return [
        {
            "x": torch.randn(
                2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
            )
        }
    ]


def test_linear_that_is_used_without_being_called_is_refused_by_name():
    layer = lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)  # noqa: E731
    assert "self_attn.out_proj: no positional input was seen" in refused(
        BadCapture, lambda: Toy(layer), toy()
    )


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(input=x)


class Folded(ByKeyword):
    def forward(self, x):
        return self.fc(x.transpose(0, 1)).transpose(0, 1)


def test_rows_that_are_not_the_tokens_of_the_batch_are_refused_with_their_shape():
    assert (
        "blocks.00.fc: its input has shape (3, 2, 8) instead of (2 sequences, 3 tokens"
        in refused(BadCapture, lambda: Toy(Folded), toy())
    )


class OddRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x):
        return self.weight**2 * x


class Odd(ByKeyword):
    def __init__(self):
        super().__init__()
        self.norm = OddRMSNorm()

    def forward(self, x):
        return self.fc(self.norm(x))


def test_norm_of_an_unknown_kind_is_refused_by_class():
    assert "OddRMSNorm, which is neither LayerNorm nor RMSNorm" in refused(
        BadSetting, lambda: Toy(Odd), toy()
    )


def test_layers_of_several_kinds_need_their_own_arguments():
    given = experiment(FAMILIES["gemma3"], torch.float32)
    with pytest.raises(BadPlan, match="model.layers"):
        check_replay(given["base"], BlockPlan(Stack("s", "model.layers")), given["batches"]["a"][0])
    check_replay(
        given["base"], BlockPlan(Stack("s", "model.layers", mixed=True)), given["batches"]["a"][0]
    )


def test_position_bias_that_is_not_carried_on_is_refused():
    given = experiment(FAMILIES["t5_encoder"], torch.float32)
    with pytest.raises(BadPlan, match="encoder.block"):
        check_replay(
            given["base"], BlockPlan(Stack("encoder", "encoder.block")), given["batches"]["a"][0]
        )


def test_result_that_does_not_arrive_under_the_plans_keyword_is_refused():
    encoder, decoder = T5_PLAN.stacks
    wrong = BlockPlan(
        Stack("encoder", "encoder.block", "encoder", "", encoder.carry, feeds="states"), decoder
    )
    given = experiment(FAMILIES["t5"], torch.float32)
    with pytest.raises(
        BadPlan, match="'decoder' does not receive what 'encoder' puts out as 'states'"
    ):
        check_replay(given["base"], wrong, given["batches"]["a"][0])


def test_stack_that_is_fed_does_not_take_the_padding_of_what_feeds_it():
    alone = BlockPlan(Stack("a", "x", entry="a"), Stack("b", "y", entry="b"))
    fed = BlockPlan(Stack("a", "x", entry="a", feeds="h"), Stack("b", "y", entry="b"))
    assert [stack.mask for stack in alone.stacks] == ["attention_mask", "attention_mask"]
    assert [stack.mask for stack in fed.stacks] == ["attention_mask", "decoder_attention_mask"]


@pytest.mark.parametrize(
    ("stacks", "says"),
    [
        ((), "at least one stack"),
        ((Stack("a", "x", feeds="h"),), "the last stack, 'a', feeds 'h'"),
        ((Stack("a", "x", feeds="h"), Stack("b", "y")), "'a' feeds 'b', so both need their entry"),
    ],
)
def test_plan_that_contradicts_itself_is_refused(stacks, says):
    with pytest.raises(BadPlan, match=says):
        BlockPlan(*stacks)
