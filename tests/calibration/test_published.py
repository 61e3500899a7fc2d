"""Moments that an owner publishes in the place of samples: what they add to a system, and where
they say as much.
"""

from pathlib import Path

import language
import pytest
import torch
import transformers as tf
from families import text
from language import WORDS, jsonl
from safetensors.torch import load_file, save_file
from tiny import PAPER, TEXT, averaged, clip, difference, images, make, shifted

import featcal
from featcal.cli import main as cli
from featcal.core.moments import Moments
from featcal.core.ridge import task_system
from featcal.errors import BadBatches, BadFile, BadSetting
from featcal.models.save import save_model
from featcal.settings import Calibration

BUILT = {  # of one block; of CLIP it is the last one, too, where patches count less
    "clip": (
        lambda: clip(dtype=torch.float32, num_hidden_layers=1),
        lambda seed: images(seed, dtype=torch.float32),
    ),
    "bert": (
        lambda: make(
            lambda: tf.BertModel(tf.BertConfig(**TEXT | {"num_hidden_layers": 1})),
            dtype=torch.float32,
        ),
        text,
    ),
}


def test_the_share_of_an_expert_s_own_moments_by_hand_whatever_alpha_is():
    """G = diag(2, 1), W = (1, 2), b = 3, μ = (1, 0): ω = 1/√5, ωGWᵀ = (2, 2)/√5, ω(Wμ + b) =
    4/√5.
    """
    G, mean, one = (
        torch.diag(torch.tensor([2.0, 1.0], dtype=torch.float64)),
        torch.tensor([1.0, 0.0]).double(),
        torch.ones(()),
    )
    W, b, root = torch.tensor([[1.0, 2.0]]), torch.tensor([3.0]), 5**0.5
    for alpha in (0.0, 0.3, 1.0):
        share = task_system(
            Moments(G.clone(), G.clone(), mean.clone(), mean.clone(), one.double()), W, b, alpha
        )
        torch.testing.assert_close(share.left, G / root)
        torch.testing.assert_close(share.right, torch.tensor([[2.0], [2.0]]).double() / root)
        torch.testing.assert_close(share.y, torch.tensor([4.0]).double() / root)


@pytest.fixture(params=BUILT)
def given(request, tmp_path):
    """A base and two experts in folders, batches of both, and the moments of "a"."""
    build, batches = BUILT[request.param]
    base = build()
    experts = {task: shifted(base, i + 1) for i, task in enumerate("ab")}
    folders = {task: save_model(model, tmp_path / task) for task, model in experts.items()}
    data = {task: batches(i + 5) for i, task in enumerate("ab")}
    moments = featcal.Statistics(featcal.statistics(folders["a"], data["a"], tmp_path / "moments"))
    return {"base": base, "experts": experts, "batches": data}, data | {"a": moments}


def test_of_a_merged_model_that_is_the_expert_moments_give_what_samples_give(given):
    """Its features of the task are the expert's: linears, biases and norms are those of the
    samples, but for rounding.
    """
    arguments, published = given
    for merged, exact in (
        (arguments["experts"]["a"], True),
        (averaged([*arguments["experts"].values()]), False),
    ):
        of_samples = featcal.calibrate(merged, **arguments, settings=PAPER).model
        of_moments = featcal.calibrate(
            merged, **arguments | {"batches": published}, settings=PAPER, held_out={}
        )
        assert (difference(of_samples, of_moments.model) < 1e-5) == exact
        assert difference(of_moments.model, merged) > 1e-2 and [
            one.expert for one in of_moments.drift
        ] == ["b"]


def test_what_moments_cannot_tell_is_refused_by_name(given, tmp_path):
    arguments, published = given
    merged = averaged([*arguments["experts"].values()])
    beyond = {
        "order": "sites",
        "residual": 1.0,
        "weights": "attention",
        "shrinkage": "ledoit_wolf",
        "no_harm": True,
    }
    for more in ({name: value} for name, value in beyond.items()):
        with pytest.raises(
            BadSetting, match=f"calibrate.{next(iter(more))}.*of a|{next(iter(more))}.*a has none"
        ):
            featcal.calibrate(
                merged, **arguments | {"batches": published}, settings=Calibration(**more)
            )
    with pytest.raises(BadBatches, match="samples"):
        one = {"experts": {"a": arguments["experts"]["a"]}, "batches": {"a": published["a"]}}
        featcal.calibrate(merged, **arguments | one, settings=PAPER)
    file = tmp_path / "moments/model.safetensors"
    save_file(
        {name: value for name, value in load_file(file).items() if not name.startswith("mean.")},
        file,
    )  # RegMean's alone
    with pytest.raises(BadFile, match="written again"):
        featcal.calibrate(
            merged,
            **arguments | {"batches": published | {"a": featcal.Statistics(file.parent)}},
            settings=PAPER,
        )


def test_the_command_takes_moments_beside_data_and_goes_on_where_it_was(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("base", "a", "b")):
        language.folder(Path(name), "bert", seed)
        jsonl(Path(f"{name}.jsonl"), [{"text": word} for word in WORDS])
    models = ["--base", "base", "--expert", "a=a", "--expert", "b=b"]
    assert cli.main(["merge", "average", *models, "--out", "merged"]) == 0
    assert (
        cli.main(
            ["stats", "--model", "b", "--data", "b.jsonl", "--out", "b-stats", "--samples", "9"]
        )
        == 0
    )
    command = [
        "calibrate",
        "--merged",
        "merged",
        *models,
        "--data",
        "a=a.jsonl",
        "--samples",
        "9",
        "--out",
        "new",
    ]
    assert (
        cli.main([*command, "--stats", "b=b-stats", "--dry-run"]) == 0 and not Path("new").exists()
    )
    assert cli.main([*command, "--stats", "b=b-stats"]) == 0
    assert "moments of b" in Path("new/README.md").read_text()
    capsys.readouterr()
    for wrong in (["--stats", "b=a"], ["--stats", "b=b-stats", "--stats", "a=b-stats"], []):
        assert cli.main([*command, "--force", *wrong]) == cli.MISTAKE
        assert "Traceback" not in capsys.readouterr().err
