"""`featcal doctor` on a served hub, offline and outside of a project, with its exit codes."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import checkpoints
import huggingface_hub
import pytest
import yaml
from hub_client import Client
from hub_repositories import digits
from hub_server import HubServer

import reproduction.doctor as doctor_suite
from featcal.cli import main as cli
from reproduction.doctor import Repository, look
from reproduction.engine.context import Context
from reproduction.experiments import MORE, load_experiments
from reproduction.prepare.suite import load_suite

ROOT = Path(__file__).parents[2]
BASE, EXPERT = "openai/clip-vit-base-patch32", "tanganke/clip-vit-base-patch32"


@pytest.fixture
def project(tmp_path):
    """A project whose suite `paper` has one role and two tasks."""
    folder = tmp_path / "project"
    shutil.copytree(ROOT / "suites", folder / "suites")
    (folder / "pipeline").mkdir()
    for name in ("params.yaml", "pipeline/pages.yaml", *MORE):
        shutil.copyfile(ROOT / name, folder / name)
    file = folder / "suites/paper.yaml"
    suite = yaml.safe_load(file.read_text())
    suite |= {"pools": {8: ["mnist", "dtd"]}, "roles": {"clip_b32": suite["roles"]["clip_b32"]}}
    suite |= {"language": None, "sentences": None, "photos": None}
    file.write_text(yaml.safe_dump(suite))
    return folder


def context_of(folder: Path) -> Context:
    experiments = load_experiments(folder / "params.yaml", "paper")
    return Context(folder, experiments, load_suite(folder, "paper"))


def test_every_state_of_a_repository_is_told_and_what_is_missing_ends_it_with_2(project, tmp_path):
    checkpoints.clip_folder(tmp_path / "clip")
    for task in ("mnist", "dtd"):
        checkpoints.vision_folder(tmp_path / task, 1)
    served = {f"{EXPERT}_{task}": tmp_path / task for task in ("mnist", "dtd")}
    served |= {BASE: tmp_path / "clip"}
    served["datasets/ylecun/mnist"] = digits(tmp_path / "digits")["main"]
    with (
        HubServer(served, gated=[f"{EXPERT}_dtd"]) as hub,
        Client(hub.environment(tmp_path / "home"), project) as client,
    ):
        printed, _ = client.ask("printed", "doctor", "--suite", "paper", "--json")
    assert not any("resolve" in request for request in hub.seen if request.startswith("GET"))
    code, _, content = printed.partition(" ")
    assert code == "2", printed
    report = json.loads(content)
    states = {repository["name"]: repository["state"] for repository in report["repositories"]}
    assert states == {
        BASE: "reachable", f"{EXPERT}_mnist": "reachable", f"{EXPERT}_dtd": "gated", "ylecun/mnist": "reachable",
        "tanganke/dtd": "missing",
    }  # fmt: skip
    weights = (tmp_path / "mnist/model.safetensors").stat().st_size
    sizes = {repository["name"]: repository["bytes"] for repository in report["repositories"]}
    assert weights < sizes[f"{EXPERT}_mnist"] < 2 * weights
    assert sizes["ylecun/mnist"] > 0 and sizes["tanganke/dtd"] is None
    lines = "\n".join(report["missing"])
    assert "hf auth login" in lines and "missing (RepositoryNotFoundError): tanganke/dtd" in lines
    assert report["memory"]["clip_b32"] > 0 and report["suite"] == "paper"


def test_models_not_in_the_cache_gpu_memory_and_disk_are_missing(project, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    commit = "1" * 40
    checkpoints.clip_folder(tmp_path / "hub/models--a--b/snapshots" / commit)
    cached, other = (Repository(name, "model", "clip_b32", 7) for name in ("a/b", "a/c"))
    assert [look(cached, commit).state, look(other, commit).state] == ["cached", "offline"]
    moved = look(cached, "2" * 40)
    assert moved.state == "offline" and moved.bytes == 7
    monkeypatch.setattr(doctor_suite, "gpu_bytes", lambda: 80 << 30)
    disk = SimpleNamespace(free=1 << 40)
    monkeypatch.setattr(doctor_suite.shutil, "disk_usage", lambda folder: disk)
    (line,) = doctor_suite.checkup(context_of(project)).missing
    assert line.startswith("offline (it is not in the cache, and HF_HUB_OFFLINE=1)")
    monkeypatch.setattr(doctor_suite, "gpu_bytes", lambda: 1 << 20)
    disk.free = 1000
    missing = doctor_suite.checkup(context_of(project)).missing
    assert any("of GPU memory for clip_b32" in line for line in missing)
    assert any("where 1000 B are free" in line for line in missing)


def test_what_public_tests_lack_is_reported(monkeypatch):
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    lines = doctor_suite.tests_lack(load_suite(ROOT, "paper"))
    for key in ("humaneval_plus", "mbpp_plus"):
        (line,) = (text for text in lines if text.startswith(f"{key}: runs generated programs"))
        assert "HF_ALLOW_CODE_EVAL=1" in line


def test_the_suite_made_here_lacks_nothing_and_an_unknown_suite_is_named(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert cli.main(["doctor", "--suite", "mini"]) == 0
    assert "nothing is missing for the suite mini" in capsys.readouterr().out
    assert cli.main(["doctor", "--suite", "papers"]) == 2
    assert "paper" in capsys.readouterr().err
