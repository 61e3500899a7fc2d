"""A part of `make rehearsal`: the suite `paper` on a hub of our own, with its failures."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from hub_client import Client
from hub_server import TOKEN, HubServer
from rehearsal_images import clip_model, expert_folder
from rehearsal_rows import ENGLISH, gated, paper_hub, punkt_tab
from rehearsal_run import copied, rehearsal_params
from rehearsal_texts import t5_head
from safetensors.torch import load_file
from tiny import same_bits

from featcal.cli import main as cli
from featcal.models.load import load_model, load_vision
from pipeline import read_rows, write_settings
from reproduction.experiments import MAIN
from reproduction.language.harness import ANTLR, antlr_version
from reproduction.prepare.tasks import POOLS, TASKS
from reproduction.results import SCORES

LANGUAGE = ["flan_t5_large-glue", "llama_3b-mergebench"]
ONE = ["clip_b32-8"]
EXPERIMENTS = dict(
    merge=[*ONE, *LANGUAGE], calibrate=[*ONE, *LANGUAGE], adapt=LANGUAGE, multitask=ONE
)
MERGER = "task_arithmetic"
ROLES = ("clip_b32", "flan_t5_large", "llama_3b")
# One loads a metric from the hub and runs programs, one needs nltk's data, and one the antlr4 that
# stands apart.
SCORED = ("humaneval_plus", "ifeval", *(["math500"] if antlr_version().startswith(ANTLR) else []))
BASE = "openai/clip-vit-base-patch32"


def short_project(folder: Path) -> Path:
    """A copy of the project whose params.yaml and suite hold a few of the paper's experiments."""
    folder.mkdir()
    copied(folder)
    params = rehearsal_params()
    for section, entries in params.items():
        if isinstance(entries, dict) and section not in MAIN:
            params[section] = {key: entries[key] for key in EXPERIMENTS.get(section, ())}
    params["merge"]["clip_b32-8"] = {MERGER: params["merge"]["clip_b32-8"][MERGER]}
    params["mergers"] = sorted({name for mergers in params["merge"].values() for name in mergers})
    params["calibrate"]["clip_b32-8"]["from"] = {MERGER: {}}
    for key in LANGUAGE:
        params["adapt"][key] = {**params["adapt"][key], "paper": None}
    write_settings(folder, params)
    suite = yaml.safe_load((folder / "suites/paper.yaml").read_text())
    for part in (suite, suite["language"]):
        part["roles"] = {name: role for name, role in part["roles"].items() if name in ROLES}
    suite |= {"pools": {8: suite["pools"][8]}, "sentences": None, "photos": None}
    suite["language"]["tests"] = {key: key for key in SCORED}
    (folder / "suites/paper.yaml").write_text(yaml.safe_dump(suite, sort_keys=False))
    (folder / "suites/paper.pins.json").unlink(missing_ok=True)
    return folder


@dataclass
class Rehearsal:
    """The hub, the project, and a process that runs stages in it."""

    hub: HubServer
    project: Path
    client: Client

    def done(self, *arguments: str) -> None:
        code, complaint = self.client.ask("featcal", "stage", *arguments)
        assert code == 0, complaint

    def refused(self, *arguments: str) -> str:
        """Return the one message of a stage that must stop and leave outputs and results alone."""
        before = self.files()
        code, complaint = self.client.ask("featcal", "stage", *arguments)
        assert code == cli.MISTAKE and complaint.count("featcal:") == 1, complaint
        assert "Traceback" not in complaint and self.files() == before
        return complaint

    def files(self) -> set[Path]:
        folders = (self.project / part for part in ("outputs", "results"))
        return {path for folder in folders for path in folder.rglob("*")}

    def scores(self, key: str) -> list[dict]:
        return read_rows(self.project / f"outputs/paper/scores/{key}/scores.csv", SCORES)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """Serve one size of each family, without a login, for a project in which nothing has run."""
    folder = tmp_path_factory.mktemp("rehearsal")
    project = short_project(folder / "project")
    sizes = ("base-patch32",), ("large",), ("Llama-3.2-3B-Instruct",)
    repositories = paper_hub(folder / "hub", POOLS[8], *sizes)
    with HubServer(repositories, gated(repositories)) as hub:
        environment = hub.environment(folder / "home") | punkt_tab(folder / "nltk_data")
        environment |= {"HF_ALLOW_CODE_EVAL": "1", "OMP_NUM_THREADS": "1"}
        with Client(environment, project) as client:
            yield Rehearsal(hub, project, client)


def test_images_go_on_after_a_broken_download_and_all_models_are_scored(rehearsal):
    hub, project, key = rehearsal.hub, rehearsal.project, ONE[0]
    rehearsal.done("prepare_data")
    hub.cuts["model.safetensors"] = 1000
    complaint = rehearsal.refused("prepare", key)
    for part in (f"{BASE}@", "downloading it failed", "run again"):
        assert part in complaint
    del hub.cuts["model.safetensors"]
    for verb in ("prepare", "merge", "multitask", "calibrate", "evaluate"):
        rehearsal.done(verb, key)
    assert any(f"{BASE}/resolve" in r and r.endswith("bytes=1000-") for r in hub.seen)
    name = f"tanganke/{BASE.partition('/')[2]}_dtd"
    served = load_vision(expert_folder(project / "served", name, clip_model(BASE)))
    assert same_bits(load_vision(project / f"outputs/paper/prepared/{key}/experts/dtd"), served)
    rows = rehearsal.scores(key)
    assert {row["method"] for row in rows} == {"base", "expert", "multitask", "merged", "featcal"}
    assert {(row["task"], row["count"]) for row in rows} == {(task, 12) for task in POOLS[8]}
    pins = json.loads((project / "suites/paper.pins.json").read_text())
    assert set(pins["datasets"]) == {TASKS[task].hub_id for task in POOLS[8]}
    assert pins["models"][BASE] == hub.commit(BASE, "refs/pr/21")


def test_language_models_with_adapters_in_shards_and_behind_terms_are_scored(rehearsal):
    rehearsal.done("prepare_texts")
    complaint = rehearsal.refused("prepare", "llama_3b-mergebench")
    assert "meta-llama/Llama-3.2-3B-Instruct" in complaint and "hf auth login" in complaint
    (rehearsal.project.parent / "home").mkdir(exist_ok=True)
    (rehearsal.project.parent / "home/token").write_text(TOKEN)  # what `hf auth login` does
    for key in LANGUAGE:
        for verb in ("prepare", "merge", "calibrate", "adapt", "evaluate"):
            rehearsal.done(verb, key)
        rows = rehearsal.scores(key)
        assert {row["method"] for row in rows} == {"base", "expert", "merged", "featcal", "anchor"}
    assert {row["task"] for row in rows} == set(SCORED)
    assert not any(".bin" in request or ".pth" in request for request in rehearsal.hub.seen)
    files = (rehearsal.project.parent / "nltk_data").rglob("*")
    assert {file.name for file in files if file.is_file()} == set(ENGLISH)  # nothing was fetched
    base = rehearsal.project / "outputs/paper/prepared/flan_t5_large-glue/base"
    head = load_model(base).lm_head.weight
    assert torch.equal(head, t5_head("flan-t5-large", head))
    assert "lm_head.weight" in load_file(base / "model.safetensors")
