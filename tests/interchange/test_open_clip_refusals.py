"""What of open_clip cannot be converted: one message that names the file and the setting or tensor,
and nothing written.
"""

import json
import shutil
from pathlib import Path

import checkpoints
import pytest
import torch
from open_clip_models import CFG, TEXT, VISION, changed, folder_of, theirs
from safetensors.torch import load_file, save_file

from featcal.cli import main as cli
from featcal.errors import (
    BadFile,
    BadSetting,
    FeatCalError,
    MissingPath,
    NotFinite,
    TruncatedFile,
    WrongKeys,
)
from featcal.interchange.open_clip import CONFIG, WEIGHTS, read_open_clip, write_open_clip
from featcal.models.load import load_clip


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    return folder_of(theirs(), tmp_path_factory.mktemp("ready") / "theirs")


@pytest.fixture
def broken(ready, tmp_path):
    return Path(shutil.copytree(ready, tmp_path / "broken"))


def rewritten(folder, **tensors):
    state = load_file(folder / WEIGHTS) | tensors
    save_file(
        {name: tensor for name, tensor in state.items() if tensor is not None}, folder / WEIGHTS
    )


@pytest.mark.parametrize(
    ("tensors", "error", "said"),
    [
        ({"ln_final.bias": None}, WrongKeys, r"1 missing: ln_final\.bias"),
        (
            {"visual.attnpool.weight": torch.zeros(2)},
            WrongKeys,
            r"not part of it: visual\.attnpool\.weight",
        ),
        (
            {"visual.proj": torch.zeros(16, 32)},
            WrongKeys,
            r"of another shape: visual\.proj \(16, 32\) instead of \(32, 16\)",
        ),
        ({"visual.proj": torch.full((32, 16), float("nan"))}, NotFinite, r"visual\.proj"),
    ],
)
def test_weights_that_do_not_fit_their_configuration_are_named(broken, tensors, error, said):
    rewritten(broken, **tensors)
    with pytest.raises(error, match=said):
        read_open_clip(broken / WEIGHTS, broken / CONFIG)


@pytest.mark.parametrize(
    ("cfg", "said"),
    [
        (CFG | {"custom_text": True}, "custom_text is True"),
        (CFG | {"multimodal_cfg": {"layers": 2}}, "multimodal_cfg"),
        (CFG | {"init_logit_bias": -10}, "init_logit_bias is -10"),
        (
            changed("vision_cfg", timm_model_name="vit_base_patch16_siglip_224"),
            r"vision_cfg\.timm_model_name",
        ),
        (changed("vision_cfg", layers=[3, 4, 6, 3]), r"layers is \[3, 4, 6, 3\]"),
        (changed("vision_cfg", pool_type="avg"), r"vision_cfg\.pool_type is 'avg'"),
        (changed("vision_cfg", image_size=[32, 48]), "image_size"),
        (changed("vision_cfg", qk_norm=True), "qk_norm"),
        (changed("vision_cfg", never_heard_of=1), "never_heard_of"),
        (changed("vision_cfg", head_width=10), "3 attention heads"),
        (changed("text_cfg", hf_model_name="xlm-roberta-base"), r"text_cfg\.hf_model_name"),
        (changed("text_cfg", no_causal_mask=True), "no_causal_mask"),
        (changed("text_cfg", act_kwargs={"approximate": "tanh"}), "act_kwargs"),
        (changed("text_cfg", norm_kwargs={"bias": False}), "norm_kwargs"),
        (changed("text_cfg", pool_type="eos"), "eos_id is 2"),
        (changed("text_cfg", layers="two"), "layers is 'two'"),
        (changed("text_cfg", mlp_ratio="4"), "mlp_ratio"),
        ({"embed_dim": 16, "vision_cfg": VISION}, "text_cfg is missing"),
        ({"vision_cfg": VISION, "text_cfg": TEXT}, "embed_dim is None"),
        ([], "not a JSON object"),
        ({"model_cfg": None}, "not a JSON object"),
    ],
)
def test_an_architecture_that_transformers_lacks_is_refused_by_the_name_of_the_setting(
    broken, cfg, said
):
    (broken / CONFIG).write_text(json.dumps(cfg))
    with pytest.raises(BadFile, match=said) as caught:
        read_open_clip(broken / WEIGHTS, broken / CONFIG)
    assert str(broken / CONFIG) in str(caught.value)


def test_pickles_missing_and_damaged_files_are_refused(broken):
    with pytest.raises(MissingPath):
        read_open_clip(broken / "nothing.safetensors", CFG)
    (broken / "open_clip_pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(BadFile, match=r"open_clip_pytorch_model\.bin is a pickle"):
        read_open_clip(broken / "open_clip_pytorch_model.bin", CFG)
    (broken / WEIGHTS).write_bytes((broken / WEIGHTS).read_bytes()[:100])
    with pytest.raises(TruncatedFile):
        read_open_clip(broken / WEIGHTS, CFG)


@pytest.mark.parametrize("tower", ["vision_config", "text_config"])
def test_a_clip_that_open_clip_cannot_be_is_not_written(tmp_path, tower):
    clip = checkpoints.clip()
    getattr(clip.config, tower).hidden_act = "gelu"  # the other tower's is quick_gelu
    with pytest.raises(BadSetting, match="hidden_act"):
        write_open_clip(clip, tmp_path / "new")
    assert not list(tmp_path.iterdir())


def spoilt(folder: Path, how: str) -> str:
    """Breaks a copy of an open_clip folder; what the message must name."""
    if how == "empty":
        (folder / CONFIG).unlink()
        return "config.json"
    if how == "both":
        (folder / "config.json").write_text("{}")
        return "already"
    if how == "pickle":
        (folder / WEIGHTS).rename(folder / "open_clip_pytorch_model.bin")
        return "pickle"
    if how == "longest":
        (folder / CONFIG).write_text(
            json.dumps({"model_cfg": CFG, "preprocess_cfg": {"resize_mode": "longest"}})
        )
        return "longest"
    rewritten(folder, **{"logit_scale": None})
    return "logit_scale"


@pytest.mark.parametrize("how", ["empty", "both", "pickle", "longest", "key"])
def test_convert_ends_with_one_message_and_exit_code_2_and_writes_nothing(broken, capsys, how):
    said = spoilt(broken, how)
    before = sorted(broken.parent.rglob("*"))
    assert cli.main(["convert", str(broken), "--out", str(broken.parent / "new")]) == cli.MISTAKE
    printed = capsys.readouterr().err
    assert said in printed and printed.count("featcal:") == 1 and "Traceback" not in printed
    assert sorted(broken.parent.rglob("*")) == before


def test_a_processor_that_open_clip_has_no_words_for_is_refused(tmp_path):
    source = checkpoints.clip_folder(tmp_path / "ours")
    checkpoints.processor(48).save_pretrained(source)
    with pytest.raises(FeatCalError, match="does not resize to 32"):
        write_open_clip(load_clip(source), tmp_path / "new", like=source)


def test_converting_again_over_an_open_clip_folder_needs_force(ready, tmp_path, capsys):
    assert cli.main(["convert", str(ready), "--out", str(tmp_path / "ours")]) == 0
    back = ["convert", str(tmp_path / "ours"), "--out", str(tmp_path / "back")]
    assert [cli.main(back), cli.main(back), cli.main([*back, "--force"])] == [0, 2, 0]
    assert "--force" in capsys.readouterr().err
