"""The same pixels as transformers' own PIL processor."""

import checkpoints
import numpy as np
import pytest
import torch
from checkpoints import picture

from featcal.data.images import ImageSet, Preprocess
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
    images = ImageSet(preprocess.pixels(image)[None], np.zeros(1, np.int64), ("x",), preprocess)
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
        assert torch.equal(got, theirs(picture(size=size), return_tensors="pt")["pixel_values"].float())


def test_a_processor_file_of_2021_and_a_joint_one_are_read(tmp_path, preprocess):
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"size": {"shortest_edge": 32}, "crop_size": 32}}')
    assert Preprocess.from_folder(tmp_path) == preprocess
    (tmp_path / "preprocessor_config.json").write_text('{"size": 32, "crop_size": 32, "resample": 3}')
    assert Preprocess.from_folder(tmp_path) == preprocess
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"longest_edge": 32}}')
    with pytest.raises(BadFile, match="longest_edge"):
        Preprocess.from_folder(tmp_path)
    with pytest.raises(MissingPath, match=r"preprocessor_config\.json"):
        Preprocess.from_folder(tmp_path / "nowhere")
