"""Plans and the capture of tensors; what cannot be trusted is refused with one clear error."""

from contextlib import nullcontext

import pytest
import tiny
import torch
import transformers as tf
from families import FAMILIES, GROUPED, experiment, text
from tiny import PAPER, TEXT, clip, make, same_bits, shifted
from torch import nn
from torch.ao.quantization import quantize_dynamic

from featcal import BlockPlan, Stack, calibrate, merge
from featcal.errors import BadCapture, BadFile, BadPlan, BadSetting
from featcal.models import blocks as run
from featcal.models.modules import is_linear
from featcal.models.plan import KNOWN, blocks_of, infer_plan, plan_for, t5


def test_a_given_plan_wins_over_the_known_one_and_that_over_the_inferred_one():
    given = BlockPlan(Stack("mine", "encoder.layers"))
    assert plan_for(clip()) is KNOWN["CLIPVisionModel"] and plan_for(clip(), given) is given
    assert infer_plan(clip()).stacks[0].blocks == KNOWN["CLIPVisionModel"].stacks[0].blocks
    of_its_name = type("CLIPVisionModel", (tf.CLIPVisionModel,), {})
    assert plan_for(of_its_name(clip().config)) is KNOWN["CLIPVisionModel"]
    of_another_package = type("ViTModel", (Toy,), {})(lambda: nn.Linear(8, 8))
    assert plan_for(of_another_package) == BlockPlan(Stack("blocks", "blocks"))


def test_models_and_paths_without_one_list_of_blocks_are_refused():
    for model, said in ((FAMILIES["t5"].build(), "block"), (nn.Linear(2, 2), "Lin")):
        with pytest.raises(BadPlan, match=said):
            infer_plan(model)
    for path in ("encoder.layer", "encoder", "encoder.layers.0"):
        with pytest.raises(BadPlan, match=path):
            blocks_of(clip(), Stack("mine", path))


@pytest.mark.parametrize(
    ("stacks", "says"),
    [
        ((), "at least one stack"),
        ((Stack("a", "x", feeds="h"),), "the last stack, 'a', feeds 'h'"),
        ((Stack("a", "x", feeds="h"), Stack("b", "y")), "'a' feeds 'b', so both need their entry"),
        ((Stack("a", "x"), Stack("a", "y")), "two stacks of one name"),
    ],
)
def test_plan_that_contradicts_itself_is_refused(stacks, says):
    with pytest.raises(BadPlan, match=says):
        BlockPlan(*stacks)


def tied_llama():
    model = tf.LlamaModel(tf.LlamaConfig(**GROUPED))
    model.layers[1].mlp = model.layers[0].mlp
    return model


class Block(nn.Module):
    """One linear, changed and used as each test wants."""

    def __init__(self, use, change=id):
        super().__init__()
        self.fc, self.use = nn.Linear(8, 8), use
        change(self.fc)

    def forward(self, x):
        return self.use(self.fc, x)


class Toy(nn.Module):
    """Two blocks; `between` is done with what one hands to the other."""

    def __init__(self, block, between=lambda x: x):
        super().__init__()
        self.blocks, self.between = nn.ModuleList([block() for _ in range(2)]), between

    def forward(self, x):
        return self.blocks[1](self.between(self.blocks[0](x)))


def toy(use, change=id, **more):
    return lambda: Toy(lambda: Block(use, change), **more)


SQUEEZE = tf.SqueezeBertConfig(**TEXT, embedding_size=32)
ALBERT = tf.AlbertConfig(**TEXT, embedding_size=16)
XMOD = tf.XmodConfig(**TEXT, languages=["en_XX"], default_language="en_XX")
# keeps gate and up of its experts interleaved, transposed and with biases
GPT_OSS = tf.GptOssConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2)
FOLDED = toy(lambda fc, x: fc(x.transpose(0, 1)).transpose(0, 1))
THREE = {"between": lambda x: x[:, [0, 0, 1]]}  # tokens, which blocks need that put out two
KEY = toy(lambda fc, x: {3: fc}[x.shape[1]](x)[:, 1:], **THREE)
ATTRIBUTE = toy(lambda fc, x: {3: fc}.get(x.shape[1]).forward(x)[:, 1:], **THREE)
CLOSURE = toy(lambda fc, x: fc(x), lambda fc: setattr(fc, "forward", lambda x: x))
COMPUTED = toy(lambda fc, x: fc(x), nn.utils.parametrizations.weight_norm)
DOUBLED = toy(lambda fc, x: fc(x), between=lambda x: 2 * x)
MOSTLY = "of the parameters of 'layers' belong to linears and norms, at least 50% must; "
MOSTLY += "the largest others: layers.0.mlp.experts.gate_up_proj [4, 32, 128]"
NUMBERS = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
REFUSED = {
    "Albert": (BadPlan, lambda: tf.AlbertModel(ALBERT), "layer_groups.0: runs twice"),
    "tied": (BadPlan, tied_llama, "layers.0.mlp.gate_proj.weight and layers.1.mlp.gate_proj"),
    "GPT-OSS": (BadPlan, lambda: tf.GptOssModel(GPT_OSS), MOSTLY),
    "DeepSeek V4": (BadPlan, toy(lambda fc, x: fc(x.reshape(2, 3, 1, 8))), "[2, 3, 1, 8], not ("),
    "another axis": (BadSetting, lambda: tf.SqueezeBertModel(SQUEEZE), "SqueezeBertLayerNorm, "),
    "folded": (BadCapture, FOLDED, "blocks.00.fc: its input has shape (3, 2, 8) instead of (2"),
    "norms run twice": (BadCapture, lambda: tf.XmodModel(XMOD), "output.LayerNorm: ran twice"),
    "missing key": (BadPlan, KEY, "cannot be run one by one (KeyError(2))"),
    "missing attribute": (BadPlan, ATTRIBUTE, "one by one ('NoneType' object has no"),
    "crosstalk": (BadPlan, DOUBLED, "differs from the model's own forward by"),
    "closure": (BadFile, CLOSURE, "blocks.0.fc has a forward of its own"),
    "computed": (BadFile, COMPUTED, "blocks.0.fc computes its weight, as after pruning"),
    "quantised": (BadFile, lambda: quantize_dynamic(toy(None)()), "is no tensor, as in quantised"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_no_plan_expresses_are_refused_with_the_reason(name):
    error, build, said = REFUSED[name]
    base = make(build)
    given = {"a": [{"x": NUMBERS}] if isinstance(base, Toy) else text(1)}
    with pytest.raises(error) as caught:
        calibrate(base, base=base, experts={"a": shifted(base, 1)}, batches=given, settings=PAPER)
    assert said in str(caught.value)
    if name in ("Albert", "folded", "crosstalk", "norms run twice") or error is BadFile:
        with pytest.raises(BadFile if error is BadFile else BadPlan):
            merge("lot", base, {"a": base}, batches=given)
    if name == "norms run twice":  # this method solves linears only
        assert same_bits(merge("regmean", base, {"a": base}, batches=given), base)


def test_a_linear_that_takes_other_rows_is_none_that_is_solved():
    """DeepSeek V4's has a weight of its own for each group of features."""
    grouped = type("Grouped", (nn.Linear,), {"forward": lambda _, x: x.reshape(2, -1, 8)})
    assert is_linear(nn.Linear(8, 16)) and not is_linear(grouped(8, 16))


def test_unreached_first_block_is_an_error():
    model = Toy(lambda: nn.Linear(8, 8))
    model.more = nn.ModuleList([nn.Linear(8, 8)])
    with pytest.raises(BadPlan, match="never reaches"):
        run.first_inputs(model, Stack("more", "more"), {"x": NUMBERS.float()})


ENCODER, DECODER = t5().stacks
WRONG = Stack("encoder", "encoder.block", "encoder", "", ENCODER.carry, feeds="states")


@pytest.mark.parametrize(
    ("family", "plan", "said"),
    [
        ("gemma3", BlockPlan(Stack("s", "model.layers", mixed=True)), None),
        ("gemma3", BlockPlan(Stack("s", "model.layers")), "model.layers"),
        ("t5_encoder", BlockPlan(Stack("encoder", "encoder.block")), "encoder.block"),
        ("t5", BlockPlan(WRONG, DECODER), "'decoder' does not receive what 'encoder' puts out as"),
    ],
    ids=["kinds of layers", "one kind of layers", "no position bias", "wrong keyword"],
)
def test_a_plan_that_leaves_something_out_is_refused(family, plan, said):
    given = experiment(FAMILIES[family], torch.float32)
    model, batch = given["base"], given["batches"]["a"][0]
    with pytest.raises(BadPlan, match=said) if said else nullcontext():
        run.check_replay(model, plan, batch)


def hooks(model):
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def overwritten(fc, x):
    x = x.clone()
    y = fc(x)
    x += 1
    return y


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda fc, x: fc(fc(x)), "twice"),
        (lambda fc, x: fc(input=x), "no positional"),
        (lambda fc, x: nn.functional.linear(x, fc.weight, fc.bias), "no positional"),
        (overwritten, "overwritten"),
    ],
)
def test_an_input_that_cannot_be_trusted_is_an_error_naming_the_module(use, message):
    block = Block(use)
    error = pytest.raises(BadCapture, match=f"fc: .*{message}")
    with torch.no_grad(), error, run.module_inputs(block, ["fc"]):
        block(torch.ones(1, 2, 8))


def test_no_hook_survives_an_exception_inside_a_calibration(monkeypatch):
    given = tiny.experiment()
    teacher = given["experts"]["mnist"]

    def fails(*_):
        assert hooks(teacher.encoder.layers[1]) > 0
        raise RuntimeError("in the last block")

    monkeypatch.setattr(teacher.encoder.layers[1].mlp, "forward", fails)
    with pytest.raises(RuntimeError, match="in the last block"):
        calibrate(**given, settings=PAPER)
    assert not any(map(hooks, [given["merged"], given["base"], *given["experts"].values()]))


@pytest.mark.parametrize("changed", [False, True])
def test_an_output_overwritten_in_place_is_left_out(changed):
    block = Block(lambda fc, x: fc(x).add_(1) if changed else fc(x) + 1)
    with torch.no_grad(), run.module_outputs(block, ["fc"]) as seen:
        block(torch.ones(1, 2, 8))
    assert list(seen) == ([] if changed else ["fc"]) and hooks(block) == 0


def test_block_that_overwrites_its_own_input_is_an_error():
    block = Block(lambda fc, x: x.add_(1))
    with torch.no_grad(), pytest.raises(BadCapture, match="Block"):
        run.step(block, Stack("s", "blocks"), torch.zeros(1, 2, 8), ({},))


@torch.no_grad()
def test_the_stream_of_a_scaled_output_completes_it_to_the_blocks_output():
    """DINOv2 adds γ y: with the student's γ, its stream and the teacher's y make the teacher's sum."""
    models = [make(FAMILIES["dinov2"].build, seed) for seed in (0, 1)]
    student, teacher = (model.encoder.layer[0] for model in models)
    x, scale = torch.randn(2, 5, 32, dtype=torch.float64), student.layer_scale2.lambda1
    with run.residual_streams(student, ["mlp.fc2"], x) as streams:
        student(x)
    assert torch.equal(streams.scales["mlp.fc2"], scale)
    own = teacher, ["mlp.fc2"]
    with (
        run.residual_streams(*own, x, None, streams.scales) as theirs,
        run.module_outputs(*own) as y,
    ):
        whole = teacher(x)
    assert torch.allclose(theirs["mlp.fc2"] + scale * y["mlp.fc2"], whole)
