"""Statistics that an owner hands on instead of data: RegMean makes the same model of them."""

import language
import pytest
import torch
from language import WORDS, jsonl
from safetensors.torch import load_file, save_file

import featcal
from featcal.cli import main as cli
from featcal.errors import BadBatches, BadFile, NotFinite

EXPERTS = ["--expert", "a=a", "--expert", "b=b"]
DRAWN = ["--samples", "9", "--seed", "3"]


@pytest.fixture(params=["bert", "t5"])
def folders(request, tmp_path, monkeypatch):
    """A base, two experts, and text that is a little different for each."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("base", "a", "b")):
        language.folder(tmp_path / name, request.param, seed)
    for name in "ab":
        keys = ("input", "target") if request.param == "t5" else ("text",)
        jsonl(tmp_path / f"{name}.jsonl", [dict.fromkeys(keys, word + name) for word in WORDS])
    return tmp_path


def stats(name: str) -> int:
    return cli.main(
        ["stats", "--model", name, "--data", f"{name}.jsonl", "--out", f"{name}-stats", *DRAWN]
    )


def test_regmean_of_statistics_is_regmean_of_the_data(folders):
    """But for the rounding of the sums, which are written in float32."""
    assert stats("a") == stats("b") == 0
    merging = ["merge", "regmean", "--base", "base", *EXPERTS]
    assert (
        cli.main(
            [*merging, "--data", "a=a.jsonl", "--data", "b=b.jsonl", *DRAWN, "--out", "of data"]
        )
        == 0
    )
    assert (
        cli.main(
            [*merging, "--stats", "a=a-stats", "--stats", "b=b-stats", "--out", "of statistics"]
        )
        == 0
    )
    ours, theirs = (
        load_file("of statistics/model.safetensors"),
        load_file("of data/model.safetensors"),
    )
    average = featcal.merge("average", "base", {"a": "a", "b": "b"}).state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, rtol=1e-3, atol=1e-4), name
    assert (
        max(float((tensor - average[name]).abs().max()) for name, tensor in theirs.items()) > 1e-2
    )  # it is no mean
    assert (folders / "of statistics/merge.json").read_text() == (
        folders / "of data/merge.json"
    ).read_text()


def test_too_few_samples_name_the_data_and_not_the_folder_to_write(folders, capsys):
    assert (
        cli.main(
            ["stats", "--model", "a", "--data", "a.jsonl", "--out", "new", "--samples", "1000"]
        )
        == cli.MISTAKE
    )
    assert (
        "--samples: 1000 cannot be used" in (told := capsys.readouterr().err) and "a.jsonl" in told
    )


def test_statistics_that_are_missing_broken_or_another_models_are_refused_by_name(folders, capsys):
    assert stats("a") == stats("b") == 0
    experts, given = (
        {"a": "a", "b": "b"},
        {name: featcal.Statistics(f"{name}-stats") for name in "ab"},
    )
    with pytest.raises(BadBatches, match="b.*has no statistics"):
        featcal.merge("regmean", "base", experts, batches={"a": given["a"], "b": []})
    with pytest.raises(BadBatches, match="which only regmean"):
        featcal.merge("regmean_plus_plus", "base", experts, batches=given)
    assert (
        cli.main(
            ["merge", "lot", "--base", "base", *EXPERTS, "--stats", "a=a-stats", "--out", "new"]
        )
        == cli.MISTAKE
    )
    assert "--stats" in capsys.readouterr().err and not (folders / "new").exists()
    with pytest.raises(BadFile, match=r"no statistics\.json"):
        featcal.Statistics("a")
    sums = load_file("a-stats/model.safetensors")
    name = next(name for name in sums if name.startswith("gram."))
    for harm, error in ((sums[name][:-1, :-1], BadFile), (sums[name] * torch.inf, NotFinite)):
        save_file(sums | {name: harm.contiguous()}, "a-stats/model.safetensors")
        with pytest.raises(error, match="a-stats"):
            featcal.merge(
                "regmean", "base", experts, batches=given | {"a": featcal.Statistics("a-stats")}
            )
