"""Pictures resized by torchvision: as transformers' processors on torchvision do, close to PIL's,
clear where it is missing.
"""

import json
import sys

import numpy as np
import pytest
import torch
import transformers
from checkpoints import picture
from PIL import Image
from smoke_graph import lay_out, working_in
from test_data import PETS, parquet

from featcal.data.images import ImageSet, Preprocess, looked_up
from featcal.errors import BadSetting
from reproduction.data.decoded import Split, mapped_images
from reproduction.stages.run import run_stage
from reproduction.suites.load_task import load_task
from reproduction.suites.sources import SOURCES, Source, read_sources, write_sources

SIZES = ((28, 28), (32, 32), (48, 48), (96, 64), (225, 500), (640, 481))


@pytest.fixture
def folder(tmp_path):
    """A processor's folder whose file is CLIP's own."""
    transformers.CLIPImageProcessorPil().save_pretrained(tmp_path / "processor")
    return tmp_path / "processor"


@pytest.mark.parametrize("crop", [{}, {"crop_size": {"height": 251, "width": 230}}])
@pytest.mark.parametrize("size", SIZES)
def test_the_result_is_that_of_transformers_processor_on_torchvision(folder, size, crop):
    pytest.importorskip("torchvision")
    from transformers.models.clip.image_processing_clip import CLIPImageProcessor

    theirs = CLIPImageProcessor(**crop)
    theirs.save_pretrained(folder)
    ours = Preprocess.from_folder(folder, "torchvision")
    got = ours.normalised(ours.pixels(picture(size=size))[None])
    # they normalise in one step instead of two, which moves the last bit
    torch.testing.assert_close(
        got, theirs(picture(size=size), return_tensors="pt")["pixel_values"], rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("size", [(28, 28), (32, 32), (48, 48), (96, 96)])
def test_noise_enlarged_by_both_differs_by_at_most_two_grey_levels_in_a_few_values(folder, size):
    """Noise has more edges than any picture. Measured: 0.1 to 1.1 percent of the values, by one or
    two levels.
    """
    pytest.importorskip("torchvision")
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))
    by_pil, by_tensor = (
        Preprocess.from_folder(folder, name).pixels(noise).astype(int)
        for name in ("pil", "torchvision")
    )
    apart = np.abs(by_pil - by_tensor)
    assert 0 < apart.max() <= 2 and (apart > 0).mean() < 0.02


def test_each_processor_has_decoded_pictures_of_its_own(folder, tmp_path):
    pytest.importorskip("torchvision")
    source = parquet(tmp_path / "pets", feature=PETS)
    for name in ("pil", "torchvision"):
        mapped_images(
            tmp_path / "decoded",
            Split(source, "test", Preprocess.from_folder(folder, name), whole=True),
        )
    assert len(list((tmp_path / "decoded").iterdir())) == 2


def without_torchvision(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.transforms.v2", None)


def test_a_missing_torchvision_is_told_with_both_ways_out(folder, monkeypatch):
    without_torchvision(monkeypatch)
    ours = Preprocess.from_folder(folder, "torchvision")
    with pytest.raises(BadSetting, match="pip install torchvision; or write processor: pil"):
        ours.pixels(picture())
    assert Preprocess.from_folder(folder).pixels(picture()).shape == (3, 224, 224)


def test_the_stage_that_names_the_data_notices_it_before_anything_else(tmp_path, monkeypatch):
    without_torchvision(monkeypatch)
    lay_out(tmp_path)
    file = tmp_path / "suites/smoke.yaml"
    file.write_text(
        file.read_text().replace(
            "source: mini", "source: files\n  folder: data\n  processor: torchvision", 1
        )
    )
    with working_in(tmp_path), pytest.raises(BadSetting, match="pip install torchvision"):
        run_stage("prepare_data", None)
    file.write_text(file.read_text().replace("source: files\n  folder: data", "source: mini", 1))
    with working_in(tmp_path), pytest.raises(BadSetting, match="must be left out"):
        run_stage("prepare_data", None)


def test_a_filter_that_torchvision_lacks_is_refused():
    pytest.importorskip("torchvision")
    boxes = Preprocess(
        None,
        (8, 8),
        None,
        int(Image.Resampling.BOX),
        1 / 255,
        (0.0,) * 3,
        (1.0,) * 3,
        "torchvision",
    )
    with pytest.raises(BadSetting, match="bilinear, bicubic only"):
        boxes.pixels(picture())


def test_the_suites_processor_reaches_the_pictures_and_the_usual_one_leaves_no_trace(
    folder, tmp_path
):
    source = Source(
        location="pets",
        kind="folder",
        paper_name="Pets",
        description="",
        classes=("a", "b"),
        templates=("{}",),
        splits={"test": "test"},
    )
    (tmp_path / "data").mkdir()
    parquet(tmp_path / "data/pets", feature=PETS)
    for processor in ("pil", "torchvision"):
        write_sources(
            tmp_path / "data", {"pets": Source(**{**vars(source), "processor": processor})}
        )
        written = json.loads((tmp_path / "data" / SOURCES).read_text())["pets"]
        assert ("processor" in written) == (processor != "pil") and read_sources(tmp_path / "data")[
            "pets"
        ].processor == processor
    pytest.importorskip("torchvision")
    assert (
        load_task(tmp_path / "data", "pets", "test", folder).preprocess.processor == "torchvision"
    )


def test_a_batch_made_elsewhere_holds_the_same_values_to_the_bit(folder):
    preprocess = Preprocess.from_folder(folder)
    pixels = np.stack([preprocess.pixels(picture(seed=seed)) for seed in range(3)])
    here = ImageSet(pixels, preprocess, np.zeros(3, np.int64), ("a",)).tensor([2, 0])
    values = [
        preprocess.normalised(np.full((1, 3, 1, 1), level, np.uint8))[0, :, 0, 0]
        for level in range(256)
    ]
    assert torch.equal(
        looked_up(torch.from_numpy(pixels[[2, 0]]), torch.stack(values, dim=1)), here
    )
