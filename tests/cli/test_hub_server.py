"""Data sets and models of the hub by name: real clients in processes, on a hub that tests serve."""

import functools
import json
import shutil
from pathlib import Path

import checkpoints
import language
import pytest
from hub_client import Client
from hub_repositories import everything
from hub_server import TOKEN, Commit, HubServer
from huggingface_hub import HfApi, RepoUrl
from test_cli import tree

from featcal.cli import main as cli
from featcal.models.load import load_vision


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    checkpoints.clip_folder(folder / "base")
    checkpoints.vision_folder(folder / "expert", 1)
    checkpoints.vision_folder(folder / "merged", 2)
    for seed, name in enumerate(("base", "expert", "merged")):
        language.folder(folder / f"llama-{name}", "llama", seed)
    for file in ("source.spm", "bpe.codes"):  # of the tokenizers of Marian and XLM
        (folder / "llama-base" / file).write_text(file)
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    with HubServer(everything(folder), gated=["datasets/bad/gated"]) as hub:
        hub.folder = folder
        with Client(environment(hub), folder / "here") as client:
            yield hub, client


def environment(hub: HubServer) -> dict[str, str]:
    return {**hub.environment(hub.folder / "home"), "HF_HUB_CACHE": str(hub.folder / "downloaded")}


def command(place: Path, data: str, out: Path, kind: str = "") -> list[str]:
    base, merged, expert = (str(place / f"{kind}{name}") for name in ("base", "merged", "expert"))
    models = ["--base", base, "--merged", merged, "--expert", f"mnist={expert}"]
    few = "--samples 6 --batch 3 --preset paper".split()
    return ["calibrate", *models, "--data", f"mnist={data}", *few, "--out", str(out)]


def complaint_of(client: Client, arguments: list[str]) -> str:
    code, complaint = client.ask("featcal", *arguments)
    assert code == cli.MISTAKE and complaint.count("featcal:") == 1, complaint
    out = Path(arguments[arguments.index("--out") + 1])
    assert "Traceback" not in complaint and not out.exists()
    return complaint


LOCAL = {
    "owner/digits": "digits/main/small",
    "owner/digits:large": "digits/main/large",
    "owner/digits@v1": "digits/v1",
    "owner/ShortTexts": "texts",
    "owner/photos": "photos",
    "owner/shadowed@main": "photos",  # there is a folder owner/shadowed where the client runs
}


@pytest.fixture(scope="module")
def calibrated(served, place, tmp_path_factory):
    hub, _ = served

    @functools.cache
    def here(name: str) -> dict[str, bytes]:
        out = tmp_path_factory.mktemp("here") / "new"
        assert cli.main(command(place, str(hub.folder / LOCAL[name]), out, kind(name))) == 0
        return tree(out)

    def compare(client: Client, name: str, given: str = "") -> None:
        out = tmp_path_factory.mktemp("there") / "new"
        code, said = client.ask("featcal", *command(place, given or name, out, kind(name)))
        assert code == 0, said
        there, local = tree(out), dict(here(name))
        card = there.pop("README.md").decode()  # names the data set; a folder here has no name
        assert f"- {name.split('@')[0].split(':')[0]}\n" in card
        assert "datasets:" not in local.pop("README.md").decode() and there == local

    return compare


def kind(name: str) -> str:
    return "llama-" if "Texts" in name else ""


EVERYWHERE = """
merge average --base owner/base --expert a=owner/expert@main --out OUT/merged
calibrate --merged owner/merged --data a=owner/texts --preset paper --samples 6 --out OUT/new
fix owner/merged --data a=owner/texts --out OUT/fixed
compare --model m=owner/merged --model e=owner/expert --data a=owner/texts --samples 4
evaluate --model owner/clip --data pets=owner/digits@v1 --template {}
evaluate --model owner/merged --data texts=owner/texts --classes texts=red,blue
inspect owner/merged --plan
plan --merged owner/planned --base owner/base --expert a=owner/expert --set tokens=8
""".strip().splitlines()


def ask_everywhere(client: Client, out: Path) -> dict[str, bytes]:
    for words in EVERYWHERE:
        code, said = client.ask("featcal", *words.replace("OUT", str(out)).split())
        assert code == 0, f"{words}: {said}"
    return tree(out)


@pytest.fixture(scope="module")
def gone(served, place):
    hub, client = served
    for name in LOCAL:
        assert client.ask("open", name, "train")[0] == "opened"
    recorded = {"base": "owner/base@main", "experts": {"a": "owner/expert@main"}}
    (place / "llama-merged/featcal.json").write_text(json.dumps(recorded))
    folders = {name: place / f"llama-{name}" for name in ("base", "expert", "merged")}
    folders |= {"clip": place / "base", "texts": hub.folder / "longer"}
    folders["planned"] = folders["merged"]
    folders["texts"].mkdir()
    rows = [{"text": f"{word} {i}", "label": i % 2} for i, word in enumerate(2 * language.WORDS)]
    for split in ("train", "test"):
        language.jsonl(folders["texts"] / f"{split}.jsonl", rows)
    for name, folder in folders.items():
        repository = f"datasets/owner/{name}" if name == "texts" else f"owner/{name}"
        hub.repositories[repository] = {"main": Commit(repository, folder)}
    hub.written = ask_everywhere(client, hub.folder / "online")
    hub.stop()
    variables = {**environment(hub), "HF_HUB_OFFLINE": "1", "HF_TOKEN": TOKEN}
    with Client(variables, hub.folder / "here") as offline:
        yield {"gone": client, "offline": offline}


@pytest.mark.parametrize("name", LOCAL)
def test_a_data_set_of_the_hub_calibrates_as_its_files_in_a_folder(served, calibrated, name):
    calibrated(served[1], name)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("owner/none", [], "owner/none@main: the hub has no such repository"),
        ("owner/digits@v9", [], "owner/digits@v9: the hub has no such repository or revision"),
        ("bad/gated", [], "hf auth login"),
        ("owner/digits:medium", [], "'medium' not found. Available: ['small', 'large']"),
        ("owner/digits@v1", ["--set", "split=val"], "split \"val\". Should be one of ['train', 't"),
        ("bad/labels", [], "no column 'image'; it has label"),
        ("bad/short", [], "bad/short@main: cannot be read"),
        ("bad/bare", [], "bad/bare@main: "),
    ],
)
def test_what_the_hub_cannot_give_is_one_message(served, place, tmp_path, name, options, said):
    _, client = served
    assert said in complaint_of(client, [*command(place, name, tmp_path / "new"), *options])


def test_a_broken_download_is_one_message_and_goes_on_where_it_was(served, place, tmp_path):
    hub, client = served
    hub.cuts["train.parquet"] = 1000
    assert UNREACHED in complaint_of(client, command(place, "bad/cut", tmp_path / "new"))
    del hub.cuts["train.parquet"]
    assert client.ask("featcal", *command(place, "bad/cut", tmp_path / "new"))[0] == 0
    assert any(request.endswith("train.parquet bytes=1000-") for request in hub.seen)


def pushing(place: Path, out: Path, name: str) -> list[str]:
    models = ["--base", str(place / "base"), "--expert", f"a={place / 'expert'}"]
    return ["merge", "average", *models, "--out", str(out), "--push-to-hub", name]


@pytest.mark.parametrize(
    ("token", "name", "said"),
    [
        ("", "me/other", "hf auth login"),
        ("hf_other", "me/other", "does not know this user"),
        (TOKEN, "me/a name", "must be owner/name"),
    ],
)
def test_who_cannot_push_is_told_before_the_work(served, place, tmp_path, token, name, said):
    _, client = served
    client.ask("token", token)
    assert said in complaint_of(client, pushing(place, tmp_path / "new", name))
    client.ask("token", "")


def test_a_pushed_folder_is_the_one_that_is_written(place, tmp_path, monkeypatch, capsys):
    """With the hub's client replaced by one that copies to a folder, once for each name."""

    def upload(client, repo_id, folder_path, commit_message, delete_patterns):
        for file in (f for p in delete_patterns for f in (tmp_path / "hub" / repo_id).glob(p)):
            file.unlink()
        (tmp_path / "hub" / repo_id).rmdir()
        shutil.copytree(folder_path, tmp_path / "hub" / repo_id)

    (tmp_path / "hub/me/new").mkdir(parents=True)
    for older in ("model-00001-of-00001.safetensors", "model.safetensors.index.json"):
        (tmp_path / "hub/me/new" / older).touch()
    monkeypatch.setattr(HfApi, "whoami", lambda client: {"name": "me"})
    url = RepoUrl("https://huggingface.co/me/new")
    monkeypatch.setattr(HfApi, "create_repo", lambda client, name, exist_ok: url)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    assert cli.main(pushing(place, tmp_path / "new", "new")) == 0
    assert "https://huggingface.co/me/new" in capsys.readouterr().err
    assert tree(tmp_path / "hub/me/new") == tree(tmp_path / "new")
    assert cli.main(pushing(place, tmp_path / "one more", "me/new")) == cli.MISTAKE
    assert f"hf upload me/new '{tmp_path / 'one more'}'" in capsys.readouterr().err
    assert load_vision(tmp_path / "one more")


@pytest.mark.parametrize(
    ("how", "name"),
    [("offline", "owner/digits:large"), ("offline", "owner/digits@v1"), ("gone", "owner/photos")],
)
def test_offline_the_cached_commit_and_configuration_are_read(served, gone, calibrated, name, how):
    calibrated(gone[how], name)
    if name.endswith("@v1"):  # the commit itself can be named too
        commit = served[0].commit("datasets/owner/digits", "v1")
        calibrated(gone[how], name, f"owner/digits@{commit}")


def test_without_a_connection_every_command_takes_models_and_data_from_the_cache(served, gone):
    hub, _ = served
    assert ask_everywhere(gone["offline"], hub.folder / "offline") == hub.written
    assert {"merged/source.spm", "merged/bpe.codes"} <= hub.written.keys()
    for name in ("none", "planned"):  # of the second only the configuration is cached
        code, said = gone["offline"].ask("featcal", "inspect", f"owner/{name}")
        assert code == 2 and f"owner/{name}: {UNREACHED}" in said and said.count("featcal:") == 1


UNREACHED = "not in the local Hugging Face cache, and downloading it failed"


@pytest.mark.parametrize(
    ("how", "name", "said"),
    [
        ("offline", "owner/digits@" + "0" * 40, "run again with network access"),
        ("offline", "owner/photos:large", "'large' not found"),
    ],
)
def test_offline_what_is_not_cached_is_one_message(gone, place, tmp_path, name, how, said):
    assert said in complaint_of(gone[how], command(place, name, tmp_path / "new"))


def test_without_a_connection_a_push_is_refused_before_the_work(gone, place, tmp_path):
    complaint = complaint_of(gone["offline"], pushing(place, tmp_path / "new", "me/new"))
    assert "cannot be reached" in complaint
