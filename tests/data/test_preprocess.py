"""The same pixels as transformers' own PIL processor."""

import json

import checkpoints
import pytest
import torch
import transformers
from checkpoints import picture

from featcal.data import processors
from featcal.data.images import Pictures, Preprocess
from featcal.errors import BadFile, MissingPath


@pytest.fixture(scope="module")
def preprocess(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processor")
    checkpoints.processor().save_pretrained(folder)
    return Preprocess.from_folder(folder)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "RGBA", "LA", "CMYK", "I;16"])
@pytest.mark.parametrize("size", [(32, 32), (47, 32), (33, 90), (7, 5), (28, 28)])
def test_pixels_equal_the_pil_processor_of_transformers_to_the_bit(preprocess, mode, size):
    image = picture(mode if mode != "I;16" else "L", size)
    image = image.convert("I;16") if mode == "I;16" else image
    images = Pictures(preprocess.pixels(image)[None], preprocess)
    want = checkpoints.processor()(image, return_tensors="pt")["pixel_values"]
    assert torch.equal(images.tensor([0]), want)


@pytest.mark.parametrize(
    "changed",
    [
        {"size": {"shortest_edge": 20}, "crop_size": {"height": 31, "width": 24}},
        {"size": {"height": 30, "width": 17}, "crop_size": 20},
        {"do_center_crop": False, "size": {"height": 8, "width": 9}},
        {"do_resize": False},
        {"do_normalize": False, "resample": 2},
        {"do_rescale": False},
        {"rescale_factor": 1 / 127.5, "image_mean": [0.5] * 3, "image_std": [0.25] * 3},
    ],
)
def test_other_settings_of_the_processor_are_followed(tmp_path, changed):
    theirs = type(checkpoints.processor())(**changed)
    theirs.save_pretrained(tmp_path)
    ours = Preprocess.from_folder(tmp_path)
    for size in ((50, 30), (13, 40)):
        got = ours.normalised(ours.pixels(picture(size=size))[None])
        assert torch.equal(
            got, theirs(picture(size=size), return_tensors="pt")["pixel_values"].float()
        )


def test_a_processor_file_of_2021_and_a_joint_one_are_read(tmp_path, preprocess):
    (tmp_path / "processor_config.json").write_text(
        '{"image_processor": {"size": {"shortest_edge": 32}, "crop_size": 32}}'
    )
    assert Preprocess.from_folder(tmp_path) == preprocess
    (tmp_path / "preprocessor_config.json").write_text(
        '{"size": 32, "crop_size": 32, "resample": 3}'
    )
    assert Preprocess.from_folder(tmp_path) == preprocess
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"longest_edge": 32}}')
    with pytest.raises(BadFile, match="longest_edge"):
        Preprocess.from_folder(tmp_path)
    with pytest.raises(MissingPath, match=r"preprocessor_config\.json"):
        Preprocess.from_folder(tmp_path / "nowhere")


SMALL = {"size": {"height": 30, "width": 26}}
PROCESSORS = {
    "ViT": [{}, SMALL],
    "DeiT": [{}, SMALL | {"crop_size": {"height": 24, "width": 24}}],
    "Bit": [{}, {"size": {"shortest_edge": 20}, "crop_size": {"height": 18, "width": 18}}],
    "Siglip": [{}, SMALL],
}


@pytest.mark.parametrize("family", sorted(PROCESSORS))
def test_the_processors_of_other_vision_models_give_the_same_bits(tmp_path, family):
    theirs = getattr(transformers, f"{family}ImageProcessorPil")
    for i, changed in enumerate(PROCESSORS[family]):
        theirs(**changed).save_pretrained(tmp_path / str(i))
        ours = Preprocess.from_folder(tmp_path / str(i))
        for size in ((250, 230), (33, 90)):
            got = ours.normalised(ours.pixels(picture(size=size))[None])
            assert torch.equal(
                got,
                theirs(**changed)(picture(size=size), return_tensors="pt")["pixel_values"].float(),
            )


@pytest.mark.parametrize("family", sorted(PROCESSORS))
def test_a_processor_on_torchvision_differs_by_at_most_one_grey_level(tmp_path, family):
    theirs = getattr(transformers, f"{family}ImageProcessor")()
    theirs.save_pretrained(tmp_path)
    ours = Preprocess.from_folder(tmp_path)
    level = max(1 / 255 / std for std in ours.std)
    got = ours.normalised(ours.pixels(picture(size=(250, 230)))[None])
    assert (
        got - theirs(picture(size=(250, 230)), return_tensors="pt")["pixel_values"]
    ).abs().max() <= 1.001 * level


@pytest.mark.parametrize("family", sorted(processors.DEFAULTS))
def test_what_a_file_leaves_out_is_what_its_processor_does(tmp_path, family):
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": f"{family}ImageProcessorFast"})
    )
    bare = Preprocess.from_folder(tmp_path)
    getattr(transformers, f"{family}ImageProcessorPil")().save_pretrained(tmp_path)
    assert Preprocess.from_folder(tmp_path) == bare


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([1], "not a mapping"),
        ("a word", "not a mapping"),
        ({"image_processor_type": "DonutImageProcessor"}, "DonutImageProcessor"),
        ({"do_pad": True}, "do_pad"),
        ({"size": "wide"}, "size"),
        ({"size": {"height": 3}}, "size"),
        ({"size": {"shortest_edge": 3, "longest_edge": 9}}, "longest_edge"),
        ({"size": {"shortest_edge": 0}}, "size"),
        ({"crop_size": [3, 4]}, "crop_size"),
        ({"resample": 99}, "resample"),
        ({"rescale_factor": "1/255"}, "rescale_factor"),
        ({"image_mean": [0.5]}, "image_mean"),
        ({"image_std": "one"}, "image_std"),
    ],
)
def test_a_processor_file_that_cannot_be_followed_is_named_with_its_entry(tmp_path, content, said):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    with pytest.raises(BadFile, match=rf"preprocessor_config\.json: [\s\S]*{said}"):
        Preprocess.from_folder(tmp_path)
