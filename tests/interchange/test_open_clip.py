"""Converted CLIPs compute what open_clip itself computes with the same weights, or are refused."""

import json
import os
import shutil
import sys
from pathlib import Path

import checkpoints
import open_clip
import pytest
import torch
from folders import same
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, CLIPModel

import featcal
from featcal.cli import main as cli
from featcal.data.images import Preprocess
from featcal.errors import BadData, BadEnvironment, BadFile, BadSetting, NotFinite
from featcal.interchange import open_clip as form
from featcal.interchange.open_clip import CONFIG, WEIGHTS, read_open_clip, write_open_clip
from featcal.models.load import load_clip, load_tokenizer, load_vision, save_model

VISION = {"image_size": 32, "layers": 3, "width": 32, "head_width": 8, "patch_size": 8}
TEXT = {"context_length": 16, "vocab_size": 49408, "width": 24, "heads": 4, "layers": 2}
CFG = {"embed_dim": 16, "quick_gelu": True, "vision_cfg": VISION, "text_cfg": TEXT}


def theirs(cfg=CFG, seed=0):
    """Return a CLIP of open_clip in which every parameter is random: no bias 0, no gain 1."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = open_clip.CLIP(**cfg).eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def folder_of(model, folder, cfg=CFG, preprocess=None):
    """Write a folder as open_clip's own hub upload does."""
    folder.mkdir(parents=True)
    save_file(model.state_dict(), folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({"model_cfg": cfg, "preprocess_cfg": preprocess or {}}))
    return folder


def changed(section, **values):
    return CFG | {section: CFG[section] | values}


@torch.no_grad()
def features(model):
    """Return image and text features of one batch, of either library's model."""
    pictures = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    tokenizer = open_clip.SimpleTokenizer(context_length=TEXT["context_length"])
    ids = tokenizer(["a photo of a cat", "dog", "the number 7."])
    if isinstance(model, CLIPModel):
        image = model.get_image_features(pixel_values=pictures)
        return image.pooler_output, model.get_text_features(input_ids=ids).pooler_output
    return model.encode_image(pictures), model.encode_text(ids)


def assert_same_features(a, b):
    for this, that in zip(features(a), features(b), strict=True):
        assert this.abs().max() > 0.1
        torch.testing.assert_close(this, that, rtol=0, atol=1e-5)


def prepared(folder, image):
    """Return the pixels that a folder's processor makes of one picture, in featcal's two steps."""
    ours = Preprocess.from_folder(folder)
    return ours.normalised(ours.pixels(image)[None])[0]


def convert(*arguments):
    return cli.main(["convert", *map(str, arguments)])


GELU = CFG | {"quick_gelu": False}
WIDE = changed("vision_cfg", mlp_ratio=3.3, norm_kwargs={"eps": 1e-3}, image_size=[32, 32])
OWN_END = changed("text_cfg", pool_type="eos", eos_id=320)  # the token of "a"


@pytest.mark.parametrize("cfg", [CFG, GELU, WIDE, OWN_END], ids=["quick", "gelu", "wide", "end"])
def test_features_and_tensors_equal_open_clips_both_ways(tmp_path, cfg):
    model = theirs(cfg)
    source = folder_of(model, tmp_path / "theirs", cfg)
    state = torch.random.get_rng_state()
    ours = read_open_clip(source)
    assert torch.equal(state, torch.random.get_rng_state())
    assert not ours.training and {p.dtype for p in ours.parameters()} == {torch.float32}
    assert_same_features(ours, model)
    written = write_open_clip(ours, tmp_path / "written")
    assert_same_features(open_clip.create_model(f"local-dir:{written}").eval(), model)
    before, after = load_file(source / WEIGHTS), load_file(written / WEIGHTS)
    older = before | {"logit_scale": before["logit_scale"].reshape(1)}
    save_file({f"module._orig_mod.{n}": t for n, t in older.items()}, source / WEIGHTS)
    assert same(read_open_clip(source), ours)
    save_file({name: tensor.half() for name, tensor in before.items()}, source / WEIGHTS)
    in_half = read_open_clip(source).visual_projection.weight
    assert torch.equal(in_half, ours.visual_projection.weight.half().float())
    assert same(before, after)
    assert (written / WEIGHTS).stat().st_mode == (written / CONFIG).stat().st_mode


@pytest.mark.parametrize(
    "name",
    ["ViT-B-32-quickgelu", "ViT-B-16", "ViT-L-14-336", "ViT-g-14", "ViT-H-14", "ViT-bigG-14"],
)
def test_published_architectures_have_open_clips_tensors_and_survive_both_ways(name):
    cfg = open_clip.get_model_config(name)
    theirs, ours = form.counterpart(cfg, None, name)  # compares tensors
    assert form.clip_config(form.model_config(ours.config)).to_dict() == ours.config.to_dict()
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())


@pytest.mark.parametrize("end", [2, 1, 49407])
def test_texts_are_pooled_where_transformers_pools_them(tmp_path, end):
    clip = checkpoints.clip(3)
    clip.text_model.eos_token_id = clip.config.text_config.eos_token_id = end
    model = open_clip.create_model(f"local-dir:{write_open_clip(clip, tmp_path / 'new')}").eval()
    ids = torch.tensor([[5, 9, 1, 7, 1, 3, 2], [4, 2, 10, 11, 1, 1, 6]])
    ids = torch.nn.functional.pad(ids, (0, 5))
    with torch.no_grad():
        want = clip.get_text_features(input_ids=ids).pooler_output
        torch.testing.assert_close(model.encode_text(ids), want, rtol=0, atol=1e-5)


SQUASH = {"mean": 0.5, "std": [0.5, 0.4, 0.3], "interpolation": "bilinear", "resize_mode": "squash"}


@pytest.mark.parametrize("preprocess", [{}, SQUASH])
def test_pixels_survive_both_ways(tmp_path, preprocess):
    source, ours, back = tmp_path / "theirs", tmp_path / "ours", tmp_path / "back"
    folder_of(theirs(), source, preprocess=preprocess)
    assert convert(source, "--out", ours) == convert(ours, "--out", back) == 0
    image = checkpoints.picture(size=(57, 41))
    got = prepared(ours, image)
    for folder in (source, back):
        transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")[2]
        assert torch.equal(got, transform(image))
    processor = AutoImageProcessor.from_pretrained(ours, backend="pil")
    assert torch.equal(got, processor(image, return_tensors="pt")["pixel_values"][0])


def test_a_clip_with_its_own_tokenizer_gives_the_same_text_features_in_open_clip(tmp_path):
    base = Path(featcal.__file__).parents[1] / "reproduction" / "mini" / "models" / "clip_b32"
    new, back = tmp_path / "new", tmp_path / "back"
    assert convert(base, "--out", new) == convert(new, "--out", back) == 0
    model = open_clip.create_model(f"local-dir:{new}").eval()
    texts, clip = ["a photo of a cat", "star"], load_clip(base)
    ids = open_clip.get_tokenizer(f"local-dir:{new}")(texts)
    tokens = load_tokenizer(back)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        want = clip.get_text_features(**tokens).pooler_output
        torch.testing.assert_close(model.encode_text(ids), want, rtol=0, atol=1e-5)


def test_a_converted_clip_keeps_its_other_files_but_not_the_config_of_the_other_form(tmp_path):
    clip, there, back = (tmp_path / name for name in ("clip", "there", "back"))
    checkpoints.clip_folder(clip)
    for name in ("LICENSE", "README.md"):
        (clip / name).write_text("of the source")
    assert convert(clip, "--out", there) == convert(there, "--out", back) == 0
    clip, there, back = ({file.name for file in each.iterdir()} for each in (clip, there, back))
    assert back == clip - {"README.md"} and not there & {"config.json", "README.md"}
    assert {"tokenizer.json", "LICENSE"} <= there


def test_a_vision_tower_replaces_that_of_a_whole_clip(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base, expert = theirs(), theirs(seed=1)
    for name, model in (("base", base), ("expert", expert)):
        assert convert(folder_of(model, Path("theirs", name)), "--out", name) == 0
    save_model(load_vision("expert"), "tower")
    assert convert("tower", "--out", "whole") == 2  # a vision tower alone is no CLIP
    assert convert("tower", "--clip", "base", "--out", "whole") == 0
    got = open_clip.create_model("local-dir:whole").eval()
    with torch.no_grad():
        expert.visual.proj.copy_(base.visual.proj)
    assert torch.equal(features(got)[0], features(expert)[0])
    assert torch.equal(features(got)[1], features(base)[1])


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    return folder_of(theirs(), tmp_path_factory.mktemp("ready") / "theirs")


@pytest.fixture
def broken(ready, tmp_path):
    return Path(shutil.copytree(ready, tmp_path / "broken"))


@pytest.mark.parametrize(
    ("name", "tensor", "error"),
    [
        ("ln_final.bias", None, BadFile),
        ("visual.pool", torch.zeros(2), BadFile),
        ("visual.proj", torch.zeros(16, 32), BadFile),
        ("visual.proj", torch.full((32, 16), float("nan")), NotFinite),
        ("visual.proj", torch.zeros(32, 16).to(torch.float8_e4m3fn), BadData),
    ],
)
def test_weights_that_do_not_fit_their_configuration_are_named(broken, name, tensor, error):
    checkpoints.with_tensors(broken, {name: tensor}, WEIGHTS)
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
        (changed("vision_cfg", image_size=[32, 48]), "positional_embedding"),
        (changed("vision_cfg", qk_norm=True), "ln_k"),
        (changed("vision_cfg", ls_init_value=0.1), "ls_1.gamma"),
        (changed("vision_cfg", never_heard_of=1), "never_heard_of"),
        (changed("vision_cfg", head_width=10), "attention heads"),
        (changed("text_cfg", act_kwargs={"approximate": "tanh"}), "act_kwargs"),
        (changed("text_cfg", no_causal_mask=True), "features that differ"),
        (changed("text_cfg", pool_type="eos"), "features that differ"),
        ({"embed_dim": 16, "vision_cfg": VISION}, "text_cfg"),
        ([], "list indices"),
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


LONGEST = json.dumps({"model_cfg": CFG, "preprocess_cfg": {"resize_mode": "longest"}})
DAMAGE = {
    "config.json": lambda folder: (folder / CONFIG).unlink(),
    "already": lambda folder: (folder / "config.json").write_text("{}"),
    "pickle": lambda folder: (folder / WEIGHTS).rename(folder / "open_clip_pytorch_model.bin"),
    "cut short": lambda folder: os.truncate(folder / WEIGHTS, 100),
    "longest": lambda folder: (folder / CONFIG).write_text(LONGEST),
    "logit_scale": lambda folder: checkpoints.with_tensors(folder, {"logit_scale": None}, WEIGHTS),
}


@pytest.mark.parametrize("said", DAMAGE)
def test_convert_ends_with_one_message_and_exit_code_2_and_writes_nothing(broken, capsys, said):
    DAMAGE[said](broken)
    before = sorted(broken.parent.rglob("*"))
    assert convert(broken, "--out", broken.parent / "new") == cli.MISTAKE
    printed = capsys.readouterr().err
    assert said in printed and printed.count("featcal:") == 1 and "Traceback" not in printed
    assert sorted(broken.parent.rglob("*")) == before


def test_without_open_clip_the_line_that_installs_it_is_shown(ready, monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip.model", None)
    with pytest.raises(BadEnvironment, match=r"pip install 'featcal\[openclip\]'"):
        read_open_clip(ready)


def test_a_processor_that_open_clip_has_no_counterpart_for_is_refused(tmp_path):
    source = checkpoints.clip_folder(tmp_path / "ours")
    checkpoints.processor(48).save_pretrained(source)
    with pytest.raises(BadFile, match="does not resize to 32"):
        write_open_clip(load_clip(source), tmp_path / "new", like=source)


def test_converting_again_over_an_open_clip_folder_needs_force(ready, tmp_path, capsys):
    assert convert(ready, "--out", tmp_path / "ours") == 0
    back = (tmp_path / "ours", "--out", tmp_path / "back")
    assert [convert(*back), convert(*back), convert(*back, "--force")] == [0, 2, 0]
    assert "--force" in capsys.readouterr().err
    with pytest.raises(BadFile, match="no open_clip_config.json; it is not replaced"):
        write_open_clip(load_clip(tmp_path / "ours"), tmp_path / "ours")
    assert convert(ready, "--out", tmp_path / "back", "--force") == 0  # the other form
