"""Hub checkpoints from a local cache laid out as the hub's own, without any connection."""

import json
import shutil
from types import SimpleNamespace

import checkpoints
import huggingface_hub
import pytest
import torch

import featcal
from featcal.errors import BadFile, BadSetting, HubUnreachable
from featcal.models.load import load_clip, load_vision
from reproduction.prepare import hub

CLIP, EXPERT = "openai/clip-vit-base-patch32", "tanganke/clip-vit-base-patch32_mnist"
COMMITS = {CLIP: "1" * 40, EXPERT: "2" * 40}


def stored(cache, name, commit, make, kind="model"):
    """A snapshot of one repository: models--org--name/snapshots/<commit>/ and refs/main."""
    repository = cache / f"{kind}s--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    make(repository / "snapshots" / commit)
    return repository


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The real client, offline, on a cache of our own."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    stored(folder, CLIP, COMMITS[CLIP], lambda path: checkpoints.clip_folder(path))
    stored(folder, EXPERT, COMMITS[EXPERT], lambda path: checkpoints.legacy_folder(path, seed=1))
    return folder


def test_names_are_resolved_once_pinned_and_fetched_from_the_cache(cache, tmp_path):
    pins = tmp_path / "pins.json"
    folder = hub.fetch(EXPERT, pins)
    assert folder.name == COMMITS[EXPERT] and json.loads(pins.read_text())["models"] == {
        EXPERT: COMMITS[EXPERT]
    }
    before = pins.read_bytes()
    (cache / "models--tanganke--clip-vit-base-patch32_mnist" / "refs" / "main").write_text("3" * 40)
    assert hub.fetch(EXPERT, pins) == folder and pins.read_bytes() == before


def test_a_name_that_is_not_cached_is_one_error_naming_it_and_a_way_out(cache, tmp_path):
    with pytest.raises(HubUnreachable, match=r"tanganke/none[\s\S]*HF_HOME[\s\S]*HF_HUB_OFFLINE"):
        hub.fetch("tanganke/none", tmp_path / "pins.json")
    assert not (tmp_path / "pins.json").exists()


@pytest.mark.parametrize(
    "pins", [json.dumps({"models": {EXPERT: "main"}}), "{", "[]", '{"models": []}']
)
def test_a_pins_file_that_pins_nothing_firm_is_refused(cache, tmp_path, pins):
    (tmp_path / "pins.json").write_text(pins)
    with pytest.raises(BadFile, match=r"pins\.json"):
        hub.fetch(EXPERT, tmp_path / "pins.json")


class Hub:
    """The part of the hub's interface used to resolve names: one repository of pickles and the
    converter's pull request.
    """

    def __init__(self, requests):
        self.requests = requests

    def repo_info(self, name, repo_type="model", revision="main"):
        file, commit = (
            ("pytorch_model.bin", "a" * 40)
            if revision == "main"
            else ("model.safetensors", "b" * 40)
        )
        return SimpleNamespace(sha=commit, siblings=[SimpleNamespace(rfilename=file)])

    def get_repo_discussions(self, name, author, discussion_type):
        assert (author, discussion_type) == ("SFconvertbot", "pull_request")
        return iter(self.requests)


def test_a_repository_of_pickles_is_pinned_to_the_hubs_own_conversion(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: Hub([SimpleNamespace(num=7)]))
    assert hub.pinned(tmp_path / "pins.json", CLIP) == "b" * 40
    assert hub.pinned(tmp_path / "pins.json", "tanganke/dtd", "dataset") == "a" * 40


def test_a_repository_without_any_safetensors_is_refused_when_it_is_pinned(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: Hub([]))
    with pytest.raises(BadFile, match="no safetensors"):
        hub.pinned(tmp_path / "pins.json", CLIP)


def test_no_pickle_is_ever_asked_for(monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **options: asked.update(options) or tmp_path,
    )
    hub.download(CLIP, "a" * 40)
    assert not any(
        pattern.endswith(kind)
        for pattern in asked["allow_patterns"]
        for kind in ("bin", "pt", "h5", "msgpack", "*")
    )
    shutil.rmtree(tmp_path)
