"""open_clip's models computed by open_clip itself, beside the same weights as transformers'
CLIPModel.
"""

from pathlib import Path

import checkpoints
import open_clip
import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from open_clip_models import CFG, TEXT, changed, folder_of, theirs
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, CLIPModel, CLIPTokenizer

import featcal
from featcal.cli import main as cli
from featcal.data.images import Preprocess
from featcal.interchange.open_clip import (
    CONFIG,
    WEIGHTS,
    clip_config,
    in_their_names,
    model_config,
    read_open_clip,
    write_open_clip,
)
from featcal.models.load import load_clip, load_tokenizer, load_vision
from featcal.models.save import save_model
from reproduction.data.prompts import load_prompts

TASKS = (
    "sun397", "stanford-cars", "resisc45", "eurosat", "svhn", "gtsrb", "mnist", "dtd", "oxford_flowers102", "pcam", "fer2013",
    "oxford-iiit-pet", "stl10", "cifar100", "cifar10", "food101", "fashion_mnist", "emnist_letters", "kmnist", "rendered-sst2",
)  # fmt: skip


@torch.no_grad()
def features(model, side=32):
    """Image and text features of one batch, of either library's model."""
    g = torch.Generator().manual_seed(5)
    pictures = torch.randn(3, 3, side, side, generator=g)
    ids = open_clip.SimpleTokenizer(context_length=TEXT["context_length"])(
        ["a photo of a cat", "dog", "the number 7."]
    )
    if isinstance(model, CLIPModel):
        image, text = (
            model.get_image_features(pixel_values=pictures),
            model.get_text_features(input_ids=ids),
        )
        return image.pooler_output, text.pooler_output
    return model.encode_image(pictures), model.encode_text(ids)


def assert_same_features(a, b):
    for this, that in zip(features(a), features(b), strict=True):
        assert this.abs().max() > 0.1
        torch.testing.assert_close(this, that, rtol=0, atol=1e-5)


WIDE = changed("vision_cfg", mlp_ratio=3.3, norm_kwargs={"eps": 1e-3}, image_size=[32, 32])
OWN_END = changed("text_cfg", pool_type="eos", eos_id=320)  # the token of "a"


@pytest.mark.parametrize(
    "cfg",
    [CFG, CFG | {"quick_gelu": False}, WIDE, OWN_END],
    ids=["quick_gelu", "gelu", "widths", "end"],
)
def test_features_equal_those_of_open_clip_both_ways(tmp_path, cfg):
    model = theirs(cfg)
    source = folder_of(model, tmp_path / "theirs", cfg)
    ours = read_open_clip(source / WEIGHTS, source / CONFIG)
    assert not ours.training and {p.dtype for p in ours.parameters()} == {torch.float32}
    assert_same_features(ours, model)
    written = write_open_clip(ours, tmp_path / "written")
    assert_same_features(open_clip.create_model(f"local-dir:{written}").eval(), model)
    before, after = load_file(source / WEIGHTS), load_file(written / WEIGHTS)
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )


def test_the_activation_is_what_the_configuration_says():
    """So that the test above can fail: the two activations give other features."""
    quick, exact = features(theirs()), features(theirs(CFG | {"quick_gelu": False}))
    assert (quick[0] - exact[0]).abs().max() > 1e-3


def test_half_precision_weights_are_read_in_float32_and_no_random_number_is_drawn(tmp_path):
    half = {name: tensor.half() for name, tensor in theirs().state_dict().items()}
    save_file(half, tmp_path / WEIGHTS)
    state = torch.random.get_rng_state()
    ours = read_open_clip(tmp_path / WEIGHTS, CFG)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(ours.visual_projection.weight, half["visual.proj"].float().T)


@pytest.mark.parametrize(
    "name",
    ["ViT-B-32-quickgelu", "ViT-B-16", "ViT-L-14-336", "ViT-g-14", "ViT-H-14", "ViT-bigG-14"],
)
def test_the_published_architectures_have_the_tensors_that_are_expected_and_survive_both_ways(name):
    cfg = open_clip.get_model_config(name)
    ours = clip_config(cfg, name)
    with torch.device("meta"):  # shapes without numbers
        want, clip = open_clip.CLIP(**cfg).state_dict(), CLIPModel(ours)
    layers = ours.vision_config.num_hidden_layers, ours.text_config.num_hidden_layers
    got = in_their_names(clip.state_dict(), *layers)
    assert {n: t.shape for n, t in got.items()} == {n: t.shape for n, t in want.items()}
    assert clip_config(model_config(ours), name).to_dict() == ours.to_dict()


@pytest.mark.parametrize("end", [2, 1, 49407])
def test_the_end_of_a_text_is_found_where_transformers_finds_it(tmp_path, end):
    """End token 2 makes transformers pool at the highest id, any other at its first place;
    open_clip has words for both.
    """
    clip = checkpoints.clip(3)
    clip.text_model.eos_token_id = clip.config.text_config.eos_token_id = end
    model = open_clip.create_model(f"local-dir:{write_open_clip(clip, tmp_path / 'new')}").eval()
    ids = torch.tensor(
        [[5, 9, 1, 7, 1, 3, 2, 0, 0, 0, 0, 0], [4, 2, 10, 11, 1, 1, 6, 0, 0, 0, 0, 0]]
    )
    with torch.no_grad():
        want = clip.get_text_features(input_ids=ids).pooler_output
        torch.testing.assert_close(model.encode_text(ids), want, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def clip_tokenizer():
    """transformers' tokenizer on open_clip's vocabulary, whose two special tokens have other names
    there.
    """
    inner = open_clip.SimpleTokenizer()
    names = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    vocabulary = {names.get(token, token): i for token, i in inner.encoder.items()}
    return CLIPTokenizer(vocab=vocabulary, merges=list(inner.bpe_ranks), model_max_length=77)


@pytest.mark.parametrize("task", TASKS)
def test_tokens_of_the_tasks_prompts_equal_open_clips(clip_tokenizer, task):
    prompts = load_prompts(task)
    chosen = {*prompts.classes[:4], *prompts.classes[-2:], max(prompts.classes, key=len)}
    texts = [prompts.templates[0].replace("{}", name) for name in sorted(chosen)]
    want = open_clip.SimpleTokenizer()(texts)  # (n, 77), zeros after the end
    got = clip_tokenizer(texts, padding=False, truncation=True)["input_ids"]
    assert [row[row != 0].tolist() for row in want] == got


@pytest.mark.parametrize(
    "size",
    [(224, 224), (500, 333), (333, 500), (225, 700), (32, 32), (28, 40), (301, 224), (17, 400)],
)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_prepared_pictures_equal_open_clips_transform(tmp_path, size, mode):
    checkpoints.processor(224).save_pretrained(tmp_path)
    ours, image = Preprocess.from_folder(tmp_path), checkpoints.picture(mode, size)
    got = ours.normalised(ours.pixels(image)[None])[0]
    assert torch.equal(got, image_transform_v2(PreprocessCfg(size=224), is_train=False)(image))


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"mean": 0.5, "std": [0.5, 0.4, 0.3], "interpolation": "bilinear", "resize_mode": "squash"},
    ],
)
def test_the_picture_preparation_survives_both_ways(tmp_path, said, capsys):
    source = folder_of(theirs(), tmp_path / "theirs", preprocess=said)
    assert cli.main(["convert", str(source), "--out", str(tmp_path / "ours")]) == 0
    assert cli.main(["convert", str(tmp_path / "ours"), "--out", str(tmp_path / "back")]) == 0
    ours, image = Preprocess.from_folder(tmp_path / "ours"), checkpoints.picture(size=(57, 41))
    got = ours.normalised(ours.pixels(image)[None])[0]
    for folder in (source, tmp_path / "back"):
        _, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
        assert torch.equal(got, transform(image))
    processed = AutoImageProcessor.from_pretrained(tmp_path / "ours", backend="pil")(
        image, return_tensors="pt"
    )
    assert torch.equal(got, processed["pixel_values"][0])


def test_the_mini_base_speaks_open_clip_with_its_own_tokenizer(tmp_path, capsys):
    base = Path(featcal.__file__).parents[1] / "reproduction" / "mini" / "models" / "clip_b32"
    assert cli.main(["convert", str(base), "--out", str(tmp_path / "new")]) == 0
    model, tokenizer = (
        make(f"local-dir:{tmp_path / 'new'}")
        for make in (open_clip.create_model, open_clip.get_tokenizer)
    )
    texts, clip = ["a photo of a cat", "star"], load_clip(base)
    tokens = load_tokenizer(base)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        want = clip.get_text_features(**tokens).pooler_output
        torch.testing.assert_close(
            model.eval().encode_text(tokenizer(texts)), want, rtol=0, atol=1e-5
        )


def test_experts_of_open_clip_are_converted_merged_calibrated_and_given_back(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    models = {name: theirs(seed=seed) for seed, name in enumerate(("base", "mnist", "dtd"))}
    for name, model in models.items():
        folder_of(model, Path("theirs", name))
        assert cli.main(["convert", f"theirs/{name}", "--out", name]) == 0
    merged = featcal.merge("task_arithmetic", "base", {"mnist": "mnist", "dtd": "dtd"}, scale=0.3)
    write_open_clip(merged, "merged")
    states = {name: model.state_dict() for name, model in models.items()}
    base = states["base"]
    want = {
        n: t + 0.3 * ((states["mnist"][n] - t) + (states["dtd"][n] - t)) for n, t in base.items()
    }
    got = open_clip.create_model("local-dir:merged").state_dict()
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    g = torch.Generator().manual_seed(1)
    experts = {"mnist": "mnist", "dtd": "dtd"}
    batches = {task: [{"pixel_values": torch.randn(4, 3, 32, 32, generator=g)}] for task in experts}
    settings = featcal.Calibration(ridge=0.05, anchor_blend=2.0, interpolation=0.3)
    save_model(merged, "hf", like="base")
    featcal.calibrate(
        "hf", base="base", experts=experts, batches=batches, settings=settings, out="calibrated"
    )
    assert cli.main(["convert", "calibrated", "--out", "direct"]) == 0
    save_model(load_vision("calibrated"), "tower")
    assert cli.main(["convert", "tower", "--out", "whole"]) == 2, (
        "a vision tower alone is no CLIP of open_clip"
    )
    assert cli.main(["convert", "tower", "--clip", "base", "--out", "whole"]) == 0
    pictures = torch.randn(2, 3, 32, 32, generator=g)
    with torch.no_grad():
        pooled = load_vision("tower")(pixel_values=pictures).pooler_output @ base["visual.proj"]
        whole = open_clip.create_model("local-dir:whole").eval()
        torch.testing.assert_close(whole.encode_image(pictures), pooled, rtol=0, atol=1e-5)
    torch.testing.assert_close(features(whole)[1], features(models["base"])[1], rtol=0, atol=1e-5)


def test_whoever_may_read_the_configuration_may_read_the_weights(tmp_path):
    write_open_clip(
        load_clip(checkpoints.clip_folder(tmp_path / "ours")),
        tmp_path / "theirs",
        like=tmp_path / "ours",
    )
    assert (tmp_path / "theirs" / WEIGHTS).stat().st_mode == (
        tmp_path / "theirs" / CONFIG
    ).stat().st_mode
