"""Pixels equal transformers' own, bit-identical; labels and names are right; bad rows are named."""

import json
import shutil
import sys
from base64 import b64encode
from io import BytesIO

import checkpoints
import datasets
import numpy as np
import pytest
import torch
import transformers
from checkpoints import picture

from featcal.data.images import ImageSet, Preprocess, load_images
from featcal.data.places import Location, open_images, quiet_datasets
from featcal.errors import BadData, BadFile, BadSetting, MissingPath
from reproduction.prepare.tasks import TASKS

NAMES = "{features: [{name: label, dtype: {class_label: {names: {'1': dog, '0': cat}}}}]}"
README = f"---\ndataset_info: {NAMES}\n---\n"
PETS = datasets.ClassLabel(names=["cat", "dog"])


@pytest.fixture(scope="module")
def preprocess(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processor")
    checkpoints.processor().save_pretrained(folder)
    return Preprocess.from_folder(folder)


def encoded(image):
    out = BytesIO()
    image.save(out, "TIFF" if image.mode == "F" else "PNG")
    return {"bytes": out.getvalue(), "path": None}


def parquet(folder, split="test", labels=(0, 1, 1), feature=None, without=(), **changed):
    """Write <split>.parquet; `feature` is the type of the labels, `changed` replaces columns."""
    folder.mkdir(exist_ok=True)
    pictures = [encoded(picture(seed=i)) for i in range(len(labels))]
    content = {"image": pictures, "label": list(labels)} | changed
    features = datasets.Features({"image": datasets.Image(), "label": feature}) if feature else None
    kept = {k: v for k, v in content.items() if k not in without}
    with quiet_datasets():
        datasets.Dataset.from_dict(kept, features=features).to_parquet(folder / f"{split}.parquet")
    return folder


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "RGBA", "LA", "CMYK", "I;16"])
@pytest.mark.parametrize("size", [(32, 32), (47, 32), (33, 90), (7, 5), (28, 28)])
def test_pixels_of_every_mode_equal_the_processors(preprocess, mode, size):
    image = picture(mode if mode != "I;16" else "L", size)
    image = image.convert("I;16") if mode == "I;16" else image
    images = ImageSet(preprocess.pixels(image)[None], preprocess)
    want = checkpoints.processor()(image, return_tensors="pt")["pixel_values"]
    assert torch.equal(images.tensor([0]), want)


SMALL = {"size": {"height": 30, "width": 26}}
CROP = {"crop_size": {"height": 24, "width": 24}}
CHANGED = [
    ("CLIP", {"size": {"shortest_edge": 20}, "crop_size": {"height": 31, "width": 24}}),
    ("CLIP", {"size": {"height": 30, "width": 17}, "crop_size": 20}),
    ("CLIP", {"do_center_crop": False, "size": {"height": 8, "width": 9}}),
    ("CLIP", {"do_resize": False}), ("CLIP", {"do_rescale": False}),
    ("CLIP", {"do_normalize": False, "resample": 2}),
    ("CLIP", {"rescale_factor": 1 / 127.5, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}),
    ("ViT", {}), ("ViT", SMALL), ("DeiT", {}), ("DeiT", SMALL | CROP), ("Siglip", SMALL),
    ("Bit", {}), ("Bit", {"size": {"shortest_edge": 20}} | CROP), ("ConvNext", {}),
]  # fmt: skip


@pytest.mark.parametrize("backend", ["pil", "torchvision"])
@pytest.mark.parametrize(("family", "changed"), CHANGED)
def test_pixels_of_every_processor_equal_its_own(tmp_path, family, changed, backend):
    if backend == "torchvision":
        pytest.importorskip("torchvision")
    kind = f"{family}ImageProcessor{'Pil' if backend == 'pil' else ''}"
    processor = getattr(transformers, kind)(**changed)
    processor.save_pretrained(tmp_path)
    ours = Preprocess.from_folder(tmp_path, backend)
    for size in ((250, 230), (33, 90)):
        pixel_values = ours.normalised(ours.pixels(picture(size=size))[None])
        want = processor(picture(size=size), return_tensors="pt")["pixel_values"].float()
        assert torch.equal(pixel_values, want)


PNG = encoded(picture())
CLIP = {"image_processor_type": "CLIPImageProcessor"}
UNUSABLE = [[1], CLIP | {"size": {"height": 3}}, CLIP | {"size": "wide"}, CLIP | {"resample": 99}]
UNUSABLE += [CLIP | {"image_mean": [0.5]}]
UNUSABLE += [{"image_processor_type": f"{name}ImageProcessor"} for name in ("NoSuch", "LlavaNext")]


@pytest.mark.parametrize("content", UNUSABLE)
def test_a_processor_that_cannot_be_used_is_named(tmp_path, content):
    with pytest.raises(MissingPath, match=r"preprocessor_config\.json"):
        Preprocess.from_folder(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    with pytest.raises(BadFile, match=r"preprocessor_config\.json: "):
        Preprocess.from_folder(tmp_path)


def test_a_missing_torchvision_is_reported_with_both_ways_out(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.transforms.v2", None)
    checkpoints.processor().save_pretrained(tmp_path)
    with pytest.raises(BadSetting, match="pip install torchvision; or write processor: pil"):
        Preprocess.from_folder(tmp_path, "torchvision")


def test_parquet_gives_pixels_labels_and_names_now_or_when_asked_for(tmp_path, preprocess):
    images = load_images(parquet(tmp_path, feature=PETS), "test", preprocess)
    assert images.classes == ("cat", "dog")
    assert images.labels.tolist() == [0, 1, 1] and images.labels.dtype == np.int64
    assert images.pixels.shape == (3, 3, 32, 32)
    assert np.array_equal(images.pixels[1], preprocess.pixels(picture(seed=1)))
    on_demand = load_images(tmp_path, "test", preprocess, in_memory=0)
    assert not isinstance(on_demand.pixels, np.ndarray)
    assert torch.equal(images.tensor([2, 0]), on_demand.tensor([2, 0]))
    batches = [batch["pixel_values"] for batch in images.batches([2, 0, 2], 2)]
    assert [len(batch) for batch in batches] == [2, 1]
    assert torch.equal(torch.cat(batches), images.tensor([2, 0, 2]))
    chosen = images.take([2, 0])
    assert chosen.labels.tolist() == [1, 0]
    assert torch.equal(chosen.tensor([0, 1]), images.tensor([2, 0]))


def test_class_names_are_given_or_come_from_labels_or_readme(tmp_path, preprocess, caplog):
    parquet(tmp_path)
    with pytest.raises(BadData, match="classes have no names"):
        load_images(tmp_path, "test", preprocess)
    (tmp_path / "README.md").write_text(README)
    assert load_images(tmp_path, "test", preprocess).classes == ("cat", "dog")
    (tmp_path / "README.md").write_text("---\n: [\n---\n")
    with pytest.raises(BadFile, match=r"README\.md"):
        load_images(tmp_path, "test", preprocess)
    parquet(tmp_path, feature=PETS)
    for names, kept in ((("Katze", "Hund"), ("Katze", "Hund")), (("dog", "cat"), ("cat", "dog"))):
        assert load_images(tmp_path, "test", preprocess, classes=names).classes == kept
    assert "check the order" not in caplog.text
    load_images(tmp_path, "test", preprocess, classes=["dog", "kat"])
    assert "its classes are cat, dog; check the order" in caplog.text
    with pytest.raises(BadData, match="the given classes do not fit its own: cat, dog"):
        load_images(tmp_path, "test", preprocess, classes=["a", "b", "c"])
    parquet(tmp_path, feature=datasets.ClassLabel(names=["1", "2"]))
    assert load_images(tmp_path, "test", preprocess, classes=["1", "2"]).classes == ("1", "2")


def test_columns_are_renamed_and_booleans_are_labels(tmp_path, preprocess):
    columns = {"jpg": [encoded(picture())] * 3, "cls": [False, True, False], "key": [*"abc"]}
    parquet(tmp_path, without=("image", "label"), **columns)
    how = {"classes": ["a", "b"], "columns": TASKS["fer2013"].columns}
    assert load_images(tmp_path, "test", preprocess, **how).labels.tolist() == [0, 1, 0]


def test_folders_of_pictures_have_one_numbering_for_all_splits(tmp_path, preprocess):
    for i, name in enumerate(["train/ant/a.png", "val/2/b.png", "test/bee/c.png", "dev/10/d.png"]):
        (tmp_path / name).parent.mkdir(parents=True)
        picture(seed=i).save(tmp_path / name)
    hidden = ("train/.ipynb_checkpoints/x.png", "test/__MACOSX/x.png", "test/bee/._c.png")
    for other in (*hidden, "train/flat.png", "bee.png"):
        (tmp_path / other).parent.mkdir(exist_ok=True)
        picture().save(tmp_path / other)
    (tmp_path / "test/ant").symlink_to(tmp_path / "train/ant")
    (tmp_path / "test/metadata.csv").write_text("file_name,caption\nbee/c.png,a bee\n")
    shutil.make_archive(tmp_path / "test/backup", "zip", tmp_path / "train")
    images = load_images(tmp_path, "test", preprocess)
    assert images.classes == ("10", "2", "ant", "bee")
    assert images.labels.tolist() == [2, 3]
    assert np.array_equal(images.pixels[1], preprocess.pixels(picture(seed=2)))
    for wrong in ("c.png", "bee/photo/c.png"):  # without a class, and as Tiny ImageNet has them
        (tmp_path / "test" / wrong).parent.mkdir(exist_ok=True)
        picture().save(tmp_path / "test" / wrong)
        with pytest.raises(BadData, match=rf"test: {wrong} is not directly in a class folder"):
            load_images(tmp_path, "test", preprocess)


def test_a_table_next_to_pictures_says_which_are_in_a_split(tmp_path, preprocess):
    for seed, name in enumerate(("a.png", "A::b.png")):
        picture(seed=seed).save(tmp_path / name)
    shutil.make_archive(tmp_path / "all", "zip", tmp_path, "a.png")
    (tmp_path / "link").symlink_to(tmp_path)
    rows = f"A::b.png,dog\nzip://a.png::all.zip, cat\n{tmp_path}/A::b.png,cat\n"
    (tmp_path / "test.csv").write_text(f"image,label\n{rows}")
    images = load_images(tmp_path / "link", "test", preprocess)
    assert (images.classes, images.labels.tolist()) == (("cat", "dog"), [1, 0, 0])
    given = load_images(tmp_path, "test", preprocess, classes=("dog", "ant", "cat"))
    assert (given.labels.tolist(), images.occurring, given.occurring) == ([0, 2, 2], True, False)
    assert np.array_equal(images.pixels, [preprocess.pixels(picture(seed=s)) for s in (1, 0, 1)])
    assert Location(tmp_path).has_splits
    with pytest.raises(MissingPath, match="train"):
        open_images(Location(tmp_path), "train", False)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"without": ("image",), "other": [1, 2, 3]}, "no column 'image'; it has label, other"),
        ({"labels": (0, 2**40, 1)}, "row 1: its label 1099511627776 is none of the classes a, b"),
        ({"labels": (0, -1, 1)}, "row 1: its label -1 is none"),
        ({"labels": (0.0, None, 1.0)}, r"row 1: has no label[\s\S]*in every row"),
        ({"labels": ("a", "b", "c")}, r"row 2: its label 'c' is none[\s\S]*with --classes"),
        ({"labels": ()}, "it holds no sample"),
        ({"image": [b64encode(PNG["bytes"] * 99).decode()] * 2}, "row 0 cannot.*path of no file"),
        ({"image": [PNG, {"bytes": PNG["bytes"][:200], "path": None}]}, "row 1 cannot be decoded"),
        ({"image": [PNG, {"bytes": None, "path": "../x.png"}]}, r"row 1 .*'\.\./x\.png' is out"),
        ({"image": [PNG, {"bytes": None, "path": "/etc/passwd"}]}, "row 1 .*'/etc/passwd' is out"),
        ({"image": [PNG, {"bytes": None, "path": "https://a.b/x"}]}, "row 1 .*'https:.* is out"),
        ({"image": [PNG, {"bytes": None, "path": "zip://a::b://c::d"}]}, "row 1 .*'zip:.* is out"),
        ({"image": [PNG, {"bytes": None, "path": "zip://a::test.parquet"}]}, "zip://a.* not a zip"),
        ({"image": [[0, 9], [255, 0]]}, "column image holds no pictures .each is a flat list"),
        ({"image": [PNG, {"bytes": None, "path": "x.png"}]}, r"row 1 cannot be decoded .*x\.png"),
        ({"image": [PNG, None]}, "row 1 cannot be decoded"),
        ({"image": [PNG, encoded(picture("L").convert("I;16").point(lambda x: 9 * x))]}, "8 bits"),
        ({"image": [PNG, encoded(picture("F").point(lambda x: x / 255 + 0))]}, "8 bits"),
        ({"image": [PNG, encoded(picture(size=(10, 99)))]}, r"1 is \(316, 32\) .* 0 is \(32, 40"),
    ],
)
def test_what_cannot_be_read_is_named_by_its_column_or_row(tmp_path, how, said):
    labels = how.get("labels", (0, 1) if "image" in how else (0, 1, 1))
    parquet(tmp_path, **how | {"labels": labels})
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, do_center_crop=False)
    with pytest.raises(BadData, match=said) as raised:
        load_images(tmp_path, "test", Preprocess(processor), classes=["a", "b"])
    assert len(str(raised.value)) < 600


def test_a_batch_made_on_another_device_holds_the_same_values(preprocess, monkeypatch):
    pixels = np.stack([preprocess.pixels(picture(seed=seed)) for seed in range(3)])
    here = preprocess.normalised(pixels)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_, **__: self)
    assert torch.equal(preprocess.normalised(pixels, torch.device("meta")), here)
