"""Pins: commits and check-sums written on first use, then held against what the hub and the cache
have.
"""

import json
from pathlib import Path

import pytest
from hub_client import Client
from hub_repositories import everything
from hub_server import HubServer

EXPERT, DIGITS = "tanganke/clip_dtd", "owner/digits"
GATED = "tanganke/clip_mnist"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The hub, and a client on a cache of its own."""
    folder = tmp_path_factory.mktemp("hub")
    with (
        HubServer(everything(folder), gated=[GATED]) as hub,
        Client(hub.environment(folder / "home"), folder / "here") as client,
    ):
        yield hub, client


def held(pins: Path, name: str, commit: str) -> dict[str, str]:
    return json.loads(pins.read_text())["files"][f"{name}@{commit}"]


def rewrite(pins: Path, section: str, key: str, value: object) -> None:
    content = json.loads(pins.read_text())
    content[section][key] = value
    pins.write_text(json.dumps(content))


@pytest.mark.parametrize(("what", "name"), [("fetch", EXPERT), ("data", DIGITS)])
def test_commit_and_check_sums_are_written_once_and_then_only_read(served, tmp_path, what, name):
    hub, client = served
    pins = tmp_path / "pins.json"
    client.ask(what, name, pins)
    commit = hub.commit(name if what == "fetch" else f"datasets/{name}")
    content = json.loads(pins.read_text())
    assert content["models" if what == "fetch" else "datasets"] == {name: commit}
    sums = held(pins, name, commit)
    weights = "model.safetensors" if what == "fetch" else "small/train-0.parquet"
    stored = hub.repositories[name if what == "fetch" else f"datasets/{name}"]["main"].files[
        weights
    ]
    assert sums[weights] == stored.sha256 and all(len(value) in (40, 64) for value in sums.values())
    before = pins.read_bytes()
    assert "Error" not in client.ask(what, name, pins)[0] and pins.read_bytes() == before


@pytest.mark.parametrize(
    ("what", "name", "section"), [("fetch", EXPERT, "models"), ("data", DIGITS, "datasets")]
)
def test_a_wrong_revision_is_one_error_that_names_the_pin(served, tmp_path, what, name, section):
    pins = tmp_path / "pins.json"
    pins.write_text(json.dumps({section: {name: "5" * 40}}))
    said = served[1].ask(what, name, pins)[0]
    assert said.startswith(
        f"BadFile: {pins}: {name} is pinned to {'5' * 40}, a commit that the hub does not have"
    )
    assert "remove this line" in said


@pytest.mark.parametrize(
    ("what", "name", "file"),
    [("fetch", EXPERT, "config.json"), ("data", DIGITS, "large/train-0.parquet")],
)
def test_a_file_that_changed_under_a_pinned_commit_is_noticed(served, tmp_path, what, name, file):
    hub, client = served
    pins = tmp_path / "pins.json"
    client.ask(what, name, pins)
    commit = hub.commit(name if what == "fetch" else f"datasets/{name}")
    rewrite(pins, "files", f"{name}@{commit}", held(pins, name, commit) | {file: "7" * 64})
    said = client.ask(what, name, pins)[0]
    assert (
        said.startswith(f"BadFile: {name}: {file} is not the file that was pinned")
        and "7777" in said
    )


def test_weights_damaged_in_the_cache_are_noticed_before_they_are_used(served, tmp_path):
    pins = tmp_path / "pins.json"
    folder = Path(served[1].ask("fetch", EXPERT, pins)[0])
    weights = (folder / "model.safetensors").resolve()
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for known in (pins, tmp_path / "first use.json"):
        said = served[1].ask("fetch", EXPERT, known)[0]
        assert said.startswith(f"BadFile: {EXPERT}: model.safetensors") and "hf cache rm" in said
    weights.write_bytes(content)
    assert served[1].ask("fetch", EXPERT, pins)[0] == str(folder)


def test_a_gated_model_says_where_its_terms_are_and_how_to_log_in(served, tmp_path):
    said = served[1].ask("fetch", GATED, tmp_path / "pins.json")[0]
    assert (
        said.startswith(f"NotOnHub: {GATED}")
        and f"https://huggingface.co/{GATED}" in said
        and "`hf auth login`" in said
    )


def test_without_a_connection_pinned_names_are_taken_as_they_stand(served, tmp_path):
    hub, client = served
    pins = tmp_path / "pins.json"
    for what, name in (("fetch", EXPERT), ("data", DIGITS)):
        client.ask(what, name, pins)
    home = Path(hub.repositories[EXPERT]["main"].files["config.json"].path).parents[1] / "home"
    with Client({**hub.environment(home), "HF_HUB_OFFLINE": "1"}, tmp_path) as offline:
        assert Path(offline.ask("fetch", EXPERT, pins)[0]).name == hub.commit(EXPERT)
        assert offline.ask("data", DIGITS, pins)[0] == hub.commit(f"datasets/{DIGITS}")
