"""Settings beyond the paper: residual targets in every family, resumed runs."""

import families
import pytest
import torch
import transformers as tf
from families import FAMILIES
from test_resume import deep, finished, killed_after
from test_streaming import written
from tiny import PAPER, VISION, clip, experiment, make, same_bits, shifted

from featcal import calibrate
from featcal.core.moments import every_token
from featcal.errors import BadSetting
from featcal.models.load import load_as_calibrated
from featcal.settings import Calibration

ALL = Calibration(
    ridge=1e-3,
    anchor_blend=1.0,
    interpolation=0.8,
    order="sites",
    residual=0.5,
    affine="joint",
)
# every linear whose output is added to the stream, of the first block
WRITERS = {
    "clip_text": ("self_attn.out_proj", "mlp.fc2"),
    "bert": ("attention.output.dense", "output.dense"),
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
    "llama": ("self_attn.o_proj", "mlp.down_proj"),
    "t5_encoder": ("layer.0.SelfAttention.o", "layer.1.DenseReluDense.wo"),
    "vit": ("attention.o_proj", "mlp.fc2"),
    "opt": ("self_attn.out_proj", "fc2"),
    "dinov2": ("attention.o_proj", "mlp.fc2"),
}


def shallow(dtype):
    return clip(dtype=dtype, num_hidden_layers=1)


def shallow_dinov2(dtype):
    config = tf.Dinov2Config(**VISION | {"num_hidden_layers": 1})
    return make(lambda: tf.Dinov2Model(config), 0, dtype)


@pytest.mark.parametrize("family", WRITERS)
def test_residual_target_changes_only_linears_that_write_into_the_stream(family):
    given = families.experiment(FAMILIES[family])
    path = next(iter(FAMILIES[family].stacks.values()))
    paper, residual = (
        calibrate(**given, settings=PAPER.but(residual=beta)).model.get_submodule(f"{path}.0")
        for beta in (0.0, 1.0)
    )
    pairs = zip(paper.named_parameters(), residual.parameters(), strict=True)
    changed = {name.rpartition(".")[0] for (name, p), q in pairs if not torch.equal(p, q)}
    assert changed == set(WRITERS[family])


def test_a_model_whose_outputs_are_normed_before_the_addition_is_refused():
    with pytest.raises(BadSetting, match=r"calibrate\.residual"):
        calibrate(**families.experiment(FAMILIES["gemma2"]), settings=PAPER.but(residual=1.0))


@pytest.mark.parametrize("build", [shallow, shallow_dinov2])
def test_residual_target_reduces_the_drift_of_a_wrong_residual_stream(build):
    given = experiment(build=build, count=400) | {"token_weights": every_token}
    task = next(iter(given["experts"]))
    given |= {part: {task: given[part][task]} for part in ("experts", "batches")}
    # its embeddings, which are not calibrated, are not the expert's
    given["merged"] = shifted(given["merged"], 5)
    settings = PAPER.but(ridge=1e-10, anchor_blend=1.0, interpolation=1.0, order="sites")
    none, half, whole = (
        calibrate(**given, settings=settings.but(residual=beta)).blocks[0].relative_drift
        for beta in (0.0, 0.5, 1.0)
    )
    assert whole < half < none


def test_streamed_interrupted_and_resumed_run_is_bit_identical_to_one_in_memory(
    tmp_path, monkeypatch
):
    given = experiment(torch.float32, build=deep, count=20)
    in_memory = calibrate(**given, settings=ALL).model
    folders = written(given, tmp_path)
    killed_after(monkeypatch, 2, tmp_path / "out", folders, ALL)
    _, resumed = finished(tmp_path / "out", folders, ALL, host_memory=0)
    assert resumed == [True, True, False, False]
    assert same_bits(load_as_calibrated(tmp_path / "out"), in_memory)
