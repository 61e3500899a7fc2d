"""A short dress rehearsal of the suite `paper`, by the command line and the real clients, and what
goes wrong on the way there.

One role and pool of each kind with one experiment, on the hub of tests/rehearsal_hub.py; `make
rehearsal` runs all of it.
"""

import json
from pathlib import Path

import pytest
import torch
import yaml
from hub_client import Client
from hub_server import TOKEN, HubServer
from rehearsal_hub import gated, paper_hub
from rehearsal_images import clip_model, expert_folder
from rehearsal_punkt import ENGLISH, punkt_tab
from rehearsal_run import copied, rehearsal_params
from rehearsal_texts import t5_head
from safetensors.torch import load_file

from featcal.cli import main as cli
from featcal.models.load import load_model, load_vision
from pipeline import read_rows, write_settings
from reproduction.experiments import MAIN
from reproduction.language.tests import ANTLR, antlr_version
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
DTD = "datasets/tanganke/dtd"


def short_project(folder: Path) -> Path:
    """A copy of the project whose params.yaml and suite hold a few of the paper's experiments."""
    folder.mkdir()
    copied(folder)
    params = rehearsal_params()
    for section, entries in params.items():
        if isinstance(entries, dict) and section not in MAIN:
            params[section] = {key: entries[key] for key in EXPERIMENTS.get(section, ())}
    params["merge"]["clip_b32-8"] = {MERGER: params["merge"]["clip_b32-8"][MERGER]}
    params["mergers"] = sorted({name for own in params["merge"].values() for name in own})
    params["calibrate"]["clip_b32-8"]["from"] = {MERGER: {}}
    for key in LANGUAGE:
        params["adapt"][key] = {**params["adapt"][key], "paper": None}
    write_settings(folder, params)
    suite = yaml.safe_load((folder / "suites/paper.yaml").read_text())
    for part in (suite, suite["language"]):
        part["roles"] = {name: role for name, role in part["roles"].items() if name in ROLES}
    suite |= {"pools": {8: suite["pools"][8]}, "sentences": None}
    suite["language"]["tests"] = {key: key for key in SCORED}
    (folder / "suites/paper.yaml").write_text(yaml.safe_dump(suite, sort_keys=False))
    (folder / "suites/paper.pins.json").unlink(missing_ok=True)
    return folder


class Rehearsal:
    """The hub, the project, and a process that runs stages in it."""

    def __init__(self, hub: HubServer, project: Path, client: Client):
        self.hub, self.project, self.client = hub, project, client

    def stage(self, *words: str) -> tuple[int, str]:
        return self.client.ask("featcal", "stage", *words)

    def done(self, *words: str) -> None:
        code, complaint = self.stage(*words)
        assert code == 0, complaint

    def refused(self, *words: str) -> str:
        """Return the one message of a stage that must stop and leave outputs and results alone."""
        before = self.files()
        code, complaint = self.stage(*words)
        assert code == cli.MISTAKE and complaint.count("featcal:") == 1, complaint
        assert "Traceback" not in complaint
        assert self.files() == before
        return complaint

    def files(self) -> set[str]:
        return {
            str(path)
            for part in ("outputs", "results")
            for path in (self.project / part).rglob("*")
        }


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """A hub with one size of each family, on which nobody is logged in yet, and a project that
    nothing was run in.
    """
    folder = tmp_path_factory.mktemp("rehearsal")
    project = short_project(folder / "project")
    repositories = paper_hub(
        folder / "hub", POOLS[8], ("base-patch32",), ("large",), ("Llama-3.2-3B-Instruct",)
    )
    with HubServer(repositories, gated(repositories)) as hub:
        environment = hub.environment(folder / "home") | dict(
            HF_ALLOW_CODE_EVAL="1", OMP_NUM_THREADS="1"
        )
        environment |= punkt_tab(folder / "nltk_data")
        with Client(environment, project) as client:
            yield Rehearsal(hub, project, client)


@pytest.fixture(scope="module")
def images(rehearsal):
    """The image half of it, its first download broken off."""
    rehearsal.done("prepare_data")
    rehearsal.hub.cuts["model.safetensors"] = 1000
    complaint = rehearsal.refused("prepare", "clip_b32-8")
    assert (
        f"{BASE}@" in complaint
        and "downloading it failed" in complaint
        and "run again" in complaint
    )
    del rehearsal.hub.cuts["model.safetensors"]
    rehearsal.done("prepare", "clip_b32-8")
    for verb in ("merge", "multitask", "calibrate", "evaluate"):
        rehearsal.done(verb, "clip_b32-8")
    return rehearsal


def test_a_download_that_broke_off_went_on_where_it_was(images):
    assert any(
        f"{BASE}/resolve" in request and request.endswith("bytes=1000-")
        for request in images.hub.seen
    )


def test_image_models_are_the_ones_served_and_all_of_them_are_scored(images):
    prepared = images.project / "outputs/paper/prepared/clip_b32-8"
    name = f"tanganke/{BASE.partition('/')[2]}_dtd"
    served = load_vision(
        expert_folder(images.project / "served", name, clip_model(BASE))
    ).state_dict()
    assert all(
        torch.equal(tensor, served[key])
        for key, tensor in load_vision(prepared / "experts/dtd").state_dict().items()
    )
    rows = read_rows(images.project / "outputs/paper/scores/clip_b32-8/scores.csv", SCORES)
    assert {row["method"] for row in rows} == {"base", "expert", "multitask", "merged", "featcal"}
    assert {row["task"] for row in rows} == set(POOLS[8]) and all(
        row["count"] == 12 for row in rows
    )
    pins = json.loads((images.project / "suites/paper.pins.json").read_text())
    assert set(pins["datasets"]) == {TASKS[task].hub_id for task in POOLS[8]}
    assert pins["models"][BASE] == images.hub.commit(BASE, "refs/pr/21")


def test_language_models_with_adapters_in_shards_and_behind_terms_are_scored(rehearsal):
    rehearsal.done("prepare_texts")
    complaint = rehearsal.refused("prepare", "llama_3b-mergebench")
    assert "meta-llama/Llama-3.2-3B-Instruct" in complaint and "hf auth login" in complaint
    (rehearsal.project.parent / "home").mkdir(exist_ok=True)
    (rehearsal.project.parent / "home/token").write_text(TOKEN)  # what `hf auth login` does
    for key in LANGUAGE:
        for verb in ("prepare", "merge", "calibrate", "adapt", "evaluate"):
            rehearsal.done(verb, key)
        rows = read_rows(rehearsal.project / f"outputs/paper/scores/{key}/scores.csv", SCORES)
        assert {row["method"] for row in rows} == {"base", "expert", "merged", "featcal", "anchor"}
    assert {row["task"] for row in rows} == set(SCORED) and not any(
        ".bin" in r or ".pth" in r for r in rehearsal.hub.seen
    )
    nltk_data = rehearsal.project.parent / "nltk_data"
    assert {file.name for file in nltk_data.rglob("*") if file.is_file()} == set(ENGLISH), (
        "nothing was fetched"
    )
    base = rehearsal.project / "outputs/paper/prepared/flan_t5_large-glue/base"
    head = load_model(base).lm_head.weight
    assert torch.equal(head, t5_head("flan-t5-large", head)) and "lm_head.weight" in load_file(
        base / "model.safetensors"
    )
