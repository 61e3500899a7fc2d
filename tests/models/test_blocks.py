"""Hooks are always removed; captured tensors that cannot be trusted are errors."""

import pytest
import torch
from families import FAMILIES
from tiny import PAPER, clip, experiment, images, make
from torch import nn

from featcal import calibrate
from featcal.errors import BadCapture
from featcal.models.blocks import (
    IN_PLACE,
    first_inputs,
    in_place,
    module_inputs,
    module_outputs,
    residual_streams,
    step,
)
from featcal.models.plan import Stack


def hooks(model):
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


class Block(nn.Module):
    """A block of one linear, used as each test wants."""

    def __init__(self, use):
        super().__init__()
        self.fc, self.use = nn.Linear(3, 3), use

    def forward(self, x):
        return self.use(self.fc, x)


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
    with torch.no_grad(), error, module_inputs(block, ["fc"]):
        block(torch.ones(1, 2, 3))


def test_no_hook_survives_an_exception_inside_a_calibration(monkeypatch):
    given = experiment()
    teacher = given["experts"]["mnist"]

    def fails(*_):
        assert hooks(teacher.encoder.layers[1]) > 0
        raise RuntimeError("in the last block")

    monkeypatch.setattr(teacher.encoder.layers[1].mlp, "forward", fails)
    with pytest.raises(RuntimeError, match="in the last block"):
        calibrate(**given, settings=PAPER)
    assert not any(map(hooks, [given["merged"], given["base"], *given["experts"].values()]))


def test_first_inputs_are_what_the_embeddings_hand_to_the_first_block():
    model, batch = clip(), images(1)[0]
    with torch.no_grad():
        hidden, arguments = first_inputs(model, Stack("s", "encoder.layers"), batch)
        assert torch.equal(hidden, model.pre_layrnorm(model.embeddings(batch["pixel_values"])))
    assert len(arguments) == 1 and "hidden_states" not in arguments[0]


def test_a_forward_stopped_at_the_last_input_captures_the_same_and_runs_no_further():
    block, x = clip().encoder.layers[0], torch.randn(2, 5, 32, dtype=torch.float64)
    names, left = ["mlp.fc2", "layer_norm1", "mlp.fc1"], []
    block.mlp.fc2.register_forward_hook(lambda *_: left.append("fc2"))
    with torch.no_grad(), module_inputs(block, names) as whole:
        block(x, attention_mask=None)
    assert torch.equal(whole["layer_norm1"], x)
    assert torch.equal(whole["mlp.fc2"], block.mlp.activation_fn(block.mlp.fc1(whole["mlp.fc1"])))
    enough = lambda: len(stopped) == len(names)  # noqa: E731
    with torch.no_grad(), module_inputs(block, names, enough) as stopped:
        block(x, attention_mask=None)
        raise AssertionError("not reached")
    assert list(stopped) == ["layer_norm1", "mlp.fc1", "mlp.fc2"] and left == ["fc2"]
    assert all(torch.equal(stopped[name], whole[name]) for name in names)
    assert all(not m._forward_pre_hooks for m in block.modules())


@pytest.mark.parametrize("changed", [False, True])
def test_an_output_overwritten_in_place_is_left_out(changed):
    block = Block(lambda fc, x: fc(x).add_(1) if changed else fc(x) + 1)
    with torch.no_grad(), module_outputs(block, ["fc"]) as seen:
        block(torch.ones(1, 2, 3))
    assert list(seen) == ([] if changed else ["fc"]) and hooks(block) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", IN_PLACE)
def test_activations_in_place_give_the_same_bits_and_keep_input_and_gradients(kind, dtype):
    block, x = nn.Sequential(kind()), torch.linspace(-9, 9, 693).reshape(3, 7, 33).to(dtype)
    before, expected = x.clone(), block(x)
    with torch.no_grad(), in_place(block):
        assert torch.equal(block(x), expected) and torch.equal(x, before)
        assert block[0].forward is IN_PLACE[kind]
    with in_place(block):
        block(x.requires_grad_()).sum().backward()
    assert x.grad is not None and "forward" not in vars(block[0])


def test_block_that_overwrites_its_own_input_is_an_error():
    block = Block(lambda fc, x: x.add_(1))
    with torch.no_grad(), pytest.raises(BadCapture, match="Block"):
        step(block, Stack("s", "blocks"), torch.zeros(1, 2, 3), ({},))


def test_the_stream_of_a_scaled_output_completes_it_to_the_blocks_output():
    """DINOv2 adds γ y: with the student's γ, its stream and the teacher's y make the teacher's sum."""
    models = [make(FAMILIES["dinov2"].build, seed) for seed in (0, 1)]
    student, teacher = (model.encoder.layer[0] for model in models)
    x, scale = torch.randn(2, 5, 32, dtype=torch.float64), student.layer_scale2.lambda1
    with torch.no_grad(), residual_streams(student, ["mlp.fc2"], x) as streams:
        student(x)
    assert torch.equal(streams.scales["mlp.fc2"], scale)
    names = ["mlp.fc2"]
    with (
        torch.no_grad(),
        residual_streams(teacher, names, x, None, streams.scales) as theirs,
        module_outputs(teacher, names) as y,
    ):
        whole = teacher(x)
    assert torch.allclose(theirs["mlp.fc2"] + scale * y["mlp.fc2"], whole)
