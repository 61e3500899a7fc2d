"""What cannot be converted is refused with one message that names it, and nothing is written."""

import json
import shutil
from pathlib import Path

import checkpoints
import pytest
import torch
from open_clip_models import CFG, TEXT, VISION, changed, folder_of, theirs
from safetensors.torch import load_file, save_file

from featcal.cli import main as cli
from featcal.errors import BadFile, BadSetting, MissingPath, NotFinite, TruncatedFile
from featcal.interchange.open_clip import CONFIG, WEIGHTS, read_open_clip, write_open_clip
from featcal.models.load import load_clip


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    return folder_of(theirs(), tmp_path_factory.mktemp("ready") / "theirs")


@pytest.fixture
def broken(ready, tmp_path):
    return Path(shutil.copytree(ready, tmp_path / "broken"))


def rewrite(folder, **tensors):
    """Replace tensors of the weights; None removes one."""
    state = load_file(folder / WEIGHTS) | tensors
    save_file({n: t for n, t in state.items() if t is not None}, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("name", "tensor", "error"),
    [
        ("ln_final.bias", None, BadFile),
        ("visual.pool", torch.zeros(2), BadFile),
        ("visual.proj", torch.zeros(16, 32), BadFile),
        ("visual.proj", torch.full((32, 16), float("nan")), NotFinite),
    ],
)
def test_weights_that_do_not_fit_their_configuration_are_named(broken, name, tensor, error):
    rewrite(broken, **{name: tensor})
    with pytest.raises(error, match=rf"{WEIGHTS}.*{name}"):
        read_open_clip(broken)


@pytest.mark.parametrize(
    ("cfg", "named"),
    [
        (CFG | {"custom_text": True}, "custom_text"),
        (CFG | {"init_logit_bias": 1.0}, "logit_bias"),
        (changed("vision_cfg", timm_model_name="vit_siglip"), "timm_model_name"),
        (changed("text_cfg", hf_model_name="xlm-roberta-base"), "hf_model_name"),
        (changed("vision_cfg", layers=[3, 4, 6, 3]), "num_hidden_layers"),
        (changed("vision_cfg", pool_type="avg"), "features that differ"),
        (changed("vision_cfg", final_ln_after_pool=True, pool_type="avg"), "features that differ"),
        (changed("vision_cfg", image_size=[32, 48]), "positional_embedding"),
        (changed("vision_cfg", qk_norm=True), "ln_k"),
        (changed("vision_cfg", ls_init_value=0.1), "ls_1.gamma"),
        (changed("vision_cfg", never_heard_of=1), "never_heard_of"),
        (changed("vision_cfg", head_width=10), "attention heads"),
        (changed("text_cfg", act_kwargs={"approximate": "tanh"}), "act_kwargs"),
        (changed("text_cfg", no_causal_mask=True), "features that differ"),
        (changed("text_cfg", norm_kwargs={"bias": False}), "ln_final.bias"),
        (changed("text_cfg", pool_type="eos"), "features that differ"),
        ({"embed_dim": 16, "vision_cfg": VISION}, "text_cfg"),
        ({"vision_cfg": VISION, "text_cfg": TEXT}, "embed_dim"),
        ([], "TypeError"),
        ({"model_cfg": None}, "TypeError"),
    ],
)
def test_an_architecture_that_transformers_lacks_is_refused(broken, cfg, named):
    (broken / CONFIG).write_text(json.dumps(cfg))
    with pytest.raises(BadFile, match=named) as caught:
        read_open_clip(broken)
    assert str(broken / CONFIG) in str(caught.value)


@pytest.mark.parametrize("tower", ["vision_config", "text_config"])
@pytest.mark.parametrize(
    ("key", "value"), [("hidden_act", "gelu"), ("hidden_act", "relu"), ("image_size", (32, 48))]
)
def test_a_clip_that_open_clip_has_no_counterpart_for_is_not_written(tmp_path, tower, key, value):
    clip = checkpoints.clip()  # both towers have quick_gelu
    part = clip.config.vision_config if key == "image_size" else getattr(clip.config, tower)
    setattr(part, key, value)
    with pytest.raises((BadSetting, BadFile), match=f"{key}|positional_embedding"):
        write_open_clip(clip, tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_missing_and_truncated_files_are_refused(broken):
    (broken / WEIGHTS).write_bytes((broken / WEIGHTS).read_bytes()[:100])
    with pytest.raises(TruncatedFile):
        read_open_clip(broken)
    (broken / CONFIG).unlink()
    with pytest.raises(MissingPath):
        read_open_clip(broken)


def damage(folder: Path, how: str) -> None:
    if how == "config.json":
        (folder / CONFIG).unlink()
    elif how == "already":
        (folder / "config.json").write_text("{}")
    elif how == "pickle":
        (folder / WEIGHTS).rename(folder / "open_clip_pytorch_model.bin")
    elif how == "longest":
        content = {"model_cfg": CFG, "preprocess_cfg": {"resize_mode": "longest"}}
        (folder / CONFIG).write_text(json.dumps(content))
    else:
        rewrite(folder, logit_scale=None)


@pytest.mark.parametrize("said", ["config.json", "already", "pickle", "longest", "logit_scale"])
def test_convert_ends_with_one_message_and_exit_code_2_and_writes_nothing(broken, capsys, said):
    damage(broken, said)
    before = sorted(broken.parent.rglob("*"))
    assert cli.main(["convert", str(broken), "--out", str(broken.parent / "new")]) == cli.MISTAKE
    printed = capsys.readouterr().err
    assert said in printed and printed.count("featcal:") == 1 and "Traceback" not in printed
    assert sorted(broken.parent.rglob("*")) == before


def test_a_processor_that_open_clip_has_no_counterpart_for_is_refused(tmp_path):
    source = checkpoints.clip_folder(tmp_path / "ours")
    checkpoints.processor(48).save_pretrained(source)
    with pytest.raises(BadFile, match="does not resize to 32"):
        write_open_clip(load_clip(source), tmp_path / "new", like=source)


def test_converting_again_over_an_open_clip_folder_needs_force(ready, tmp_path, capsys):
    assert cli.main(["convert", str(ready), "--out", str(tmp_path / "ours")]) == 0
    back = ["convert", str(tmp_path / "ours"), "--out", str(tmp_path / "back")]
    assert [cli.main(back), cli.main(back), cli.main([*back, "--force"])] == [0, 2, 0]
    assert "--force" in capsys.readouterr().err
